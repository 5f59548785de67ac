"""Raw media to a dataset: decode, cut, encode, write, report. The dataset appears whole or not at all."""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adaptiveload.data.cuts import CutConfig
from adaptiveload.data.encode import ItemResult, encode_item
from adaptiveload.data.index import INFO_NAME, ShardIndex
from adaptiveload.data.latent_codecs import LatentCodec
from adaptiveload.data.raw import RawItem, find_inputs
from adaptiveload.data.report import Report
from adaptiveload.data.shard_writer import DatasetWriter
from adaptiveload.data.text import TextEncoder
from adaptiveload.scheduling.shapes import Shape

REPORT_NAME = "report.json"


def prepare(
    inputs: list[Path],
    output: Path,
    config: CutConfig,
    codec: LatentCodec,
    text_encoder: TextEncoder,
    *,
    overwrite: bool = False,
    num_workers: int = 1,
    samples_per_shard: int = 1000,
) -> tuple[ShardIndex, dict[str, Any]]:
    """Prepare all inputs into the dataset folder `output`; returns its index and the content of its `report.json`.

    Args:
        inputs: Folders and `.tar` shards of media, see `raw.py`.
        output: Folder to make. It appears under this name only once it is complete.
        config: Target shapes and rules, see `cuts.py`.
        codec: Pixels to latents; must be picklable if `num_workers` is above 1.
        text_encoder: Captions to embeddings.
        overwrite: Replace an existing dataset, once the new one is complete.
        num_workers: Processes that decode and encode.
        samples_per_shard: Samples in one shard.

    Raises:
        ValueError: If `output` exists and `overwrite` is not set, or is not a dataset; if an input is unusable as such;
            if no input gives a sample.
    """
    _check_output(output, overwrite)
    found = find_inputs(inputs)
    report = Report(skipped=list(found.skipped), damaged=list(found.damaged))
    with _finished_folder(output) as folder:
        writer = DatasetWriter(folder, codec, text_encoder, samples_per_shard)
        try:
            results = _encode_all(found.items, config, codec, num_workers)
            for result in tqdm(results, total=len(found.items), unit="item", disable=None):
                report.add(result)
                _write(writer, result, config.fps)
            if not report.used:
                reasons = "".join(f"\n  {problem.key}: {problem.reason}" for problem in report.skipped[:5])
                raise ValueError(f"no input gave a sample ({len(report.skipped)} skipped){reasons}")
            writer.finish()
        finally:
            writer.close()
        summary = report.to_json()
        (folder / REPORT_NAME).write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return ShardIndex.read(output), summary


def sample_key(source: str) -> str:
    """Key of a source: readable, free of dots and slashes, and unique through eight hex digits of its hash."""
    digest = hashlib.blake2b(source.encode(), digest_size=4).hexdigest()
    return f"{re.sub(r'[^a-z0-9]+', '-', source.lower())[-40:].strip('-')}-{digest}"


def _encode_all(items: list[RawItem], config: CutConfig, codec: LatentCodec, num_workers: int) -> Iterator[ItemResult]:
    encode = partial(encode_item, config=config, codec=codec)
    if num_workers == 1:
        yield from map(encode, items)
        return
    # "spawn": forking a process that has loaded torch can hang in its thread pools.
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        # A bounded number at a time, so that results do not pile up before a slow writer.
        for start in range(0, len(items), 32 * num_workers):
            yield from pool.map(encode, items[start : start + 32 * num_workers])


def _write(writer: DatasetWriter, result: ItemResult, fps: float) -> None:
    numbers: Counter[Shape] = Counter()
    for sample in sorted(result.samples, key=lambda sample: (sample.cut.shape, sample.cut.start)):
        shape = sample.cut.shape
        key = f"{sample_key(result.item.source)}-{shape}-{numbers[shape]:03d}"
        numbers[shape] += 1
        box = [round(edge, 2) for edge in sample.cut.box]
        meta = {**shape._asdict(), "fps": fps, "start_frame": sample.cut.start, "box": box}
        writer.write(key, result.item.source, sample.latents, result.item.caption, meta)


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"output {output} exists; pass --overwrite to replace it, or name another folder")
    if not output.is_dir() or (any(output.iterdir()) and not (output / INFO_NAME).is_file()):
        raise ValueError(f"output {output} is not a dataset (no {INFO_NAME}); it is not overwritten")


@contextmanager
def _finished_folder(output: Path) -> Iterator[Path]:
    """A folder to fill that becomes `output` at the end, in place of what was there; after an error it is removed."""
    output = output.absolute()
    unfinished = output.with_name(f".{output.name}.unfinished-{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}")
        if output.exists():
            output.rename(replaced)
        unfinished.rename(output)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
