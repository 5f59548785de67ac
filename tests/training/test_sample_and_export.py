"""scripts.sample and scripts.export in this process, on runs of no steps: what they refuse, and how early."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from adaptiveload.data.corpus import Corpus, SourceConfig, open_corpus
from adaptiveload.models.pretrained import read_model_config
from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.shapes import LatentGeometry
from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import Ranks
from adaptiveload.training.run import build_run
from adaptiveload.training.samples import choose_samples
from scripts.export import export_run
from scripts.export import main as export
from scripts.sample import _minutes, parse_args, released_fps, sample


def write_run(run_config: Path, ranks: Ranks, folder: Path, *keys: str) -> Path:
    """A run in `folder` with a checkpoint of what it begins with."""
    settings = (f"output_dir={folder}", "name=run", "evaluation.max_samples=0", *keys)
    run = build_run(load_config(run_config, settings), ranks)
    run.checkpointer.save(0, {"num_lost": 0, "num_skipped": 0, "position": 0, **run.schedule.identity})
    run.checkpointer.finish()
    run.feed.close()
    if run.tracker is not None:
        run.tracker.close()
    return folder / "run"


def save_weights(config: WanConfig, folder: Path, seed: int) -> None:
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(seed)
    WanTransformer3DModel(**config.to_diffusers()).save_pretrained(folder)


@pytest.mark.parametrize("trained", ["lora.rank=2", "model.trainable=[blocks.1]"])
def test_other_frozen_weights_are_refused_wherever_they_are_read(
    run_config: Path, ranks: Ranks, tmp_path: Path, trained: str
) -> None:
    config, given = load_config(run_config).model, tmp_path / "given"
    save_weights(config, given, seed=7)
    keys = (trained, f"model.pretrained={given}")
    run_dir = write_run(run_config, ranks, tmp_path, *keys)
    has_adapters = trained.startswith("lora")
    options = parse_args(["--run", str(run_dir), "--num-samples", "1", "--steps", "1"])
    export_run(run_dir, tmp_path / "whole", ema=True, merge=has_adapters)
    assert sample(options, ranks).is_file()
    save_weights(config, given, seed=8)
    with pytest.raises(ValueError, match=r"made with model\.pretrained="):
        export_run(run_dir, tmp_path / "other", ema=True, merge=has_adapters)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ValueError, match=r"made with model\.pretrained="):
        sample(options, ranks)
    with pytest.raises(ValueError, match=r"made with model\.pretrained="):
        write_run(run_config, ranks, tmp_path, *keys)
    if has_adapters:
        export_run(run_dir, tmp_path / "adapters", ema=True)  # reads nothing of what changed


@pytest.fixture(scope="module")
def run_dir(run_config: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(run_config, ranks, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copy(run_dir: Path, dataset: Path, tmp_path: Path) -> Path:
    """The run and its data set, to be damaged: folders `run` and `data`."""
    shutil.copytree(dataset, tmp_path / "data")
    shutil.copytree(run_dir, tmp_path / "run")
    set_keys(tmp_path, "data", path=str(tmp_path / "data"))
    return tmp_path


def set_keys(copy: Path, section: str, **values: object) -> None:
    path = copy / "run" / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config[section] |= values
    path.write_text(yaml.safe_dump(config))


def options_of(copy: Path, *more: str):
    return parse_args(["--run", str(copy / "run"), "--steps", "1", "--guidance", "1", *more])


def spoil(corpus: Corpus, rows: list[int]) -> None:
    """Zeros in place of these samples."""
    for row in rows:
        place = corpus.place(row)
        with Path(corpus.sources[0].path, place.shard).open("r+b") as shard:
            shard.seek(place.offset)
            shard.write(bytes(place.size))


def test_media_that_are_not_there_are_refused_before_anything_is_sampled(copy: Path, ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        sample(options_of(copy, "--media", str(copy / "nowhere")), ranks)
    assert not (copy / "run" / "samples").exists()


def test_samples_that_cannot_be_read(copy: Path, ranks: Ranks) -> None:
    corpus = open_corpus([SourceConfig(path=str(copy / "data"))], LatentGeometry())
    rows = choose_samples(corpus, 0.1, 0, 4)
    prompt = options_of(copy, "--prompt", "clip number 3")
    spoil(corpus, rows[:1])
    sample(prompt, ranks)
    assert len(list((copy / "run" / "samples").glob("prompt00_*"))) == 1
    spoil(corpus, rows[1:])
    for options in (prompt, options_of(copy)):
        with pytest.raises(ValueError, match="none of the 4 samples"):
            sample(options, ranks)


def test_a_stream_without_an_index_cannot_be_sampled(copy: Path, ranks: Ranks) -> None:
    set_keys(copy, "data", mode="stream", held_out_share=0)
    set_keys(copy, "schedule", policy="local")
    sample(options_of(copy, "--num-samples", "1"), ranks)  # there is one all the same
    (copy / "data" / "index.parquet").unlink()
    with pytest.raises(ValueError, match=r"index\.parquet is missing.*data\.mode=stream.*scripts\.index_shards"):
        sample(options_of(copy), ranks)


def test_files_of_prompts(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "prompts.txt"
    arguments = ["--run", "run", "--prompts", str(path)]
    for content, message in ((None, "No such file"), (b"\n \n", "no prompt there"), (b"caf\xe9", "decode")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(SystemExit):
            parse_args(arguments)
        assert f"--prompts {path}: " in (told := capsys.readouterr().err)
        assert message in told
    path.write_text("a cat\n\n a dog \n")
    assert parse_args(arguments).prompt == ["a cat", "a dog"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model m --weights last", "--weights"),
        ("--model m --num-samples 2", "--num-samples goes with captions"),
        ("--model m --media clips", "--media goes with captions"),
        ("--run r --prompt cat --num-samples 2", "--num-samples goes with captions"),
        ("--run r --prompt cat --media clips", "--media goes with captions"),
        ("--run r --negative-prompt dog", "--negative-prompt goes with new prompts"),
        ("--run r --text-encoder-dir wan", "--text-encoder-dir goes with new prompts"),
        ("--run r --num-samples 0", "--num-samples 0"),
        ("--run r --fps 0", "--fps 0"),
        ("--run r --fps -3", "--fps -3"),
        ("--run r --fps nan", "--fps nan"),
        ("--run r --guidance nan", "--guidance=nan"),
        ("--run r --guidance inf", "--guidance=inf"),
        ("--run r --shift inf", "--shift=inf"),
        ("--run r --steps 0", "--steps=0"),
    ],
)
def test_options_that_would_be_ignored_or_make_no_sense(
    arguments: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        parse_args(arguments.split())
    assert message in capsys.readouterr().err


def test_released_models_make_their_own_frames_per_second(tmp_path: Path) -> None:
    for channels, fps in ((16, 16.0), (48, 24.0)):
        config = WanConfig(in_channels=channels, out_channels=channels).to_diffusers()
        (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanTransformer3DModel", **config}))
        assert released_fps(read_model_config(tmp_path)) == fps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--run gone --output out", r"export: gone/config\.yaml: no such configuration file"),
        ("--run run --output file", "export: .*Not a directory: 'file'"),
        ("--run run --output file/below", "export: .*Not a directory: 'file/below'"),
        ("--run run --output run", "export: run is not empty"),
        ("--run run --output out --max-file-mb 0", "--max-file-mb 0: must be at least 1"),
    ],
)
def test_export_names_bad_input_in_words(
    arguments: str,
    message: str,
    run_config: Path,
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    if "--run run" in arguments:
        write_run(run_config, ranks, tmp_path)
    (tmp_path / "file").write_text("a file")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        export(arguments.split())
    assert re.search(message, f"{ended.value.code}{capsys.readouterr().err}")
    assert not (tmp_path / "out").exists()


def test_a_row_that_is_half_written_is_no_minute(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "perf/step_s": 60}\n{"step": 1, "perf/st')
    assert _minutes(tmp_path) == 1
    assert _minutes(tmp_path / "gone") == 0
