"""Cases from public bug reports of other trainers, by number: random numbers, weighting, learning rate, optimizer.

c27 here; c39 (NaN on one rank) and c41 through skipped steps and a resume in test_finetune.py; c40 (unequal batches)
in test_estimator.py; c41 and the norm of c57 on 1 and 2 ranks in end_to_end/test_train.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from adaptiveload.data.corpus import SourceConfig, open_corpus
from adaptiveload.models.flow_matching import FlowMatchingConfig
from adaptiveload.models.wan import WanConfig, WanTransformer
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import ScheduleConfig, build_policy
from adaptiveload.scheduling.shapes import LatentGeometry, Shape
from adaptiveload.training.config import RunConfig
from adaptiveload.training.distributed import Ranks, shard_model
from adaptiveload.training.feed import MicroBatchDataset, planned_sample
from adaptiveload.training.live_step import build_model, check_optimizer
from adaptiveload.training.optimizer import OptimizerConfig, build_optimizer
from adaptiveload.training.step_guard import StepGuard
from tests.training.test_feed import COST, GEOMETRY

Drawn = dict[str, tuple[float, bytes, bytes]]


def drawn_in_step(path: Path, ranks: int, step: int, objective: FlowMatchingConfig, seed: int = 7) -> list[Drawn]:
    """What each rank draws in a step: noise level, noise and text of every sample by its name."""
    corpus = open_corpus([SourceConfig(str(path))], GEOMETRY)
    order = EndlessOrder(np.arange(len(corpus.table)), seed=1, block_size=4)
    planner = build_policy(
        ScheduleConfig("balanced", samples_per_step=12, memory_limit_tokens=128),
        corpus.table,
        order,
        COST,
        ranks,
        "slot",
    )
    dataset = MicroBatchDataset(corpus.reader(), LatentGeometry(), Shape(1, 32, 32), objective, seed=seed)
    plan = planner.plan(step)
    found: list[Drawn] = []
    for rank in range(ranks):
        found.append({})
        for indices in plan.micro_batches(rank):
            batch = dataset[tuple(planned_sample(plan, corpus, i) for i in indices)].packed
            noise = batch.noise.split(batch.seq_offsets.diff().tolist())
            texts = batch.text.float().split(batch.text_offsets.diff().tolist())
            sigma = [float(s) for s, is_clean in zip(batch.sigma, batch.is_clean, strict=True) if not is_clean]
            for i, key in enumerate(batch.keys):
                if not batch.is_filler[i]:
                    found[-1][key] = (sigma[i], noise[i].numpy().tobytes(), texts[i].numpy().tobytes())
    return found


def merge(parts: list[Drawn]) -> Drawn:
    assert sum(map(len, parts)) == len({key for part in parts for key in part}), "a sample on two ranks"
    return {key: value for part in parts for key, value in part.items()}


def test_c27_noise_and_timesteps_are_the_samples_own(dataset: Path) -> None:
    """Not the ranks': none are shared, on any number of ranks they are the same, and nothing global is behind them."""
    objective = FlowMatchingConfig()
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (the state that must not matter)
    reference = merge(drawn_in_step(dataset, 1, 3, objective))
    assert len(reference) == 12
    for part in (0, 1):
        assert len({value[part] for value in reference.values()}) == 12, "two samples with the same numbers"
    for ranks in (2, 3, 4):
        torch.manual_seed(ranks)
        np.random.seed(ranks)  # noqa: NPY002
        state = torch.get_rng_state()
        parts = drawn_in_step(dataset, ranks, 3, objective)
        assert all(parts)
        assert merge(parts) == reference
        assert torch.equal(torch.get_rng_state(), state)
    # 60 samples, 5 steps an epoch: the same samples again, a whole epoch later, with other numbers; and another seed.
    epochs = [
        merge([d for step in range(first, first + 5) for d in drawn_in_step(dataset, 2, step, objective)])
        for first in (0, 5)
    ]
    assert epochs[0].keys() == epochs[1].keys()
    assert all(epochs[0][key][part] != epochs[1][key][part] for key in epochs[0] for part in (0, 1))
    other = merge(drawn_in_step(dataset, 2, 3, objective, seed=8))
    assert all(other[key][part] != reference[key][part] for key in reference for part in (0, 1))


def test_dropped_captions_are_the_null_text_and_given_frames_are_clean(dataset: Path) -> None:
    """Captions for classifier-free guidance and first frames for TI2V, through the feed; never in held-out samples."""
    corpus = open_corpus([SourceConfig(str(dataset))], GEOMETRY)
    order = EndlessOrder(np.arange(len(corpus.table)), seed=1, block_size=4)
    planner = build_policy(
        ScheduleConfig("balanced", samples_per_step=60, memory_limit_tokens=4096), corpus.table, order, COST, 1, "slot"
    )
    plan = planner.plan(0)
    planned = tuple(planned_sample(plan, corpus, i) for i in range(60))
    reader, null = corpus.reader(), corpus.reader().null_text()

    def batch(is_training: bool = True, **objective: float):
        parts = (reader, LatentGeometry(), Shape(1, 32, 32), FlowMatchingConfig(**objective), 7)
        return MicroBatchDataset(*parts, is_training=is_training)[planned].packed

    def num_null(found) -> int:
        texts = found.text.split(found.text_offsets.diff().tolist())
        return sum(torch.equal(text, null) for text in texts)

    assert num_null(batch(text_dropout=1.0)) == 60
    assert num_null(batch(text_dropout=0.0)) == 0
    assert 5 < num_null(batch(text_dropout=0.3)) < 31  # 18 expected, 3.5 is one standard deviation
    assert num_null(batch(is_training=False, text_dropout=1.0)) == 0
    given = batch(clean_first_frame=1.0)
    clips = sum(grid[0] > 1 for grid in given.grids)
    assert 0 < clips < 60
    assert sum(given.is_clean) == clips
    assert sum(batch(clean_first_frame=0.0).is_clean) == 0
    assert 0 < sum(batch(clean_first_frame=0.5).is_clean) < clips
    assert sum(batch(is_training=False, clean_first_frame=1.0).is_clean) == 0


def test_c57_an_optimizer_made_before_sharding_is_a_bug_that_shows(ranks: Ranks) -> None:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 48, "num_layers": 1, "text_dim": 16}
    config = RunConfig(model=WanConfig(**sizes, freq_dim=16))
    model, _, optimizer = build_model(config, ranks)
    check_optimizer(model, optimizer)
    model = WanTransformer(config.model)
    early = build_optimizer(model, OptimizerConfig())
    shard_model(model, ranks, "fp32")
    with pytest.raises(AssertionError, match="not those of the model"):
        check_optimizer(model, early)


def test_steps_skipped_in_a_row_are_counted_over_restarts(ranks: Ranks, tmp_path: Path) -> None:
    """Or a job that is queued again walks through the whole order with weights that never move."""
    losses = [(torch.tensor([float("nan")]), ("sample",))]
    guard = StepGuard(tmp_path, ranks, max_in_a_row=2, total=0, in_a_row=0)
    for step in range(2):
        assert guard.why_skip(step, 1.0, losses)
    resumed = StepGuard(tmp_path, ranks, 2, guard.total, guard.in_a_row)
    with pytest.raises(RuntimeError, match="3 in a row"):
        resumed.why_skip(2, 1.0, losses)
