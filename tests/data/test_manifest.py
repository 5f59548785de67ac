"""Manifests of every kind give the same items, rows that cannot be used are named, and parts of clips are right."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from adaptiveload.data.cuts import Cut, CutConfig
from adaptiveload.data.encode import cut_frames
from adaptiveload.data.media import MediaError, probe_video
from adaptiveload.data.raw import find_inputs, plan_units
from adaptiveload.scheduling.shapes import Shape
from tests.data.media_files import grey, level, write_clip

ROWS = [
    {"videoID": "a.mp4", "timestamp": "['0:00:00.500', '0:00:01.500']", "caption": "first,\npart", "aesthetic": 4.5},
    {"videoID": "a.mp4", "timestamp": "['0:00:01.500', '0:00:02.500']", "caption": "second part", "aesthetic": 5.0},
    {"videoID": "b.png", "timestamp": "", "caption": 'a "picture" of a café', "aesthetic": 3.0},
]


def write(path, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("items_per_unit", [1, 2, 100])
def test_every_kind_gives_the_same_items_in_units_of_any_size(tmp_path, suffix, items_per_unit):
    path = write(tmp_path / f"koala{suffix}", ROWS)
    units = plan_units([path], items_per_unit, media_root="/videos")
    assert sum(unit.num_items for unit in units) == 3
    items = [item for unit in units for item in unit.read()]
    assert [item.name for item in items] == ["a.mp4@0.500-1.500", "a.mp4@1.500-2.500", "b.png"]
    assert [item.source for item in items] == ["a.mp4", "a.mp4", "b.png"]
    assert [item.path for item in items] == ["/videos/a.mp4", "/videos/a.mp4", "/videos/b.png"]
    assert [(item.start_s, item.end_s) for item in items] == [(0.5, 1.5), (1.5, 2.5), (0.0, None)]
    assert [item.caption for item in items] == ["first, part", "second part", 'a "picture" of a café']
    assert [float(item.fields["aesthetic"]) for item in items] == [4.5, 5.0, 3.0]


def test_further_captions_start_and_end_and_urls(tmp_path):
    row = {"path": "s3://bucket/c.mp4", "start": 1.5, "end": "0:01:02", "caption": "long", "caption_short": "s"}
    (item,) = find_inputs([write(tmp_path / "a.jsonl", [row])]).items
    assert (item.path, item.start_s, item.end_s, item.captions) == ("s3://bucket/c.mp4", 1.5, 62.0, {"short": "s"})


def test_rows_that_cannot_be_used_are_named(tmp_path):
    good = {"path": "a.mp4", "caption": "fine"}
    bad = [
        ({"path": "a.mp4", "caption": "again"}, "comes twice"),
        ({"path": "", "caption": "x"}, "`path` is empty"),
        ({"path": "notes.pdf", "caption": "x"}, "no known kind of media"),
        ({"path": "b.mp4", "caption": ""}, "the caption is empty"),
        ({"path": "c.mp4", "caption": None}, "not a text"),
        ({"path": "d.mp4", "caption": "x", "timestamp": "yesterday"}, "expected two times"),
        ({"path": "e.mp4", "caption": "x", "start": 5, "end": 4}, "no part of a clip"),
        ({"path": "f.mp4", "caption": "x", "start": "soon"}, "neither seconds nor H:M:S"),
    ]
    path = write(tmp_path / "a.jsonl", [good, *(row for row, _ in bad)])
    path.write_text(path.read_text() + '{"path": "cut.mp4", "capt\n[1]\n')
    found = find_inputs([path])
    assert [item.name for item in found.items] == ["a.mp4"]
    reasons = [problem.reason for problem in found.skipped]
    assert len(reasons) == len(bad) + 2
    for reason, expected in zip(reasons, [*(text for _, text in bad), "broken JSON", "no JSON object"], strict=True):
        assert expected in reason


def test_captions_in_other_encodings_are_skipped_by_row(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"path,caption\na.png,caf\xe9\nb.png," + "café".encode() + b"\nc.png\n")
    found = find_inputs([path])
    assert [(item.name, item.caption) for item in found.items] == [("b.png", "café")]
    assert "surrogates" in found.skipped[0].reason
    assert "1 cells, the header has 2" in found.skipped[1].reason


def test_a_manifest_without_its_columns_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", [{"name": "a.mp4", "text": "x"}])
    with pytest.raises(ValueError, match=r"needs `caption` and one of path.*it has \['name', 'text'\]"):
        plan_units([path])
    with pytest.raises(ValueError, match=r"s3://bucket/a\.csv must be a local file"):
        plan_units(["s3://bucket/a.csv"])
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        plan_units([tmp_path / "b.parquet"])


def test_parts_of_a_clip_hold_their_own_frames(tmp_path):
    """Frame i of the clip is shown at i/16 s; far parts are sought, near ones decoded from the beginning."""
    path = write_clip(tmp_path / "a.mp4", (grey(i % 35) for i in range(160)))
    for start_s, end_s in ((0.5, 1.5), (4.0, 5.0), (7.3, 8.3), (9.0, None)):
        row = {"path": "a.mp4", "caption": "x", "start": start_s, "end": "" if end_s is None else end_s}
        (item,) = find_inputs([write(tmp_path / "m.jsonl", [row])]).items
        info = probe_video(path, 16, item.start_s, item.end_s)
        assert info.num_frames == 16
        frames = cut_frames(item, Cut(Shape(13, 48, 64), 3, (0, 0, 64, 48)), 16)
        first = int(start_s * 16) + 3
        assert [level(frame) for frame in frames] == [(first + k) % 35 for k in range(13)]
    with pytest.raises(MediaError):
        probe_video(path, 16, 11.0, 12.0)
    with pytest.raises(MediaError, match="no picture between"):
        probe_video(path, 16, 1.0, 1.0)


def test_aspect_buckets_within_a_budget():
    config = CutConfig(budgets=(480 * 832,), frames=(1, 17), max_aspect=2.0)
    sizes = {shape[1:] for group in config.groups for shape in group}
    assert (480, 832) in sizes
    assert (832, 480) in sizes
    assert (624, 640) in sizes
    for height, width in sizes:
        assert height % 16 == width % 16 == 0
        assert height * width <= 480 * 832
        assert max(height / width, width / height) <= 2
        # Not one more row or column of tokens would fit.
        assert (height + 16) * width > 480 * 832 or (height + 16) / width > 2
        assert height * (width + 16) > 480 * 832 or (width + 16) / height > 2
