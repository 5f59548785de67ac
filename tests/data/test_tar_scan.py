import tarfile

import pytest

from tests.data.media_files import picture_bytes, scan_tar, write_tar


@pytest.fixture
def shard(tmp_path):
    members = []
    for i in range(6):
        members += [(f"d/{i:04d}.png", picture_bytes(i)), (f"d/{i:04d}.cap.txt", b"picture %d" % i)]
    return write_tar(tmp_path / "raw.tar", members)


def member(path, name):
    with tarfile.open(path) as tar:
        return tar.getmember(name)


def keys(scan):
    return [sample.key for sample in scan.samples]


def test_a_whole_shard(shard):
    scan = scan_tar(shard)
    assert scan.problems == []
    assert keys(scan) == [f"d/{i:04d}" for i in range(6)]
    sample = scan.samples[2]
    assert list(sample.members) == ["png", "cap.txt"]
    data = shard.read_bytes()
    offset, size = sample.members["cap.txt"]
    assert data[offset : offset + size] == b"picture 2"
    assert sample.offset == member(shard, "d/0002.png").offset
    assert sample.offset + sample.size == scan.samples[3].offset


def test_a_cut_inside_data_loses_that_sample_and_says_so(shard):
    info = member(shard, "d/0003.png")
    shard.write_bytes(shard.read_bytes()[: info.offset_data + info.size // 2])
    scan = scan_tar(shard)
    assert keys(scan) == ["d/0000", "d/0001", "d/0002"]
    assert [problem.key for problem in scan.problems] == ["raw.tar/d/0003", "raw.tar"]
    assert "3 whole samples" in scan.problems[1].reason


def test_a_cut_inside_a_header_is_noticed(shard):
    shard.write_bytes(shard.read_bytes()[: member(shard, "d/0003.png").offset + 200])
    scan = scan_tar(shard)
    assert keys(scan) == ["d/0000", "d/0001", "d/0002"]
    assert [problem.key for problem in scan.problems] == ["raw.tar"]
    assert "cut at byte" in scan.problems[0].reason


def test_a_cut_between_members_is_noticed(shard):
    shard.write_bytes(shard.read_bytes()[: member(shard, "d/0003.png").offset])
    scan = scan_tar(shard)
    assert len(scan.samples) == 3
    assert "cut at byte" in scan.problems[0].reason


def test_a_damaged_header_is_noticed(shard):
    data = bytearray(shard.read_bytes())
    offset = member(shard, "d/0003.png").offset
    data[offset + 148 : offset + 156] = b"\xff" * 8
    shard.write_bytes(data)
    scan = scan_tar(shard)
    assert keys(scan) == ["d/0000", "d/0001", "d/0002"]
    assert f"damaged header at byte {offset}; 3 whole samples" in scan.problems[0].reason


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 2048])
def test_what_is_no_tar_is_a_problem(tmp_path, content):
    path = tmp_path / "raw.tar"
    path.write_bytes(content)
    scan = scan_tar(path)
    assert scan.samples == []
    assert [problem.key for problem in scan.problems] == ["raw.tar"]


def test_a_key_that_comes_twice_is_kept_once_and_named_once(tmp_path):
    names = ["a.png", "a.txt", "b.png", "b.txt", "b.png", "b.txt", "c.png", "a.png", "a.txt"]
    path = write_tar(tmp_path / "raw.tar", [(name, str(i).encode()) for i, name in enumerate(names)])
    scan = scan_tar(path)
    assert keys(scan) == ["a", "b", "c"]
    assert sorted(problem.key for problem in scan.problems) == ["raw.tar/a", "raw.tar/b"]
    data = path.read_bytes()
    assert [data[offset] for offset, _ in scan.samples[1].members.values()] == list(b"23")
