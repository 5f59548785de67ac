"""What a run will do, from its plans alone: printed when train.py starts, and by `train.py --dry-run`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from adaptiveload.scheduling.balanced import BalancedPolicy, enough_samples_per_step
from adaptiveload.scheduling.metrics import idle_share, load_cv, step_time
from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import limit_of, recompute_of
from adaptiveload.scheduling.recompute import ALL_BLOCKS
from adaptiveload.training.config import RunConfig
from adaptiveload.training.cost import device_memory_bytes
from adaptiveload.training.policy_table import fullest_of
from adaptiveload.training.schedule import Schedule, StreamSchedule

_NUM_STEPS = 20
_MAX_NAMES = 20  # dropped files that are named; the rest is counted
_REPORT_NAME = "report.json"  # what scripts.prepare skipped, beside the dataset's shards


def describe_start(config: RunConfig, schedule: Schedule | StreamSchedule, ranks: int, first_step: int) -> str:
    """What a run says as it starts: its plan, as `describe_schedule`, and what it trains; or that it is done."""
    if first_step >= config.max_steps:
        return f"{config.run_dir} has all {config.max_steps} steps: nothing left to train (raise max_steps to go on)"
    plan = [describe_schedule(schedule, ranks, first_step)] if isinstance(schedule, Schedule) else []
    return "\n".join([*plan, f"trained: {config.describe_trained()}; the run begins at step {first_step}"])


def describe_schedule(schedule: Schedule, ranks: int, first_step: int = 0) -> str:
    """Buckets, predicted memory and time, the plans of some steps and their figures, files that were dropped: as text.

    Raises:
        ValueError: If there is nothing to train: no step, or steps of fillers alone.
    """
    plans = [schedule.policy.plan(step) for step in range(first_step, first_step + _NUM_STEPS)]
    if not any(plan.num_samples for plan in plans):
        raise ValueError(
            f"{schedule.corpus.indices[0].root}: the plan is empty, no sample runs in the first {_NUM_STEPS} steps"
        )
    planned = [(plan.costs_us, plan.meet, plan.replicas) for plan in plans]
    step_s = sum(step_time(*each) for each in planned) / 1e6 / _NUM_STEPS
    tokens = sum(int(schedule.table.num_tokens[plan.sample_ids].sum()) for plan in plans)
    samples = float(np.mean([plan.num_samples for plan in plans]))
    text_tokens = schedule.settings.text_memory_tokens
    largest = max(int(fullest_of(plan, schedule.table, text_tokens).max()) for plan in plans)
    memory = "measured" if schedule.models.is_memory_measured else "a prior"
    copies = f" with {plans[0].replicas} copies of the model" if plans[0].replicas > 1 else ""
    head = (
        f"{_NUM_STEPS} steps from {first_step} on {ranks} ranks{copies}, {schedule.settings.policy}, meeting every "
        f"{schedule.meet}, lookahead {schedule.settings.lookahead}:"
    )
    return "\n".join(
        [
            schedule.corpus.describe(),
            f"{len(schedule.train_ids)} training and {len(schedule.held_out_ids)} held-out samples",
            *_dropped_lines(schedule),
            *_bucket_lines(schedule),
            f"costs: {schedule.models.source}; memory: {memory}",
            *([schedule.lowered] if schedule.lowered else []),
            head,
            f"  samples a step      {samples:.1f}, in {np.mean([plan.num_slots for plan in plans]):.1f} slots",
            f"  largest micro-batch {largest} of {schedule.settings.memory_limit_tokens} tokens",
            *_recompute_lines(schedule, plans),
            *_memory_lines(schedule),
            f"  load CV             {np.mean([load_cv(*each) for each in planned]):.4f}",
            f"  idle share          {np.mean([idle_share(*each) for each in planned]):.4f}",
            f"  predicted step      {step_s:.3f} s, {tokens / step_s / _NUM_STEPS:,.0f} tokens/s",
            f"  predicted epoch     {len(schedule.train_ids) / samples * step_s / 3600:.3g} hours",
            *warnings(schedule, ranks),
            f"step {plans[0].step}, planned milliseconds (tokens) of each micro-batch:",
            *_plan_lines(plans[0].costs_us, plans[0].num_tokens),
        ]
    )


def warnings(schedule: Schedule, ranks: int) -> list[str]:
    """Lines on what will not train well: too large a global batch for the data, or too small a one for level ranks."""
    if not isinstance(schedule.policy, BalancedPolicy):
        return []
    ids = schedule.train_ids
    given, draws = schedule.settings.samples_per_step, int(schedule.corpus.repeats[ids].sum())
    if given > draws:
        text = (
            f"WARNING: schedule.samples_per_step={given} is more than the {draws} samples of an epoch: a step trains "
        )
        return [text + "on some of them more than once"]
    if ranks == 1:
        return []
    costs = schedule.history.initial.sample_us(schedule.table.computed_tokens(ids), schedule.table.text_len[ids])
    enough = enough_samples_per_step(costs, ranks)
    if given >= enough or int(schedule.settings.lookahead) % ranks == 0:  # whole cohorts are level at any step size
        return []
    text = (
        "WARNING: the work of a rank in a step is under twice the dearest sample, so ranks will wait: "
        f"schedule.samples_per_step={given} is small for {ranks} ranks, {enough} would do "
        f"(or schedule.lookahead={ranks} from the start of the run on, or fewer ranks)"
    )
    return [text]


def _dropped_lines(schedule: Schedule) -> Iterator[str]:
    for index in schedule.corpus.indices:
        path = Path(str(index.root)) / _REPORT_NAME
        if not path.is_file():
            continue
        skipped = json.loads(path.read_text()).get("skipped", [])
        if skipped:
            yield f"dropped when {index.root} was prepared: {len(skipped)} files"
        for problem in skipped[:_MAX_NAMES]:
            yield "  " + ": ".join(str(value) for value in problem.values())
        if len(skipped) > _MAX_NAMES:
            yield f"  ... and {len(skipped) - _MAX_NAMES} more, see {path}"


def _bucket_lines(schedule: Schedule) -> Iterator[str]:
    """A line a bucket: samples, tokens, and one sample alone in its micro-batch."""
    table, models = schedule.table, schedule.models
    shape_ids = table.shape_ids[schedule.train_ids]
    total = int(table.num_tokens[schedule.train_ids].sum())
    yield f"{'shape':>16} {'tokens':>8} {'samples':>8} {'of all tokens':>14} {'one alone: ms':>14} {'GiB':>7}"
    for i, shape in enumerate(table.shapes):
        count = int((shape_ids == i).sum())
        if not count:
            continue
        tokens = int(table.shape_tokens[i])
        length, settings = np.array([tokens]), schedule.settings
        price, memory = models.cost.sample_us(length, np.array([0])), models.memory
        if settings.recompute == "auto":
            recompute = recompute_of(settings)
            share = recompute.permille(length + recompute.text_tokens)
            price = price + models.cost.again_us(length) * share // ALL_BLOCKS
            memory = models.kept_memory.mixed(memory, int(share[0]) / ALL_BLOCKS)
        cost = models.cost.micro_batch_us(price)
        gib = memory.micro_batch_bytes(tokens, 1) / 2**30
        yield f"{shape!s:>16} {tokens:>8} {count:>8} {count * tokens / total:>14.1%} {cost[0] / 1e3:>14.1f} {gib:>7.2f}"


def _recompute_lines(schedule: Schedule, plans: Sequence[StepPlan]) -> Iterator[str]:
    """How much of the planned tokens' forward runs twice, and from which length of a micro-batch on."""
    settings = schedule.settings
    if settings.recompute == "auto":
        again = sum(int((plan.recomputed * plan.num_tokens).sum()) for plan in plans)
        share = again / ALL_BLOCKS / max(sum(int(plan.num_tokens.sum()) for plan in plans), 1)
        yield (
            f"  recompute           {share:.1%} of the blocks' work: none up to {settings.kept_tokens} tokens, all at "
            f"{settings.most_tokens}"
        )


def _memory_lines(schedule: Schedule) -> Iterator[str]:
    """A warning of a limit above what fits by the memory model."""
    settings, memory = schedule.settings, schedule.models.memory
    fitting = settings.most_tokens
    if settings.recompute != "auto":
        try:
            fitting = memory.max_tokens(device_memory_bytes(schedule.config.cost.gpu, schedule.hardware))
        except ValueError as error:
            yield f"  WARNING: {error}"
    if fitting is not None and limit_of(settings) > fitting:
        yield (
            f"  WARNING: schedule.memory_limit_tokens={limit_of(settings)} is above the {fitting} tokens that fit by "
            "the memory model"
        )


def _plan_lines(costs_us: np.ndarray, num_tokens: np.ndarray, max_ranks: int = 8) -> Iterator[str]:
    for g, (costs, tokens) in enumerate(zip(costs_us, num_tokens, strict=True)):
        cells = [
            f"{cost / 1e3:9.1f} ({count})" for cost, count in zip(costs[:max_ranks], tokens[:max_ranks], strict=True)
        ]
        yield f"  slot {g}: " + " ".join(cells) + (" ..." if len(costs) > max_ranks else "")
