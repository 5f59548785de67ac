"""Measure the data pipeline on this machine: a large index, and reading against raw sequential reading.

python -m scripts.benchmark_data index --rows 10000000      open, first plan, memory of a process and of a worker
python -m scripts.benchmark_data reading --folder /tmp/bench samples/s and MB/s of one worker, 1 MB records
"""

import argparse
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

if TYPE_CHECKING:
    from adaptiveload.data.corpus import CorpusReader
    from adaptiveload.data.index import SamplePlace


def memory_mib(process: psutil.Process | None = None) -> dict[str, float]:
    """Resident and unshared memory of a process, MiB."""
    info = (process or psutil.Process()).memory_full_info()
    return {"resident": info.rss / 2**20, "unshared": info.uss / 2**20}


def write_large_index(folder: Path, rows: int) -> None:
    """An index of `rows` clips and pictures of 60 shapes, 10 samples a source, 4,000 a shard. No shards."""
    from adaptiveload.data.index import DatasetInfo, ShardIndex, write_index

    rng = np.random.default_rng(0)
    shapes = np.array([(f, h, 16 * (1600 // h)) for f in (1, 17, 33, 49, 81) for h in range(128, 512, 32)])
    picked = shapes[rng.integers(len(shapes), size=rows)].astype(np.int32)
    sizes = np.full(rows, 2**20, np.int64)
    numbers = np.arange(rows)
    shard_of = numbers // 4000
    names = [f"shard-{number:06d}-000.tar" for number in range(int(shard_of[-1]) + 1)]
    info = DatasetInfo("wan_vae", "0" * 16, "umt5-4096-512", 4096, rows, dict.fromkeys(names, 4000 * 2**20))
    index = ShardIndex(
        str(folder),
        info,
        [f"corpus-clip-{number // 10:09d}-{number % 10}-81x480x832-000" for number in range(rows)],
        [f"corpus/part-{number // 1_000_000:03d}/clip-{number // 10:09d}.mp4" for number in range(rows)],
        [names[number] for number in shard_of],
        (numbers % 4000) * sizes,
        sizes,
        *picked.T,
        rng.integers(8, 200, rows).astype(np.int32),
    )
    write_index(index)


def benchmark_index(rows: int, ranks: int) -> None:
    """Open, verify, plan; memory of this process and of a worker."""
    from adaptiveload.data.corpus import SourceConfig, open_corpus
    from adaptiveload.scheduling.cost import TwoTermCost
    from adaptiveload.scheduling.order import EndlessOrder, held_out_mask
    from adaptiveload.scheduling.policies import ScheduleConfig, build_policy
    from adaptiveload.scheduling.shapes import LatentGeometry
    from adaptiveload.training.workers import Loaded

    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if not child:  # so that what writing takes does not count
            write_large_index(Path(folder), rows)
            os._exit(0)
        os.waitpid(child, 0)
        print(f"index.parquet of {rows:,} rows: {(Path(folder) / 'index.parquet').stat().st_size / 2**20:.0f} MiB")
        before = memory_mib()
        start = time.perf_counter()
        corpus = open_corpus([SourceConfig(folder)], LatentGeometry())
        print(f"open: {time.perf_counter() - start:.2f} s")
        start = time.perf_counter()
        assert corpus.fingerprint
        print(f"fingerprint: {time.perf_counter() - start:.2f} s")
        start = time.perf_counter()
        held_out = held_out_mask(corpus.source_names, 0.005, 0)[corpus.source_codes]
        print(f"held-out sources: {time.perf_counter() - start:.2f} s")
        start = time.perf_counter()
        ids = np.flatnonzero(~held_out)
        order = EndlessOrder(ids, 0, repeats=corpus.repeats[ids])
        config = ScheduleConfig(samples_per_step=28 * ranks, memory_limit_tokens=105_600)
        policy = build_policy(config, corpus.table, order, TwoTermCost(6e4, 6e4, 1e3, 20.0, 4e-4), ranks, "slot")
        plan = policy.plan(0)
        print(f"order and first plan ({plan.num_samples} samples, {ranks} ranks): {time.perf_counter() - start:.2f} s")
        start = time.perf_counter()
        for step in range(1, 11):
            policy.plan(step)
        print(f"further plans: {(time.perf_counter() - start) / 10 * 1e3:.1f} ms each")
        after = memory_mib()
        print(f"memory of the process: +{after['resident'] - before['resident']:.0f} MiB resident")
        reader = corpus.reader()
        place = corpus.place(rows // 2)
        print(f"what a worker is sent: {len(pickle.dumps(reader)):,} bytes; {len(pickle.dumps(place)):,} a sample")
        found = next(Loaded(_Memory(reader), [0], num_workers=1, prefetch=1, timeout_s=60))
        print(f"a worker: {found['unshared']:.0f} MiB of its own, {found['resident']:.0f} resident")


class _Memory:
    """A worker's dataset: it holds the reader, and tells its memory."""

    def __init__(self, reader: object) -> None:
        self.reader = reader

    def __getitem__(self, _: object) -> dict[str, float]:
        return memory_mib()


def benchmark_reading(folder: Path, num_samples: int, rounds: int) -> None:
    """One worker reading 1 MB samples in the training order, against raw sequential reading of the same shards."""
    from adaptiveload.data.corpus import SourceConfig, open_corpus
    from adaptiveload.data.latent_codecs import DctCodec
    from adaptiveload.data.shard_writer import DatasetWriter
    from adaptiveload.data.storage import Storage
    from adaptiveload.data.text import HashTextEncoder
    from adaptiveload.models.flow_matching import FlowMatchingConfig
    from adaptiveload.scheduling.order import EndlessOrder
    from adaptiveload.scheduling.shapes import LatentGeometry, Shape
    from adaptiveload.training.feed import MicroBatchDataset, PlannedSample
    from adaptiveload.training.workers import Loaded

    folder.mkdir(parents=True, exist_ok=True)
    shape = Shape(21, 480, 736)  # 16 x 6 x 60 x 92 fp16: 1.06 MB
    if not (folder / "index.parquet").exists():
        writer = DatasetWriter(folder, DctCodec(), HashTextEncoder(64, 32), samples_per_shard=256)
        latents = np.random.default_rng(0).standard_normal(LatentGeometry().latent_size(shape)).astype(np.float16)
        for i in range(num_samples):
            writer.write(f"k{i:06d}", f"s{i:06d}", latents, f"sample number {i}", {**shape._asdict(), "fps": 16})
        writer.finish()
    shards = sorted(folder.glob("*.tar"))
    total_mb = sum(path.stat().st_size for path in shards) / 1e6
    corpus = open_corpus([SourceConfig(str(folder))], LatentGeometry())
    reader, storage = corpus.reader(), Storage(folder)
    ids = EndlessOrder(np.arange(len(corpus.table)), 0).window(0, len(corpus.table)).ids
    places = [corpus.place(int(i)) for i in ids]
    dataset = MicroBatchDataset(reader, LatentGeometry(), shape, FlowMatchingConfig(), 0)
    planned = [(PlannedSample(int(i), place, 0, 0),) for i, place in zip(ids, places, strict=True)]

    def raw() -> Iterator[bytes]:
        for path in shards:
            with path.open("rb", buffering=0) as file:
                while data := file.read(2**20):
                    yield data

    def through_worker(dataset: object, requests: Sequence[object]) -> Iterator[object]:
        return Loaded(dataset, [requests[0], *requests], num_workers=1, prefetch=16, timeout_s=60)

    parsed = _Parsed(reader)
    stages: dict[str, Callable[[], Iterator[object]]] = {
        "raw sequential read of the shards": raw,
        "range reads in training order": lambda: (
            storage.read_range(place.shard, place.offset, place.size) for place in places
        ),
        "  and parsed, checked": lambda: (parsed[place] for place in places),
        "  and noise drawn, packed": lambda: (dataset[request] for request in planned),
        "through one worker: read, parsed": lambda: through_worker(parsed, places),
        "through one worker: the micro-batch": lambda: through_worker(dataset, planned),
    }
    print(f"{total_mb:,.0f} MB in {len(shards)} shards, {len(places)} samples; medians of {rounds} rounds")
    for state in ("cold", "warm"):
        seconds: dict[str, list[float]] = {name: [] for name in stages}
        for _ in range(rounds):  # side by side, because other jobs of the machine come and go
            for name, stage in stages.items():
                if state == "cold":
                    _forget(shards)
                items = stage()
                if name.startswith("through"):
                    next(items)  # starting a worker takes a second
                start = time.perf_counter()
                for _ in items:
                    pass
                seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        for name, median in medians.items():
            print(
                f"{state} {name:<38} {total_mb / median:>7,.0f} MB/s {len(places) / median:>7,.0f} samples/s "
                f"{medians[next(iter(stages))] / median:>6.0%} of raw"
            )


class _Parsed:
    """A worker's dataset: latents as they are stored."""

    def __init__(self, reader: "CorpusReader") -> None:
        self.reader = reader

    def __getitem__(self, place: "SamplePlace") -> object:
        return self.reader.read(place).stored_latents


def _forget(paths: list[Path]) -> None:
    """Have the kernel drop its copies of the files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["index", "reading"])
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the index (default 10,000,000)")
    parser.add_argument("--ranks", type=int, default=64, help="ranks to plan for (default 64)")
    parser.add_argument("--folder", type=Path, help="where shards are written and kept, for reading")
    parser.add_argument("--num-samples", type=int, default=1024, help="samples of about 1 MB (default 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each reading is measured (default 5)")
    args = parser.parse_args()
    if args.what == "index":
        benchmark_index(args.rows, args.ranks)
    elif args.folder is None:
        parser.error("reading needs --folder")
    else:
        benchmark_reading(args.folder, args.num_samples, args.rounds)


if __name__ == "__main__":
    main()
