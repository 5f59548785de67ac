import dataclasses
import io
import json
import pickle
import shutil
import tarfile

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader

from adaptiveload.data.index import NULL_TEXT_NAME, ShardIndex, write_index
from adaptiveload.data.indexer import index_shards
from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.reader import JSON_MEMBER, LATENTS_MEMBER, SampleError, SampleReader
from adaptiveload.data.shard_writer import DatasetWriter
from adaptiveload.data.text import HashTextEncoder
from tests.data.media_files import write_tar


def read_row(index, i):
    return SampleReader(index).read(index.place(i))


def test_samples_read_back_as_written(tmp_path):
    writer = DatasetWriter(tmp_path, DctCodec(), HashTextEncoder(16), samples_per_shard=2)
    rng = np.random.default_rng(0)
    latents = [rng.standard_normal((16, f, 4, 6)).astype(np.float16) for f in (1, 2, 3)]
    for i, value in enumerate(latents):
        meta = {"frames": 4 * i + 1, "height": 32, "width": 48, "fps": 16}
        writer.write(f"k{i}", f"s{i}", value, f"caption {i}", meta)
    index = writer.finish()
    assert list(index.shards) == ["shard-000000.tar", "shard-000000.tar", "shard-000001.tar"]
    reader = SampleReader(index)
    for i in (2, 0, 1):
        sample = reader.read(index.place(i))
        assert (sample.key, sample.source, sample.caption) == (f"k{i}", f"s{i}", f"caption {i}")
        assert sample.latents.dtype == sample.text.dtype == np.float32
        np.testing.assert_array_equal(sample.latents, latents[i].astype(np.float32))
        # Text is stored as bfloat16: 8 bits of mantissa.
        np.testing.assert_allclose(sample.text, HashTextEncoder(16).encode([sample.caption])[0], rtol=2**-8)
    np.testing.assert_allclose(reader.null_text().float(), HashTextEncoder(16).encode([""])[0], rtol=2**-8)


def test_shards_are_equal_byte_for_byte_when_written_again(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        writer = DatasetWriter(tmp_path / name, DctCodec(), HashTextEncoder(16), samples_per_shard=10)
        meta = {"frames": 1, "height": 16, "width": 16, "fps": 16}
        writer.write("k", "s", np.ones((16, 1, 2, 2), np.float16), "text", meta)
        writer.finish()
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(names) == 4
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_pickled_reader_works_in_loader_workers(dataset):
    index = ShardIndex.read(dataset)
    reader = SampleReader(index)
    places = [index.place(i) for i in range(60)]
    expected = [reader.read(place).latents.sum() for place in places]
    again = pickle.loads(pickle.dumps(reader))
    assert again.read(places[3]).latents.sum() == expected[3]
    assert len(pickle.dumps(reader)) < 2000  # a worker gets no index
    # The parent's files are open already: forked workers share them.
    loader = DataLoader(
        places, batch_size=None, num_workers=2, collate_fn=lambda place: reader.read(place).latents.sum()
    )
    assert list(loader) == expected


def test_more_shards_than_may_be_open(dataset, monkeypatch):
    monkeypatch.setattr("adaptiveload.data.storage._MAX_OPEN_FILES", 1)
    index = ShardIndex.read(dataset)
    reader = SampleReader(index)
    for i in (0, 59, 30, 1, 58):
        assert reader.read(index.place(i)).key == f"sample{i:03d}"
    assert len(reader.storage._files) == 1


@pytest.fixture
def folder(dataset, tmp_path):
    return shutil.copytree(dataset, tmp_path / "latents")


def test_a_cut_shard_costs_only_the_samples_behind_the_cut(folder):
    index = ShardIndex.read(folder)
    shard = folder / "shard-000001.tar"
    shard.write_bytes(shard.read_bytes()[: index.offsets[30] + 700])
    reader = SampleReader(index)
    assert reader.read(index.place(29)).key == "sample029"
    assert reader.read(index.place(50)).key == "sample050"
    for i in range(30, 50):
        with pytest.raises(SampleError, match="shorter than its index says") as caught:
            reader.read(index.place(i))
        assert caught.value.key == f"sample{i:03d}"
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)


def test_a_missing_shard_is_a_sample_error(folder):
    (folder / "shard-000002.tar").unlink()
    with pytest.raises(SampleError, match=r"shard-000002\.tar.*No such file"):
        read_row(ShardIndex.read(folder), 55)


def test_an_index_of_other_shards_is_noticed(folder):
    index = ShardIndex.read(folder)
    for name, message in (
        ("keys", "lies where the index says"),
        ("offsets", "shard-000000.tar"),
        ("sources", "the index says"),
    ):
        column = np.roll(getattr(index, name), 1)
        with pytest.raises(SampleError, match=message):
            read_row(dataclasses.replace(index, **{name: column}), 3)
    for name in ("frames", "text_lens"):
        column = getattr(index, name) + 4
        with pytest.raises(SampleError, match="the index says"):
            read_row(dataclasses.replace(index, **{name: column}), 3)


def write_one(root, latents, text, meta):
    """Index of a dataset of one sample with the given tensors."""
    good = {"frames": 1, "height": 32, "width": 32, "source": "s", "caption": "c", "codec": "dct"}
    good |= {"normalization_hash": "abc", "text_encoder": "hash", "format_version": 1}
    tensors = safetensors.torch.save({"latents": latents, "text": text})
    write_tar(root / "a.tar", [(f"k.{JSON_MEMBER}", json.dumps(good).encode()), (f"k.{LATENTS_MEMBER}", tensors)])
    safetensors.torch.save_file({"text": torch.zeros(1, text.shape[-1])}, root / NULL_TEXT_NAME)
    index, problems = index_shards(root)
    assert problems == []
    write_index(index)
    data = json.dumps({**good, **meta}).encode()
    write_tar(root / "a.tar", [(f"k.{JSON_MEMBER}", data), (f"k.{LATENTS_MEMBER}", tensors)])
    return ShardIndex.read(root)


ONES, TEXT = torch.ones(16, 1, 4, 4), torch.ones(2, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_type_reads_as_float32(tmp_path, dtype):
    sample = read_row(write_one(tmp_path, 0.1 * ONES.to(dtype), TEXT, {}), 0)
    assert sample.latents.dtype == np.float32
    np.testing.assert_array_equal(sample.latents, (0.1 * ONES.to(dtype)).float().numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["latents", "text"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, bad, where, dtype):
    latents, text = ONES.to(dtype, copy=True), TEXT.to(dtype, copy=True)
    limits = torch.finfo(dtype)  # these are not refused
    latents.view(-1)[:4] = torch.tensor([limits.max, limits.min, limits.smallest_normal, 0], dtype=dtype)
    read_row(write_one(tmp_path, latents, text, {}), 0)
    (latents if where == "latents" else text).view(-1)[5] = bad
    with pytest.raises(SampleError, match="NaN or infinity"):
        read_row(write_one(tmp_path, latents, text, {}), 0)


def test_latents_of_another_normalisation_are_refused(tmp_path):
    with pytest.raises(SampleError, match="normalisation xyz, the dataset has abc"):
        read_row(write_one(tmp_path, ONES, TEXT, {"normalization_hash": "xyz"}), 0)


def test_stale_latents_are_not_indexed(tmp_path):
    """Old size, old frames, wrong channels, another text width, another normalisation: each named, the rest used."""
    meta = {"frames": 5, "height": 32, "width": 32, "source": "s", "caption": "c", "codec": "dct"}
    meta |= {"normalization_hash": "abc", "text_encoder": "hash", "format_version": 1}
    good = torch.ones(16, 2, 4, 4)
    samples = {
        "good": (good, TEXT, {}),
        "size": (good[:, :, :2], TEXT, {}),
        "frames": (good[:, :1], TEXT, {}),
        "channels": (good[:8], TEXT, {}),
        "text": (good, torch.ones(2, 9), {}),
        "norm": (good, TEXT, {"normalization_hash": "xyz"}),
        "version": (good, TEXT, {"format_version": 0}),
        "last": (good, TEXT, {}),
    }
    members = []
    for key, (latents, text, changes) in samples.items():
        tensors = safetensors.torch.save({"latents": latents.contiguous(), "text": text})
        members += [(f"{key}.json", json.dumps({**meta, **changes}).encode()), (f"{key}.{LATENTS_MEMBER}", tensors)]
    members += [("nojson." + LATENTS_MEMBER, tensors), ("notensor.json", json.dumps(meta).encode())]
    members += [("broken.json", b"{"), ("broken." + LATENTS_MEMBER, tensors)]
    members += [("header.json", json.dumps(meta).encode()), ("header." + LATENTS_MEMBER, b"\xff" * 20)]
    write_tar(tmp_path / "a.tar", members)
    safetensors.torch.save_file({"text": torch.zeros(1, 8)}, tmp_path / NULL_TEXT_NAME)
    index, problems = index_shards(tmp_path)
    assert list(index.keys) == ["good", "last"]
    named = {problem.key.removeprefix("a.tar/") for problem in problems}
    assert named == samples.keys() - {"good", "last"} | {"nojson", "notensor", "broken", "header"}
    index.verify()


def test_a_member_order_of_others_is_fine(folder):
    """Shards from elsewhere: tensors before json, another tar dialect."""
    shard = folder / "shard-000000.tar"
    with tarfile.open(shard) as tar:
        members = [(info.name, tar.extractfile(info).read()) for info in tar]
    with tarfile.open(shard, "w", format=tarfile.PAX_FORMAT) as tar:
        for first in range(0, len(members), 2):
            for name, data in reversed(members[first : first + 2]):
                info = tarfile.TarInfo(name)
                info.size, info.mtime = len(data), 0.5  # a fraction needs an extended header
                tar.addfile(info, io.BytesIO(data))
    index, problems = index_shards(folder)
    assert problems == []
    assert read_row(index, 3).key == "sample003"


def test_null_text_must_fit(folder):
    index = ShardIndex.read(folder)
    safetensors.torch.save_file({"text": torch.zeros(1, 5)}, folder / NULL_TEXT_NAME)
    with pytest.raises(ValueError, match="expected"):
        SampleReader(index).null_text()
    (folder / NULL_TEXT_NAME).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        SampleReader(index).null_text()
