"""Preparation by several processes, stopped and started again, of changed media, of streamed shards, of long clips."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from adaptiveload.data.cuts import CutConfig
from adaptiveload.data.index import ShardIndex
from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.prepare import PrepareConfig, _Progress, prepare
from adaptiveload.data.raw import Unit, plan_units
from adaptiveload.data.reader import SampleReader
from adaptiveload.data.text import HashTextEncoder
from adaptiveload.scheduling.shapes import Shape
from tests.data.media_files import grey, level, picture_bytes, write_clip, write_tar
from tests.launching import PLAIN, ROOT, environment, kill_all, launch_command

CUTS = CutConfig(shapes=(Shape(1, 48, 64), Shape(5, 48, 64)), clips_per_shape=2)
CONFIG = PrepareConfig(items_per_unit=3, samples_per_shard=2)


def run(inputs, output, cuts=CUTS, config=CONFIG, **processes):
    return prepare(inputs, output, cuts, DctCodec(), HashTextEncoder(16), config, **processes)


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    root = tmp_path_factory.mktemp("raw") / "media"
    root.mkdir()
    for i in range(10):
        if i % 2:
            write_clip(root / f"{i}.mp4", (grey(i + k) for k in range(8)))
        else:
            (root / f"{i}.png").write_bytes(picture_bytes(i))
        (root / f"{i}.json").write_text(json.dumps({"caption": f"number {i}", "score": i / 2, "captions": {"s": "x"}}))
    return root


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_any_number_of_processes_gives_the_same_bytes(media, tmp_path):
    run([media], tmp_path / "alone")
    for rank in (2, 1, 0):
        run([media], tmp_path / "shared", rank=rank, world_size=3)
    assert contents(tmp_path / "alone") == contents(tmp_path / "shared")
    # Parts that never meet: the last to finish completes the dataset, wherever it stands; one came too late for a unit.
    for part in (4, 1, 3, 0, 2, 5):
        done = run([media], tmp_path / "parts", rank=part, world_size=6, all_have_begun=None)
        assert (done is not None) == (part == 2)
    assert contents(tmp_path / "alone") == contents(tmp_path / "parts")
    index = ShardIndex.read(tmp_path / "alone")
    assert index.info.captions == ("s",)
    sample = SampleReader(index).read(index.place(0))
    assert sample.meta["fields"] == {"score": 0.0}
    assert sample.captions == {"caption": "number 0", "s": "x"}
    assert len(sample.meta["source_hash"]) == 32


def test_killed_launches_go_on_and_end_with_the_same_bytes(media, tmp_path):
    """Two processes of one launch, killed at random moments, then three."""
    arguments = ["--input", media, "--shapes", "1,48,64;5,48,64", "--items-per-unit", 2, "--samples-per-shard", 2]
    command = [sys.executable, "-m", "scripts.prepare", *map(str, arguments), "--output", str(tmp_path / "alone")]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True)
    rng = random.Random(0)
    output = tmp_path / "out"
    for attempt in range(3):
        if output.exists():
            break
        ranks = 2 if attempt < 2 else 3
        command = launch_command(
            "scripts.prepare", *arguments, "--output", output, ranks=ranks, script="-m", launcher=PLAIN
        )
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)
        if attempt == 2:
            assert process.wait(timeout=120) == 0
            break
        markers, deadline = tmp_path / ".out.unfinished" / ".units", time.monotonic() + 60
        while len(list(markers.glob("*.json"))) <= attempt and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        if process.poll() is None:
            kill_all(process)
        process.wait()
    found, expected = contents(output), contents(tmp_path / "alone")
    for files in (found, expected):
        assert files.pop("buckets.png").startswith(b"\x89PNG"), (
            "a part of the dataset: a kill comes before or after both"
        )
    assert found == expected
    assert not (tmp_path / ".out.unfinished").exists()


class _Stops(DctCodec):
    """Fails at the seventh clip, as a full disk would."""

    count = 0

    def encode(self, frames):
        self.count += 1
        if self.count == 7:
            raise OSError("no space left")
        return super().encode(frames)


def stop_in_the_middle(inputs, output):
    with pytest.raises(OSError, match="no space left"):
        prepare(inputs, output, CUTS, _Stops(), HashTextEncoder(16), CONFIG)


def test_going_on_with_other_settings_or_inputs_is_refused(media, tmp_path):
    copy = shutil.copytree(media, tmp_path / "media")
    stop_in_the_middle([copy], tmp_path / "out")
    with pytest.raises(ValueError, match="unfinished preparation with other cuts"):
        run([copy], tmp_path / "out", CutConfig(shapes=CUTS.shapes, fps=8))
    (copy / "5b.png").write_bytes(picture_bytes(3))
    with pytest.raises(ValueError, match="unfinished preparation with other inputs"):
        run([copy], tmp_path / "out")
    (copy / "5b.png").unlink()
    run([copy], tmp_path / "out")
    run([copy], tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_progress_tells_speed_and_time_left_of_what_is_still_to_do(media, tmp_path, monkeypatch, capsys):
    stop_in_the_middle([media], tmp_path / "out")
    units = len(plan_units([media], CONFIG.items_per_unit))
    finished = len(list((tmp_path / ".out.unfinished" / ".units").glob("*.json")))
    assert 0 < finished < units
    monkeypatch.setattr("adaptiveload.data.prepare._PROGRESS_S", 0.0)
    run([media], tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(unit.num_items for unit in plan_units([media], CONFIG.items_per_unit)[finished:])
    assert lines[0].startswith(f"unit 1 of {units - finished}, 1 items: ")
    assert all(re.search(r"\d items/s, [\d.]+ samples/s a process, about [\d.]+ minutes left$", line) for line in lines)
    progress = _Progress([Unit("a", "", list, 4), Unit("b", "", list), Unit("c", "", list)], is_told=True)
    progress.add_item(3)
    assert "1 items: 0.1 items/s, 0.3 samples/s a process, about 2 minutes left" in progress.describe(10)
    for _ in range(3):
        progress.add_item(3)
    progress.end_unit()
    progress.add_item(3)  # how many items are in a shard is not known
    assert progress.describe(3600).startswith("unit 2 of 3, 5 items: ")
    assert progress.describe(3600).endswith("about 2.0 hours left")
    unknown = _Progress([Unit("b", "", list)], is_told=True)
    unknown.add_item(1)
    assert unknown.describe(10).endswith("time left not known yet")


def test_media_that_changed_since_a_finished_unit_are_refused_by_name(media, tmp_path):
    """A clip swapped for another of the same name, size and time: its latents must not stay."""
    copy = shutil.copytree(media, tmp_path / "media")
    clips = [(copy / f"{i}.mp4").read_bytes() for i in (1, 3)]
    size = max(map(len, clips)) + 8
    padded = [data + (size - len(data)).to_bytes(4, "big") + b"free" + b"\0" * (size - len(data) - 8) for data in clips]
    (copy / "1.mp4").write_bytes(padded[0])
    os.utime(copy / "1.mp4", (1e9, 1e9))
    stop_in_the_middle([copy], tmp_path / "out")
    (copy / "1.mp4").write_bytes(padded[1])
    os.utime(copy / "1.mp4", (1e9, 1e9))
    with pytest.raises(ValueError, match=r"media/1\.mp4 has changed since it was prepared"):
        run([copy], tmp_path / "out")
    marker = next((tmp_path / ".out.unfinished" / ".units").glob("000000.json"))
    marker.unlink()
    index, _ = run([copy], tmp_path / "out")
    reader = SampleReader(index)
    places = [index.place(i) for i in range(len(index)) if index.sources[i] == "media/1.mp4"]
    assert places
    assert {level(DctCodec().decode(reader.read(place).latents)[0]) - 3 for place in places} <= {0, 3}


def test_shards_come_from_pipes_and_braces(media, tmp_path):
    paths = sorted(media.iterdir())
    for number in range(2):
        members = [(path.name, path.read_bytes()) for path in paths[10 * number : 10 * number + 10]]
        write_tar(tmp_path / f"raw-{number}.tar", members)
    braces, _ = run([f"{tmp_path}/raw-{{0..1}}.tar"], tmp_path / "braces")
    piped, report = run([f"pipe:cat {tmp_path}/raw-{{0..1}}.tar"], tmp_path / "piped")
    assert len(braces) == len(piped) == 5 + 5 * 2
    for index in (braces, piped):
        index.verify()
    assert report["damaged"] == []
    _, report = run([f"{tmp_path}/raw-0.tar", f"pipe:head -c 9000 {tmp_path}/raw-1.tar; exit 3"], tmp_path / "torn")
    assert len(report["damaged"]) == 1
    assert "whole samples before it" in report["damaged"][0]["reason"]


def test_a_long_clip_takes_bounded_memory(tmp_path):
    """1,500 frames of 640x360 are 1 GiB as RGB; a process of its own, so that its peak is its own."""
    media = tmp_path / "media"
    media.mkdir()
    frames = (np.full((360, 640, 3), 20 + k % 200, np.uint8) for k in range(1500))
    write_clip(media / "long.mp4", frames, fps=30, crf="30", preset="ultrafast", g="60")
    (media / "long.txt").write_text("a long clip")
    (tmp_path / "cuts.yaml").write_text("{shapes: [[17, 176, 320]], selection: sliding}")
    code = (
        "import resource, sys; from scripts.prepare import main; import adaptiveload.data.prepare, matplotlib.pyplot;"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "main(sys.argv[1:]);"
        "print('GROWTH', (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024)"
    )
    arguments = ["--input", media, "--output", tmp_path / "out", "--config", tmp_path / "cuts.yaml"]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    output = subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, text=True).stdout
    assert "47 samples of 1 shapes" in output  # 800 frames at 16 per second
    growth_mib = int(output.split("GROWTH ")[1])
    print(f"peak grew by {growth_mib} MiB")
    assert growth_mib < 400
