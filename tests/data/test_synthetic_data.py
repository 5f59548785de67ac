"""scripts.synthetic_data: a dataset as any other, in the shapes of a mix."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from adaptiveload.data.index import ShardIndex
from adaptiveload.data.reader import SampleReader
from scripts.synthetic_data import main


def test_a_mix_becomes_a_dataset(tmp_path: Path) -> None:
    shapes = [(1, 32, 48, 0.5), (5, 32, 32, 0.5)]
    rows = [dict(zip(("frames", "height", "width", "share"), shape, strict=True)) for shape in shapes]
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump({"shapes": rows}))
    command = ["--mix", str(tmp_path / "mix.yaml"), "--output", str(tmp_path / "latents"), "--num-samples", "20"]
    main([*command, "--text-dim", "16", "--text-len", "8"])
    index = ShardIndex.read(tmp_path / "latents")
    index.verify()
    assert len(index) == 20
    assert {tuple(index.shape(i)) for i in range(20)} == {shape[:3] for shape in shapes}
    assert len(set(index.text_lens.tolist())) > 1
    assert index.text_lens.max() <= 8
    latents = np.concatenate([SampleReader(index).read(index.place(i)).latents.ravel() for i in range(20)])
    assert latents.std() == pytest.approx(1, abs=0.05)
    with pytest.raises(SystemExit, match="exists"):
        main(command)
