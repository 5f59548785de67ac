import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from adaptiveload.data.index import INDEX_NAME, INFO_NAME, NULL_TEXT_NAME, ShardIndex, write_index
from adaptiveload.data.indexer import index_shards
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from scripts.index_shards import main as index_shards_script
from tests.data.media_files import scan_tar


@pytest.fixture
def folder(dataset, tmp_path):
    return shutil.copytree(dataset, tmp_path / "latents")


def test_rows_describe_the_samples(dataset):
    index = ShardIndex.read(dataset)
    index.verify()
    assert len(index) == 60
    assert list(np.unique(np.asarray(index.shards))) == [f"shard-{i:06d}.tar" for i in range(3)]
    assert index.keys[4] == "sample004"
    assert index.sources[19] == "clip4"
    assert index.shape(3) == Shape(9, 48, 32)
    assert index.text_lens[7] == 4  # "clip number 7" and the end mark
    for shard in np.unique(np.asarray(index.shards)):
        rows = np.flatnonzero(np.asarray(index.shards) == shard)
        places = [(s.key, s.offset, s.size) for s in scan_tar(dataset / shard).samples]
        assert places == [(index.keys[i], index.offsets[i], index.sizes[i]) for i in rows]


def test_sample_table_has_the_same_order(dataset):
    index = ShardIndex.read(dataset)
    table = index.sample_table(LatentGeometry())
    assert list(table.keys) == list(index.keys)
    assert list(table.sources) == list(index.sources)
    assert [table.shapes[i] for i in table.shape_ids] == [index.shape(i) for i in range(len(index))]
    assert list(table.num_tokens[:3]) == [4, 6, 8]


def test_write_and_read_are_inverse_and_keep_the_fingerprint(dataset, folder):
    index = ShardIndex.read(dataset)
    copy = dataclasses.replace(ShardIndex.read(folder), root=folder)
    write_index(copy)
    again = ShardIndex.read(folder)
    assert again.info == index.info
    assert again.fingerprint == index.fingerprint  # the folder's place does not count
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in dataset.iterdir())


def test_the_fingerprint_sees_every_column(dataset):
    index = ShardIndex.read(dataset)
    seen = {index.fingerprint}
    for name in ("keys", "sources", "shards", "offsets", "sizes", "frames", "heights", "widths", "text_lens"):
        column = np.array(getattr(index, name))
        column[5] = column[5] + ("x" if column.dtype == object else 1)
        seen.add(dataclasses.replace(index, **{name: column}).fingerprint)
    seen.add(dataclasses.replace(index, info=dataclasses.replace(index.info, normalization_hash="0")).fingerprint)
    assert len(seen) == 11


def test_a_folder_without_index_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"index\.parquet is missing.*scripts\.prepare"):
        ShardIndex.read(tmp_path)


@pytest.mark.parametrize("name", [INDEX_NAME, INFO_NAME])
def test_a_damaged_index_is_refused(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        ShardIndex.read(folder)


def test_another_format_version_is_refused(folder):
    info = json.loads((folder / INFO_NAME).read_text())
    (folder / INFO_NAME).write_text(json.dumps({**info, "format_version": 99}))
    with pytest.raises(ValueError, match="format version 99"):
        ShardIndex.read(folder)


def test_index_and_info_must_belong_together(folder):
    table = pq.read_table(folder / INDEX_NAME)
    pq.write_table(table.slice(0, 10), folder / INDEX_NAME)
    with pytest.raises(ValueError, match=r"10 rows.*says 60"):
        ShardIndex.read(folder)


def test_verify_names_a_missing_or_changed_shard(folder):
    index = ShardIndex.read(folder)
    shard = folder / "shard-000001.tar"
    data = shard.read_bytes()
    shard.write_bytes(data[:-512])
    with pytest.raises(
        ValueError, match=f"shard-000001.tar has {len(data) - 512} bytes, the index promises {len(data)}"
    ):
        index.verify()
    shard.unlink()
    with pytest.raises(ValueError, match=r"shard-000001\.tar is missing"):
        index.verify()


def changed(index, name, row, value):
    column = np.array(getattr(index, name))
    column[row] = value
    return dataclasses.replace(index, **{name: column})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("frames", 6, "sample007.*6 frames is not 4k"),
        ("heights", 40, "sample007.*height 40 is not a multiple of 16"),
        ("offsets", 10**9, "sample007.*points to bytes 1000000000"),
        ("text_lens", 0, "sample007.*0 rows of text"),
        ("shards", "gone.tar", "sample007.*gone.tar"),
        ("keys", "sample003", "sample003.*comes twice"),
    ],
)
def test_verify_names_a_bad_row(dataset, name, value, message):
    with pytest.raises(ValueError, match=message):
        changed(ShardIndex.read(dataset), name, 7, value).verify()


def test_verify_refuses_an_empty_index(dataset):
    index = ShardIndex.read(dataset)
    fields = [field.name for field in dataclasses.fields(index) if field.name not in ("root", "info")]
    empty = dataclasses.replace(index, **{name: getattr(index, name)[:0] for name in fields})
    with pytest.raises(ValueError, match="no samples"):
        empty.verify()


def test_indexing_again_gives_the_same_index(folder):
    index, problems = index_shards(folder)
    assert problems == []
    assert index.fingerprint == ShardIndex.read(folder).fingerprint


def test_indexing_names_what_a_cut_shard_lost(folder):
    index = ShardIndex.read(folder)
    row = int(np.flatnonzero(np.asarray(index.keys) == "sample030")[0])
    shard = folder / index.shards[row]
    shard.write_bytes(shard.read_bytes()[: index.offsets[row] + index.sizes[row] - 600])
    again, problems = index_shards(folder)
    assert len(again) == 40  # 25 + 5 + 10
    reasons = {problem.key: problem.reason for problem in problems[:-1]}
    assert "cut in the middle" in reasons["shard-000001.tar/sample030"]
    assert "5 whole samples" in reasons["shard-000001.tar"]
    assert "5 usable samples, the last index promised 25" in problems[-1].reason


def damage_index(folder):
    (folder / INDEX_NAME).write_bytes((folder / INDEX_NAME).read_bytes()[:100])


def damage_version(folder):
    info = json.loads((folder / INFO_NAME).read_text())
    (folder / INFO_NAME).write_text(json.dumps({**info, "format_version": 0}))


def damage_rows(folder):
    pq.write_table(pq.read_table(folder / INDEX_NAME).slice(0, 10), folder / INDEX_NAME)


@pytest.mark.parametrize(
    ("damage", "message"),
    [(damage_index, "damaged"), (damage_version, "format version 0"), (damage_rows, "10 rows.*says 60")],
)
def test_a_damaged_index_is_one_problem_and_made_again(folder, damage, message, capsys):
    before = ShardIndex.read(folder).fingerprint
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        ShardIndex.read(folder)
    index, problems = index_shards(folder)
    assert [problem.key for problem in problems] == [INDEX_NAME]
    assert str(caught.value) in problems[0].reason
    assert index.fingerprint == before
    index_shards_script([str(folder)])
    assert f"problem: {INDEX_NAME}" in capsys.readouterr().err
    assert ShardIndex.read(folder).fingerprint == before


def test_a_damaged_index_does_not_let_damaged_shards_pass(folder, capsys):
    shard = folder / "shard-000002.tar"
    shard.write_bytes(shard.read_bytes()[:-14336])  # the last 10 KiB of a tar may be padding
    damage_index(folder)
    with pytest.raises(SystemExit, match="nothing written"):
        index_shards_script([str(folder)])
    with pytest.raises(ValueError, match="damaged"):
        ShardIndex.read(folder)
    index_shards_script([str(folder), "--skip-damaged"])
    ShardIndex.read(folder).verify()


@pytest.mark.parametrize("num_renames", [0, 1])
def test_an_end_between_the_files_leaves_no_pair_that_does_not_belong_together(folder, monkeypatch, num_renames):
    index = ShardIndex.read(folder)
    other = changed(index, "sizes", 0, index.sizes[0] - 512)
    renamed = []

    def replace(path, target):
        if len(renamed) == num_renames:
            raise KeyboardInterrupt
        renamed.append(target)
        os.replace(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write_index(other)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=rf"{INFO_NAME} is missing.*scripts\.index_shards"):
        ShardIndex.read(folder)
    index_shards_script([str(folder)])
    assert ShardIndex.read(folder).fingerprint == index.fingerprint


def test_indexing_needs_shards_and_the_null_text(folder, tmp_path):
    (folder / NULL_TEXT_NAME).unlink()
    with pytest.raises(ValueError, match=NULL_TEXT_NAME):
        index_shards(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no shards"):
        index_shards(tmp_path / "empty")
