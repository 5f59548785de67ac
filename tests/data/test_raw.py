import pytest

from adaptiveload.data.raw import find_inputs
from tests.data.media_files import picture_bytes, write_tar

PICTURE = picture_bytes()


def captions(found):
    return {item.source: item.caption for item in found.items}


def reasons(found):
    return {problem.key: problem.reason for problem in found.skipped}


def write_pair(folder):
    folder.mkdir(parents=True)
    (folder / "a.png").write_bytes(PICTURE)
    (folder / "a.txt").write_bytes(b"text")


def test_a_folder_pairs_media_with_captions(tmp_path):
    root = tmp_path / "set"
    (root / "deep").mkdir(parents=True)
    for name, content in {
        "a.png": PICTURE,
        "a.txt": b"a cat\n",
        "deep/b.v2.JPG": PICTURE,
        "deep/b.v2.json": b'{"caption": "a  dog", "n": 1}',
        "both.png": PICTURE,
        "both.txt": b"from text",
        "both.json": b'{"caption": "from json"}',
        ".hidden.png": PICTURE,
    }.items():
        (root / name).write_bytes(content)
    found = find_inputs([root])
    assert captions(found) == {"set/a.png": "a cat", "set/deep/b.v2.jpg": "a dog", "set/both.png": "from text"}
    assert found.skipped == found.damaged == []


CAPTIONS = {
    "utf8": ("a café at night".encode(), "a café at night"),
    "bom": ("a café".encode("utf-8-sig"), "a café"),
    "emoji": ("\U0001f436 runs".encode(), "\U0001f436 runs"),
    "lines": (b" two\r\n  lines\n", "two lines"),
    "cp1252": (b"the dog\x92s ball", None),
    "latin1": ("café".encode("latin-1"), None),
    "utf16": ("a cat".encode("utf-16"), None),
    "utf16_without_bom": ("a cat".encode("utf-16-le"), None),
    "gbk": ("女孩在跳舞".encode("gbk"), None),
    "cut": ("café".encode()[:-1], None),
    "replaced": ("caf\ufffd".encode(), None),
    "empty": (b" \n", None),
}


def test_captions_are_read_as_utf8_or_skipped_by_name(tmp_path):
    members = []
    for key, (data, _) in CAPTIONS.items():
        members += [(f"{key}.png", PICTURE), (f"{key}.txt", data)]
    found = find_inputs([write_tar(tmp_path / "raw.tar", members)])
    expected = {f"raw.tar/{key}.png": text for key, (_, text) in CAPTIONS.items() if text is not None}
    assert captions(found) == expected
    assert reasons(found).keys() == {f"raw.tar/{key}" for key, (_, text) in CAPTIONS.items() if text is None}
    assert "not UTF-8" in reasons(found)["raw.tar/latin1"]
    assert "empty" in reasons(found)["raw.tar/empty"]


def test_items_without_caption_or_media_are_skipped_by_name(tmp_path):
    members = [("0.png", PICTURE), ("0.txt", b"fine"), ("1.png", PICTURE), ("2.txt", b"no media")]
    members += [("3.png", PICTURE), ("3.json", b'{"fps": 16}'), ("4.png", PICTURE), ("4.json", b'{"caption": "fine"}')]
    members += [("5.png", PICTURE), ("5.json", b'{"caption": null}'), ("6.png", PICTURE), ("6.json", b'{"caption": "')]
    members += [("7.png", PICTURE), ("7.jpg", PICTURE), ("7.txt", b"which?"), ("8.png", PICTURE), ("8.json", b"[1]")]
    found = find_inputs([write_tar(tmp_path / "raw.tar", members)])
    assert captions(found) == {"raw.tar/0.png": "fine", "raw.tar/4.png": "fine"}
    expected = {
        "1": "no caption",
        "2": "no media",
        "3": "no field `caption`",
        "5": "null, not a text",
        "6": "json is broken",
        "7": "2 media files",
        "8": "no field `caption`",
    }
    assert reasons(found).keys() == {f"raw.tar/{key}" for key in expected}
    for key, part in expected.items():
        assert part in reasons(found)[f"raw.tar/{key}"]


def test_a_damaged_shard_is_named_and_the_others_go_on(tmp_path):
    members = [(f"{i}.{kind}", data) for i in range(4) for kind, data in (("png", PICTURE), ("txt", b"text"))]
    whole = write_tar(tmp_path / "a.tar", members)
    cut = write_tar(tmp_path / "b.tar", members)
    cut.write_bytes(cut.read_bytes()[: 2 * (512 + 512 + 1024) + 200])
    found = find_inputs([tmp_path])
    assert len(captions(found)) == 4 + 2
    assert [problem.key for problem in found.damaged] == [f"{tmp_path.name}/b.tar"]
    assert "2 whole samples before it" in found.damaged[0].reason
    assert find_inputs([whole]).damaged == []


def test_a_key_twice_in_a_shard_is_skipped_once_and_equal_keys_of_two_shards_are_two_items(tmp_path):
    pair = [("1.png", PICTURE), ("1.txt", b"first")]
    shards = [write_tar(tmp_path / name, pair * times) for name, times in (("a.tar", 2), ("b.tar", 1))]
    found = find_inputs(shards)
    assert captions(found) == {"a.tar/1.png": "first", "b.tar/1.png": "first"}
    assert reasons(found).keys() == {"a.tar/1"}


def test_inputs_that_cannot_be_told_apart_or_do_not_exist_are_refused(tmp_path):
    for parent in ("x", "y"):
        write_pair(tmp_path / parent / "set")
    with pytest.raises(ValueError, match="two input folders have the same name 'set'"):
        find_inputs([tmp_path / "x" / "set", tmp_path / "y" / "set"])
    assert captions(find_inputs([tmp_path / "x" / "set", f"other={tmp_path / 'y' / 'set'}"])).keys() == {
        "set/a.png",
        "other/a.png",
    }
    with pytest.raises(ValueError, match=r"neither a folder, a \.tar shard nor a manifest"):
        find_inputs([tmp_path / "nowhere"])


def test_a_corpus_that_moved_or_was_renamed_keeps_its_names(tmp_path, monkeypatch):
    """Keys of noise and the held-out choice are made of names; where a folder lies is no part of them."""
    root = tmp_path / "media"
    write_pair(root / "clips")
    write_tar(root / "more.tar", [("k.png", PICTURE), ("k.txt", b"in a shard")])
    before = {(item.name, item.source) for item in find_inputs([root]).items}
    (tmp_path / "elsewhere").mkdir()
    moved = root.rename(tmp_path / "elsewhere" / "media")
    assert {(item.name, item.source) for item in find_inputs([moved]).items} == before
    renamed = moved.rename(tmp_path / "corpus=2")
    assert {(item.name, item.source) for item in find_inputs([f"media={renamed}"]).items} == before
    monkeypatch.chdir(renamed)
    assert {item.source for item in find_inputs(["."]).items} == {"corpus=2/clips/a.png", "corpus=2/more.tar/k.png"}
