import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from adaptiveload.data.index import INDEX_NAME, ShardIndex
from scripts import index_shards, inspect_data, prepare, sample_media
from tests.data.media_files import grey, picture_bytes, write_clip

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["prepare", "index_shards", "sample_media"])
def test_help(name):
    command = [sys.executable, "-m", f"scripts.{name}", "--help"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"python -m scripts.{name}" in output


def test_prepare_from_the_command_line(tmp_path, capsys):
    media = tmp_path / "media"
    media.mkdir()
    write_clip(media / "clip.mp4", (grey(i) for i in range(9)))
    (media / "picture.png").write_bytes(picture_bytes())
    for name in ("clip", "picture"):
        (media / f"{name}.txt").write_text(name)
    arguments = ["--input", str(media), "--output", str(tmp_path / "out"), "--shapes", "1,48,64;9,48,64"]
    prepare.main(arguments)
    assert "2 samples of 2 shapes from 2 of 2 inputs" in capsys.readouterr().out
    ShardIndex.read(tmp_path / "out").verify()
    with pytest.raises(SystemExit, match="exists; pass --overwrite"):
        prepare.main(arguments)
    prepare.main([*arguments, "--overwrite"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--codec", "wan_vae"],
        ["--vae-dir", "x"],
        ["--workers", "0"],
        ["--samples-per-shard", "0"],
        ["--device", "cuda:3"],
        ["--precision", "bf16"],
    ],
)
def test_prepare_refuses_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit):
        prepare.main(["--input", "a", "--output", "b", "--shapes", "1,16,16", *arguments])
    assert arguments[0] in capsys.readouterr().err.rpartition("error: ")[2], "not in the usage, which names all options"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--output": "file/below"}, "prepare: .*Not a directory: .*file/"),
        ({"--config": "gone.yaml"}, r"gone\.yaml \(rules for cutting\) cannot be read"),
        ({"--config": "file"}, "file .* cannot be read"),
        ({"--input": "gone"}, "gone is neither a folder"),
    ],
)
def test_prepare_names_bad_paths_in_words(tmp_path, changes, message):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "picture.png").write_bytes(picture_bytes())
    (tmp_path / "media" / "picture.txt").write_text("a picture")
    (tmp_path / "file").write_text("shapes: [1")
    paths = {"--input": "media", "--output": "out", **changes}
    arguments = [word for option, name in paths.items() for word in (option, str(tmp_path / name))]
    with pytest.raises(SystemExit, match=message):
        prepare.main([*arguments, *([] if "--config" in changes else ["--shapes", "1,48,64"])])


def test_index_shards_from_the_command_line(dataset, tmp_path, capsys):
    folder = shutil.copytree(dataset, tmp_path / "latents")
    before = ShardIndex.read(folder)
    os.remove(folder / INDEX_NAME)
    index_shards.main([str(folder)])
    assert ShardIndex.read(folder).fingerprint == before.fingerprint
    shard = folder / "shard-000002.tar"
    # The last 10 KiB of a tar may be padding; cut more.
    shard.write_bytes(shard.read_bytes()[:-14336])
    with pytest.raises(SystemExit, match="nothing written"):
        index_shards.main([str(folder)])
    assert "shard-000002.tar" in capsys.readouterr().err
    assert ShardIndex.read(folder).fingerprint == before.fingerprint
    index_shards.main([str(folder), "--skip-damaged"])
    after = ShardIndex.read(folder)
    after.verify()
    assert 50 <= len(after) < 60


def test_the_quickstart_media_give_a_mixed_dataset(tmp_path, capsys):
    """What a first user runs: every file used, shapes mixed, most samples video, latents of unit variance."""
    sample_media.main(["--output", str(tmp_path / "media")])
    files = list((tmp_path / "media").iterdir())
    assert len(files) == 2 * 32  # one caption a file
    config = ROOT / "configs" / "data" / "quickstart.yaml"
    arguments = ["--input", str(tmp_path / "media"), "--output", str(tmp_path / "latents"), "--config", str(config)]
    prepare.main(arguments)
    out = capsys.readouterr().out
    assert "from 32 of 32 inputs" in out
    index = ShardIndex.read(tmp_path / "latents")
    index.verify()
    table = index.sample_table(index.info.geometry)
    assert len(index) >= 240
    assert len(table.shapes) == 16
    assert {shape.frames for shape in table.shapes} == {1, 5, 9, 17, 33}
    assert len({shape.width / shape.height for shape in table.shapes}) >= 5
    assert len(set(index.sources)) == 32
    assert (index.frames > 1).mean() > 0.6
    assert table.num_tokens.min() == 16
    assert 400 <= table.num_tokens.max() <= 500
    report = json.loads((tmp_path / "latents" / "report.json").read_text())
    assert report["psnr_db"]["mean"] >= 24
    stats = report["latent_stats"]["all"]
    # The codec's constants were measured on this very set; they are rounded, and decoders differ by a level or so.
    assert all(0.97 < std < 1.03 for std in stats["std"])
    assert all(abs(mean) < 0.03 for mean in stats["mean"])


def test_inspect_data(tmp_path, capsys):
    media = tmp_path / "media"
    media.mkdir()
    write_clip(media / "clip.mp4", (grey(i) for i in range(9)))
    (media / "picture.png").write_bytes(picture_bytes())
    for name in ("clip", "picture"):
        (media / f"{name}.txt").write_text(f"this is the {name}")
    output = str(tmp_path / "out")
    prepare.main(["--input", str(media), "--output", output, "--shapes", "1,48,64;9,48,64"])
    assert (tmp_path / "out" / "buckets.png").stat().st_size > 1000
    capsys.readouterr()
    pictures = ["--histogram", str(tmp_path / "h.png"), "--contact-sheet", str(tmp_path / "c.png")]
    inspect_data.main([output, "--verify", *pictures])
    table = capsys.readouterr().out
    assert "2 samples of 2 sources in 1 shards" in table
    assert [line.split()[:3] for line in table.splitlines()[-2:]] == [["1x48x64", "12", "1"], ["9x48x64", "36", "1"]]
    assert Image.open(tmp_path / "h.png").width > 500
    assert Image.open(tmp_path / "c.png").width > 100
    key = ShardIndex.read(output).keys[0]
    inspect_data.main([output, "--key", key])
    text = capsys.readouterr().out
    assert "this is the clip" in text
    assert '"source_hash"' in text
    with pytest.raises(SystemExit, match=r"no sample 'media-clip'.*there is media-clip"):
        inspect_data.main([output, "--key", "media-clip"])


@pytest.mark.parametrize(
    ("task", "first", "last", "count", "part"),
    [(5, 0, 15, 16, "5/16"), (7, 4, 7, 4, "3/4"), (3, 3, 7, 2, None), (14, 0, 14, 8, None)],
)
def test_array_with_gaps_is_refused(tmp_path, task, first, last, count, part):
    """As of `--array=0-15%4`, `4-7`, `3,7` (its parts were once 0/2 and 4/2) and `0-15:2`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text("")
    (tmp_path / "bin" / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "bin" / "srun").chmod(0o755)
    values = {"ID": task, "MIN": first, "MAX": last, "COUNT": count}
    environment = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}
    environment |= {"VENV": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", "scripts/slurm/prepare_array.sbatch", "--input", "media"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if part is None:
        assert result.returncode == 2
        assert "submit a range without gaps" in result.stderr
    else:
        assert result.stdout == f"python -m scripts.prepare --part {part} --workers 1 --input media\n"
