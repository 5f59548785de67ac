"""Streams without an index on 2 and 4 ranks: equal steps, every sample once an epoch, losses named, exact resume."""

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptiveload.data.latent_codecs import DctCodec
from adaptiveload.data.shard_writer import DatasetWriter
from adaptiveload.data.text import HashTextEncoder
from adaptiveload.scheduling.local import pack_local
from adaptiveload.scheduling.policies import ScheduleConfig
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.config import load_config
from adaptiveload.training.cost import Hardware
from adaptiveload.training.feed import DataConfig
from adaptiveload.training.schedule import build_stream_schedule
from adaptiveload.training.stream import check_stream_config
from tests.data.media_files import write_tar
from tests.launching import launch

SHAPES = (Shape(1, 32, 32), Shape(5, 32, 32), Shape(9, 48, 32), Shape(5, 64, 64), Shape(13, 64, 64))
POLICIES = ("dual_constraint", "equal_token", "local")


def write_shards(root: Path, sizes: list[int]) -> None:
    """Shards of the given numbers of samples, keys SHARD-NUMBER, no index."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for shard, size in enumerate(sizes):
        writer = DatasetWriter(root, DctCodec(), HashTextEncoder(16, 8), 1000, prefix=f"s{shard}")
        for i in range(size):
            shape = SHAPES[int(rng.integers(len(SHAPES)))]
            latents = rng.standard_normal(LatentGeometry().latent_size(shape)).astype(np.float16)
            writer.write(f"k{shard}-{i}", f"clip{shard}-{i}", latents, f"number {i}", shape._asdict())
        writer.finish()
    for name in ("index.parquet", "dataset.json"):
        (root / name).unlink()


def members(path: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[list[dict[str, Any]]]]]:
    """By number of ranks and case: what each rank got, step by step."""
    root, output = tmp_path_factory.mktemp("streams"), tmp_path_factory.mktemp("out")
    write_shards(root / "plain", [12, 9, 15, 11])
    write_shards(root / "c22-three-shards", [4, 4, 4])
    write_shards(root / "c22-one-shard", [8])
    write_shards(root / "c23-uneven", [10, 10, 3])
    write_shards(root / "c23-very-uneven", [7, 1])
    # The same key twice in a shard, and in two shards.
    twins = root / "c16-twins"
    write_shards(twins, [3, 2])
    first, second = members(twins / "s0-000000.tar"), members(twins / "s1-000000.tar")
    write_tar(twins / "s0-000000.tar", [*first, *first[2:4]])
    write_tar(twins / "s1-000000.tar", [*first[:2], *second])
    # A sample without json, without tensors, with broken json, with a shape that is none.
    parts = root / "c18-parts"
    write_shards(parts, [3, 6])
    (json_name, json_data), *rest = members(parts / "s1-000000.tar")
    assert json_name.endswith(".json")
    broken = [("a.json", json_data), ("b.json", b'{"frames": 1'), ("b.latents.safetensors", rest[0][1])]
    odd = json.dumps({**json.loads(json_data), "height": 40}).encode()
    broken += [("c.latents.safetensors", rest[0][1]), ("d.json", odd), ("d.latents.safetensors", rest[0][1])]
    write_tar(parts / "s1-000000.tar", [*broken, (json_name, json_data), *rest])
    # A shard that is cut, and one that is no tar.
    cut = root / "c15-cut"
    write_shards(cut, [6, 6])
    data = (cut / "s1-000000.tar").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        (cut / "s1-000000.tar").write_bytes(data[: tar.getmembers()[9].offset + 700])
    (cut / "s2-000000.tar").write_bytes(b"")
    found: dict[int, dict[str, list[list[dict[str, Any]]]]] = {}
    for ranks in (2, 4):
        launch(root, output, ranks=ranks, script="tests/training/stream_cases.py")
        by_rank = [json.loads((output / f"rank-{r}-of-{ranks}.json").read_text()) for r in range(ranks)]
        found[ranks] = {case: [result[case] for result in by_rank] for case in by_rank[0]}
    return found


def used(by_rank: list[list[dict[str, Any]]], epoch: int) -> Counter[str]:
    return Counter(
        key
        for steps in by_rank
        for step in steps
        if step["epoch"] == epoch
        for batch in step["batches"]
        for key in batch
    )


def lost(by_rank: list[list[dict[str, Any]]]) -> list[list[str]]:
    return [loss for steps in by_rank for step in steps for loss in step["lost"]]


def check_equal_steps(by_rank: list[list[dict[str, Any]]]) -> None:
    for steps in zip(*by_rank, strict=True):  # strict: as many steps on all ranks
        assert len({step["digest"] for step in steps}) == 1
        assert len({len(step["batches"]) for step in steps}) == 1
        assert all(tokens <= 128 for step in steps for tokens in step["tokens"])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("case", "samples"),
    [("plain", 47), ("c22-three-shards", 12), ("c22-one-shard", 8), ("c23-uneven", 23), ("c23-very-uneven", 8)],
)
def test_equal_steps_and_every_sample_once_an_epoch(
    results: dict[int, Any], ranks: int, policy: str, case: str, samples: int
) -> None:
    by_rank = results[ranks][f"{case}/{policy}"]
    check_equal_steps(by_rank)
    for epoch in range(3):
        counts = used(by_rank, epoch)
        assert len(counts) == samples
        assert set(counts.values()) == {1}
    assert lost(by_rank) == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_key_twice_is_used_once_and_named(results: dict[int, Any], ranks: int, policy: str) -> None:
    by_rank = results[ranks][f"c16-twins/{policy}"]
    check_equal_steps(by_rank)
    expected = [
        *(f"s0-000000.tar/k0-{i}" for i in range(3)),
        "s1-000000.tar/k0-0",
        *(f"s1-000000.tar/k1-{i}" for i in (0, 1)),
    ]
    for epoch in range(3):
        assert used(by_rank, epoch) == Counter(expected)
    losses = lost(by_rank)
    assert {key for key, _ in losses} == {"s0-000000.tar/k0-1"}
    assert "more than once" in losses[0][1]


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_that_lack_a_part_are_named(results: dict[int, Any], policy: str) -> None:
    by_rank = results[2][f"c18-parts/{policy}"]
    check_equal_steps(by_rank)
    assert all(sum(used(by_rank, epoch).values()) == 9 for epoch in range(3))
    reasons = {key.rpartition("/")[2]: reason for key, reason in lost(by_rank)}
    assert reasons.keys() == {"a", "b", "c", "d"}
    assert reasons["a"] == "latents.safetensors is missing"
    assert reasons["c"] == "json is missing"
    assert "multiple of 16" in reasons["d"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cut_shard_costs_what_is_behind_the_cut(results: dict[int, Any], policy: str) -> None:
    by_rank = results[2][f"c15-cut/{policy}"]
    check_equal_steps(by_rank)
    assert all(sum(used(by_rank, epoch).values()) == 6 + 4 for epoch in range(3))
    assert {key for key, _ in lost(by_rank)} == {"s1-000000.tar/k1-4", "s1-000000.tar", "s2-000000.tar"}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("policy", ["dual_constraint", "local"])
def test_a_resumed_stream_is_the_unbroken_one(results: dict[int, Any], ranks: int, policy: str) -> None:
    unbroken = [[step for step in steps if step["epoch"] < 2] for steps in results[ranks][f"plain/{policy}"]]
    assert results[ranks][f"resumed/{policy}"] == unbroken


@pytest.mark.parametrize("policy", ["dual_constraint", "local"])
def test_a_stream_goes_on_with_other_ranks_and_loses_nothing(results: dict[int, Any], policy: str) -> None:
    before = [steps[:2] for steps in results[2][f"resumed/{policy}"]]
    after = results[4][f"other-ranks/{policy}"]
    check_equal_steps(after)
    assert used(before, 0) + used(after, 0) == used(results[2][f"plain/{policy}"], 0)
    assert used(after, 1) == used(results[2][f"plain/{policy}"], 1)


def test_local_packing_levels_better_than_buckets(results: dict[int, Any]) -> None:
    def idle(policy: str) -> float:
        costs = [np.array(step["costs_us"]) for step in results[2][f"plain/{policy}"][0]]
        return 1 - sum(cost.mean(1).sum() for cost in costs) / sum(cost.max(1).sum() for cost in costs)

    shares = {policy: idle(policy) for policy in POLICIES}
    print("planned idle share by slot:", {policy: round(float(share), 3) for policy, share in shares.items()})
    assert shares["local"] < shares["dual_constraint"]


def test_pack_local_takes_the_head_then_what_fits() -> None:
    assert pack_local([5, 4, 3, 2, 1], [1, 1, 1, 1, 1], target=9, mem_cap=10) == [0, 1]
    assert pack_local([5, 6, 3, 2, 1], [1, 1, 1, 1, 1], target=9, mem_cap=10) == [0, 2, 4]
    assert pack_local([5, 4, 3, 2, 1], [4, 4, 1, 1, 1], target=100, mem_cap=6) == [0, 2, 3]
    assert pack_local([50, 1], [9, 1], target=10, mem_cap=5) == [0]
    rng = np.random.default_rng(0)
    for _ in range(100):
        costs, mems = rng.integers(1, 50, 20).tolist(), rng.integers(1, 50, 20).tolist()
        chosen = pack_local(costs, mems, 60, 60)
        assert chosen[0] == 0
        assert chosen == sorted(set(chosen))
        assert sum(costs[i] for i in chosen) <= 60
        assert sum(mems[i] for i in chosen) <= 60
    with pytest.raises(ValueError, match="at least one"):
        pack_local([], [], 1, 1)


@pytest.mark.parametrize(
    ("data", "schedule", "message"),
    [
        ({}, {"policy": "balanced"}, "schedule.policy='balanced' needs an index"),
        ({"num_workers": 4}, {}, "data.num_workers=4"),
        ({}, {"memory_limit_tokens": None}, "schedule.memory_limit_tokens"),
        ({"held_out_share": 0.1}, {}, "data.held_out_share=0"),
    ],
)
def test_what_needs_an_index_is_refused(data: dict[str, Any], schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_stream_config(
            DataConfig(**{"mode": "stream", "held_out_share": 0, **data}),
            ScheduleConfig(**{"policy": "local", "memory_limit_tokens": 128, **schedule}),
        )


def test_a_stream_knows_where_recompute_begins(run_config: Path) -> None:
    keys = ["data.mode=stream", "data.held_out_share=0", "schedule.policy=local", "schedule.recompute=auto"]
    schedule = build_stream_schedule(load_config(run_config, keys), 4, Hardware.of(torch.device("cpu"))).config.schedule
    assert 128 < schedule.kept_tokens < schedule.most_tokens
    assert (schedule.memory_limit_tokens, schedule.text_memory_tokens) == (128, 0)
    assert schedule.recompute_text_tokens > 0
