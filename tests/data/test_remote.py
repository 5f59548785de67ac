"""Datasets behind `s3://` and `http://`: s3fs and fsspec's HTTP against a real server that now and then fails."""

import logging
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from adaptiveload.data import storage
from adaptiveload.data.corpus import SourceConfig, open_corpus
from adaptiveload.data.cuts import CutConfig
from adaptiveload.data.index import ShardIndex
from adaptiveload.data.indexer import index_shards
from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.prepare import prepare
from adaptiveload.data.reader import SampleError, SampleReader
from adaptiveload.data.storage import Storage
from adaptiveload.data.stream import Progress, ShardEnd, StreamLoss, find_shards, peek_normalization, read_stream
from adaptiveload.data.text import HashTextEncoder
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from tests.data.media_files import picture_bytes, write_tar


class Bucket(ThreadingHTTPServer):
    """What S3 and HTTP clients need to read a folder as bucket `b`: GET with ranges, HEAD, and listings.

    `faults` are spent one a request: a status to answer with, "cut" for half an answer, "drop" for none.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.faults: list[object] = []
        self.num_requests = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone away is not worth a trace."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        self.server.num_requests += 1
        fault = self.server.faults.pop(0) if self.server.faults and with_body else None
        path, _, query = self.path.partition("?")
        name = path.removeprefix("/b").strip("/")
        if fault == "drop":
            self.close_connection = True
            self.connection.close()
        elif isinstance(fault, int):
            self.send(fault, b"", {}, with_body)
        elif "list-type=2" in query:
            prefix = parse_qs(query).get("prefix", [""])[0]
            self.send(200, self.listing(prefix), {"Content-Type": "application/xml"}, with_body)
        elif not (self.server.root / name).is_file():
            self.send(404, b"", {}, with_body)
        else:
            data = (self.server.root / name).read_bytes()
            headers = {"Accept-Ranges": "bytes", "ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
            status, total = 200, len(data)
            if "Range" in self.headers:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                end = min(int(last) + 1 if last else total, total)
                if int(first) >= total:
                    self.send(416, b"", {}, with_body)
                    return
                data, status = data[int(first) : end], 206
                headers["Content-Range"] = f"bytes {first}-{end - 1}/{total}"
            self.send(status, data, headers, with_body, cut=fault == "cut")

    def send(self, status: int, data: bytes, headers: dict[str, str], with_body: bool, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    def listing(self, prefix: str) -> bytes:
        entries = "".join(
            f"<Contents><Key>{path.name}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>1</ETag><Size>{path.stat().st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for path in sorted(self.server.root.iterdir())
            if path.name.startswith(prefix)
        )
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>b</Name><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        ).encode()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def bucket(dataset: Path, tmp_path_factory: pytest.TempPathFactory):
    server = Bucket(shutil.copytree(dataset, tmp_path_factory.mktemp("bucket") / "b"))
    yield server
    server.shutdown()


@pytest.fixture(params=["s3", "http"])
def url(request, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    import fsspec.config

    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    bucket.faults.clear()
    if request.param == "http":
        return f"{bucket.url}/b"
    for key, value in (("KEY", "k"), ("SECRET", "s"), ("ENDPOINT_URL", bucket.url)):
        monkeypatch.setenv(f"FSSPEC_S3_{key}", value)
    monkeypatch.setattr(fsspec.config, "conf", {})
    fsspec.config.set_conf_env(fsspec.config.conf, os.environ)
    return "s3://b"


def test_a_remote_dataset_is_the_local_one(url: str, dataset: Path) -> None:
    local, remote = ShardIndex.read(dataset), ShardIndex.read(url)
    assert remote.fingerprint == local.fingerprint
    remote.verify()
    readers = SampleReader(local), SampleReader(remote)
    for i in (0, 31, 59):
        np.testing.assert_array_equal(*(reader.read(local.place(i)).latents for reader in readers))
    assert torch.equal(*(reader.null_text() for reader in readers))


def test_workers_read_remote_samples(url: str) -> None:
    corpus = open_corpus([SourceConfig(url)], LatentGeometry())
    reader = corpus.reader()
    reader.read(corpus.place(0))  # connections of this process exist before it forks
    places = [corpus.place(i) for i in range(20)]
    read = lambda place: reader.read(place).key  # noqa: E731
    assert list(DataLoader(places, batch_size=None, num_workers=2, collate_fn=read)) == [place.key for place in places]


@pytest.mark.parametrize("faults", [[503], [500, 500, 503], ["drop"], ["cut"], ["drop", 503, "cut"]], ids=str)
def test_passing_failures_are_tried_again(url: str, bucket: Bucket, dataset: Path, faults: list, caplog) -> None:
    index = ShardIndex.read(dataset)
    reader = SampleReader(ShardIndex.read(url))
    bucket.faults[:] = faults
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(
            reader.read(index.place(7)).latents, SampleReader(index).read(index.place(7)).latents
        )
    assert bucket.faults == []


def test_a_server_that_stays_down_costs_the_sample_with_the_reason(
    url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "TRIES", 1 if url.startswith("s3") else 3)  # s3fs tries again by itself, 10 s long
    index = ShardIndex.read(url)
    bucket.faults[:] = [503] * 1000
    with pytest.raises(SampleError, match=rf"{storage.TRIES} times"):
        SampleReader(index).read(index.place(7))
    bucket.faults.clear()


def test_what_is_missing_fails_at_once(url: str, bucket: Bucket) -> None:
    with pytest.raises(FileNotFoundError):
        Storage(url).read("nothing.tar")
    before = bucket.num_requests
    with pytest.raises(ValueError, match=r"index\.parquet is missing"):
        ShardIndex.read(f"{url}/nothing")
    assert bucket.num_requests - before < 12
    with pytest.raises(ValueError, match="shorter than its index says"):
        Storage(url).read_range("dataset.json", 0, 10**6)


def test_remote_shards_are_indexed_and_streamed(url: str, dataset: Path) -> None:
    if url.startswith("http"):
        path = f"{url}/shard-{{000000..000002}}.tar"  # plain HTTP has no listings
    else:
        path = url
        index, problems = index_shards(url)
        assert problems == []
        assert index.fingerprint == ShardIndex.read(dataset).fingerprint
    urls, _ = find_shards(path)
    assert len(urls) == 3
    found = list(read_stream(urls, 0, 1, Progress(), 16, peek_normalization(urls), LatentGeometry()))
    assert not [entry for entry in found if isinstance(entry, StreamLoss)]
    assert [entry.total for entry in found if isinstance(entry, ShardEnd)] == [25, 25, 10]
    assert len([entry for entry in found if isinstance(entry, tuple)]) == 60


def test_media_shards_are_prepared_from_afar(url: str, bucket: Bucket, tmp_path: Path) -> None:
    members = [(f"{i}.{kind}", data) for i in range(3) for kind, data in (("png", picture_bytes(i)), ("txt", b"text"))]
    write_tar(bucket.root / "raw.tar", members)
    cuts = CutConfig(shapes=(Shape(1, 48, 64),))
    index, report = prepare([f"{url}/raw.tar"], tmp_path / "out", cuts, DctCodec(), HashTextEncoder(16))
    (bucket.root / "raw.tar").unlink()
    assert len(index) == 3
    assert report["num_skipped"] == 0


def test_a_stale_handle_is_opened_anew(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS answers ESTALE for a file that was replaced on the server: here the descriptor is broken for real."""
    monkeypatch.setattr(storage, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(storage, "_PASSING", storage._PASSING | {9})  # EBADF stands for ESTALE
    local = Storage(dataset)
    expected = local.read_range("shard-000000.tar", 512, 100)
    os.close(local._files["shard-000000.tar"])
    monkeypatch.setattr(os, "close", lambda descriptor: None)
    assert local.read_range("shard-000000.tar", 512, 100) == expected
