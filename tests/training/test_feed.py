"""Planned micro-batches through DataLoader workers: equal for any number of them; losses named, failures explained."""

import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from adaptiveload.data.corpus import SourceConfig, open_corpus
from adaptiveload.data.index import write_index
from adaptiveload.data.indexer import index_shards
from adaptiveload.data.stream import Progress, find_shards
from adaptiveload.models.flow_matching import LOSS_WEIGHTINGS, FlowMatchingConfig
from adaptiveload.scheduling.cost import TwoTermCost
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import POLICIES, ScheduleConfig, build_policy
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.failures import explain_failure
from adaptiveload.training.feed import DataConfig, MicroBatch, MicroBatchDataset, PlannedFeed, PlannedSample
from adaptiveload.training.ledger import Ledger
from adaptiveload.training.packers import StreamItem
from adaptiveload.training.stream import StreamDataset

GEOMETRY = LatentGeometry()
COST = TwoTermCost(0.0, 100.0, 1.0, 1.0, 0.01)


def make_feed(
    path: Path, num_workers: int, rank: int = 0, ranks: int = 2, policy: str = "balanced", steps: range = range(12)
) -> PlannedFeed:
    corpus = open_corpus([SourceConfig(str(path))], GEOMETRY)
    order = EndlessOrder(np.arange(len(corpus.table)), seed=1, block_size=4)
    config = ScheduleConfig(policy, samples_per_step=10, memory_limit_tokens=128, slots_per_step=2)
    planner = build_policy(config, corpus.table, order, COST, ranks, "step")
    dataset = MicroBatchDataset(corpus.reader(), GEOMETRY, Shape(1, 32, 32), FlowMatchingConfig(), seed=7)
    data = DataConfig(num_workers=num_workers)
    return PlannedFeed(dataset, corpus, planner, rank, steps, data, 128 * 64 * 8, pin_memory=False)


def batches(feed: PlannedFeed, steps: int) -> list[MicroBatch]:
    found = [batch for _ in range(steps) for batch in feed.next_step()[1]]
    feed.close()
    return found


def test_steps_are_the_same_bit_for_bit_with_any_number_of_workers(dataset: Path) -> None:
    expected = batches(make_feed(dataset, 0), 12)
    for num_workers in (1, 3):
        found = batches(make_feed(dataset, num_workers), 12)
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert one.packed.keys == other.packed.keys
            for name in ("latents", "noise", "sigma", "text"):
                assert torch.equal(getattr(one.packed, name), getattr(other.packed, name))


def test_samples_carry_the_weight_that_is_in_z_times_that_of_their_noise_level(dataset: Path) -> None:
    """Planned samples and streamed ones; Z counts S ** alpha alone."""
    objective = FlowMatchingConfig(loss_weighting="cosmap")
    corpus = open_corpus([SourceConfig(str(dataset))], GEOMETRY)
    planned = MicroBatchDataset(corpus.reader(), GEOMETRY, Shape(1, 32, 32), objective, seed=7)
    requests = tuple(PlannedSample(row, corpus.place(row), 0, 0, weight=3.0) for row in range(6))
    packed = planned[requests].packed
    for weight, sigma in zip(packed.weights.tolist(), packed.sigma.tolist(), strict=True):
        assert weight == pytest.approx(3 * LOSS_WEIGHTINGS["cosmap"](sigma), rel=1e-6)  # sigma is float32 here
    schedule = ScheduleConfig(memory_limit_tokens=128, loss_weight_exponent=0.5)
    null_text = corpus.reader().null_text()
    parts = (Progress(), corpus.info.normalization_hash, null_text, 8, schedule, GEOMETRY, objective, 7)
    urls, _ = find_shards(str(dataset))
    items = [item for item in StreamDataset(urls, (0, 1), *parts) if isinstance(item, StreamItem)]
    assert len(items) == len(corpus.table)
    for item in items:
        expected = item.num_tokens**0.5 * LOSS_WEIGHTINGS["cosmap"](item.packed.sigma)
        assert item.packed.weight == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_sample_once_an_epoch_and_equal_slots(dataset: Path, policy: str, ranks: int) -> None:
    """Epochs end inside steps (balanced) or with partial buckets and fillers (the paper's policies)."""
    feeds = [make_feed(dataset, 0, rank, ranks, policy, range(40)) for rank in range(ranks)]
    used: Counter[str] = Counter()
    epochs = 0
    while epochs < 3:
        plans = []
        for feed in feeds:
            plan, micro_batches = feed.next_step()
            plans.append(plan)
            found = list(micro_batches)
            used.update(name for batch in found for name in batch.trained)
        assert len({plan.digest for plan in plans}) == 1
        epochs, drawn = divmod(plans[0].next_position, 60)
        assert feeds[0].saved_state(plans[0])["position_is"] == f"epoch {epochs}, {drawn} of 60 samples"
    assert drawn == 0
    assert used == Counter({f"sample{i:03d}": 3 for i in range(60)})


def test_prefetch_is_bounded_by_bytes() -> None:
    mib = 2**20
    assert DataConfig(num_workers=2, prefetch_mib=1000).prefetch_factor(100 * mib) == 3
    assert DataConfig(num_workers=4, prefetch_mib=100).prefetch_factor(100 * mib) == 1
    assert DataConfig(num_workers=1).prefetch_factor(1000) == 16
    assert DataConfig(num_workers=0).prefetch_factor(1000) is None


class _StuckDataset(MicroBatchDataset):
    def __getitem__(self, micro_batch: tuple) -> MicroBatch:
        signal.pause()
        raise AssertionError


def test_a_worker_that_hangs_is_explained(dataset: Path) -> None:
    corpus = open_corpus([SourceConfig(str(dataset))], GEOMETRY)
    stuck = _StuckDataset(corpus.reader(), GEOMETRY, Shape(1, 32, 32), FlowMatchingConfig(), seed=7)
    policy = build_policy(
        ScheduleConfig(samples_per_step=10, memory_limit_tokens=128),
        corpus.table,
        EndlessOrder(np.arange(60), seed=1),
        COST,
        1,
        "step",
    )
    config = DataConfig(num_workers=1, worker_timeout_s=2.5)
    feed = PlannedFeed(stuck, corpus, policy, 0, range(3), config, 2**20, pin_memory=False)
    with pytest.raises(RuntimeError) as caught:
        feed.next_step()
    assert "data.worker_timeout_s" in str(explain_failure(caught.value))
    feed.close()


def test_the_ledger_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    config = DataConfig(max_lost_share=0.1, log_samples=True)
    ledger = Ledger(tmp_path, 0, config, 10, 0)
    for step in range(4):
        ledger.record(step, [f"a{step}"], [(f"b{step}", "gone")])
    (tmp_path / "lost.jsonl").open("a").write('{"step": 1, "torn')
    again = Ledger(tmp_path, 0, config, 10, 2)
    again.forget_from(2)
    again.record(2, ["a2"], [])
    assert (tmp_path / "lost.jsonl").read_text().count("\n") == 2
    assert "a3" not in (tmp_path / "samples_used" / "rank-000.jsonl").read_text()
    again.add(0, 20)
    with pytest.raises(RuntimeError, match=r"3 of 20 samples.*data\.max_lost_share=0\.1"):
        again.add(1, 20)


@pytest.mark.parametrize(("ranks", "num_workers"), [(2, 2), (4, 1), (2, 4)])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [8], [10, 10, 3], [7, 1]], ids=str)
def test_few_and_uneven_shards_give_equal_steps(tmp_path: Path, ranks: int, num_workers: int, sizes: list[int]) -> None:
    """Cases c22 and c23: the plan knows samples, not shards, so no reader can run dry before another."""
    from tests.training.test_stream import write_shards

    write_shards(tmp_path / "data", sizes)
    write_index(index_shards(str(tmp_path / "data"))[0])
    feeds = [make_feed(tmp_path / "data", num_workers, rank, ranks, steps=range(8)) for rank in range(ranks)]
    used: Counter[str] = Counter()
    for _ in range(8):
        steps = [feed.next_step() for feed in feeds]
        assert len({plan.digest for plan, _ in steps}) == 1
        assert len({len(plan.micro_batches(rank)) > 0 for rank, (plan, _) in enumerate(steps)}) == 1
        for rank, (plan, micro_batches) in enumerate(steps):
            # Case c25: a rank trains the micro-batches of its plan whole, strings and all.
            for indices, batch in zip(plan.micro_batches(rank), micro_batches, strict=True):
                expected = [feeds[0].table.keys[plan.sample_ids[i]] for i in indices]
                assert sorted(batch.trained) == sorted(expected)
                used.update(batch.trained)
    for feed in feeds:
        feed.close()
    size = sum(sizes)
    assert set(used) == {f"k{shard}-{i}" for shard, count in enumerate(sizes) for i in range(count)}
    assert max(used.values()) - min(used.values()) <= 1
    assert sum(used.values()) == 80 == 80 // size * size + 80 % size
