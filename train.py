"""Train a video diffusion transformer: `accelerate launch train.py configs/quickstart.yaml key=value ...`."""

import os

# torch.compile gives wrong gradients for chained modulated norms on torch 2.10 to 2.14 (pytorch#193061).
os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")
# Shapes change with every micro-batch; without growing segments the allocator's fragments fill the GPU.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import math
import signal
import sys
import time
import traceback

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main` knows better: no traceback of each rank's imports
from collections.abc import Iterator, Sequence
from typing import NoReturn

from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.training.config import RunConfig, load_config
from adaptiveload.training.cost import device_name, model_dims
from adaptiveload.training.distributed import Ranks, clip_gradients, end_process, finish_ranks, reshard, start_ranks
from adaptiveload.training.failures import explain_failure
from adaptiveload.training.feed import MicroBatch
from adaptiveload.training.group_watch import GroupWatch, group_timeout, say, start_recording
from adaptiveload.training.launcher_settings import follow_launcher
from adaptiveload.training.live_step import run_micro_batch
from adaptiveload.training.memory_limits import LIMITS_NAME, MicroBatchMemoryError, is_out_of_memory, read_records
from adaptiveload.training.metrics import (
    RankMeasurement,
    StepMeasurement,
    gather_measurements,
    schedule_record,
    step_metrics,
    untimed,
)
from adaptiveload.training.optimizer import learning_rate
from adaptiveload.training.previews import Previews
from adaptiveload.training.run import Run, build_run, check_agreement
from adaptiveload.training.schedule import build_schedule
from adaptiveload.training.startup_report import describe_schedule
from adaptiveload.training.step_guard import MicroBatchLosses
from adaptiveload.training.stop_signals import STOPPED_EXIT_CODE, StopSignals, end_at_signals
from adaptiveload.training.workers import start_worker_server


def train(run: Run, stop: StopSignals, watch: GroupWatch) -> bool:
    """The loop: a plan, its micro-batches, one optimizer step; then figures, checkpoints, held-out loss, previews.

    Returns:
        Whether all steps are done; not so if a signal came to any rank.
    """
    config = run.config
    for step in range(run.first_step, config.max_steps):
        run.profiler.before_step(step)
        started, waited = time.perf_counter(), run.feed.wait_s
        watch.at(f"step {step}, waiting for its data")
        plan, micro_batches = run.feed.next_step()
        check_agreement(run.ranks, plan)

        losses, num_lost = forward_backward(run, watch, plan, micro_batches)
        watch.at(f"step {step}, its end", [key for _, keys in losses for key in keys])
        grad_norm, group_norms = clip_gradients(run.optimizer, config.optimizer.max_grad_norm)
        busy_s = run.timer.busy_s()
        lr = set_learning_rate(run, step)
        skipped = run.guard.why_skip(step, grad_norm, losses)
        if skipped is None:
            run.optimizer.step()
            run.ema.update(step)
        run.optimizer.zero_grad(set_to_none=True)

        mine = RankMeasurement(
            loss_sum=sum(float(loss.sum()) for loss, _ in losses),
            step_s=time.perf_counter() - started,
            data_wait_s=run.feed.wait_s - waited,
            memory_peak_gib=run.ranks.take_memory_peak_gib(),
            num_lost=num_lost,
            busy_s=busy_s,
            compile_s=run.timer.compile_s(),
            stop_signal=stop.received,
            save_is_overdue=run.checkpointer.is_overdue,
            save_has_failed=run.checkpointer.has_failed,
        )
        measured = gather_measurements(run.ranks, plan, mine)
        run.profiler.after_step(step, busy_s)
        gradient = {f"train/grad_norm_{name}": norm for name, norm in group_norms.items()}
        gradient |= {"train/grad_norm": grad_norm, "train/lr": lr, "train/num_skipped": run.guard.total}
        watch.at(f"after step {step}")
        log_step(run, plan, measured, gradient | saving_figures(run, step), skipped)
        adapt(run, plan, measured)
        if save_where_due(run, watch, plan, measured):
            return False
        watch.at(f"after step {step}, evaluating", is_bounded=False)
        is_last = step + 1 == config.max_steps
        if is_last or (step + 1) % config.evaluation.every_steps == 0:
            evaluate(run, step)
        if run.previews is not None and (is_last or (step + 1) % config.previews.every_steps == 0):
            preview(run, run.previews, step)
    finish_saving(run, config.max_steps - 1)
    return True


def forward_backward(
    run: Run, watch: GroupWatch, plan: StepPlan, micro_batches: Iterator[MicroBatch]
) -> tuple[MicroBatchLosses, int]:
    """Gradient of the step, (1/Z) * sum of w_i * grad l_i over all ranks.

    Returns:
        For each of this rank's micro-batches w_i * l_i of its samples, left on the device, and their keys; and the
        number of samples that could not be read.
    """
    run.timer.start_step()
    losses: MicroBatchLosses = []
    num_lost = 0
    count = len(plan.micro_batches(run.ranks.rank))
    for g, micro_batch in enumerate(micro_batches):
        run.ledger.record(plan.step, micro_batch.trained, micro_batch.lost)
        num_lost += len(micro_batch.lost)
        watch.at(f"step {plan.step}, slot {g} of {count}", micro_batch.trained)
        try:
            batch = micro_batch.packed.to(run.ranks.device, non_blocking=True)
            weighted = run_micro_batch(
                run.model,
                run.timer,
                batch,
                # FSDP averages over the ranks, so that R/Z here is 1/Z there; never a mean over the micro-batch.
                scale=run.ranks.world_size / plan.normalizer,
                meet=plan.meet,
                is_last=g == count - 1,
                recompute=plan.recompute,
                permille=int(plan.recomputed[g, run.ranks.rank]),
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise run.memory.exceeded(plan, g, run.feed.table, error) from error
        losses.append((weighted, tuple(micro_batch.trained)))
    reshard(run.model)
    return losses, num_lost


def set_learning_rate(run: Run, step: int) -> float:
    """Give the optimizer the learning rate of `step`, and return it."""
    lr = learning_rate(run.config.optimizer, step)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    return lr


def log_step(run: Run, plan: StepPlan, measured: StepMeasurement, extra: dict[str, float], skipped: str | None) -> None:
    """Rank 0 writes down what all ranks measured. Stops all ranks where too many samples were lost."""
    if run.tracker is not None:
        if skipped is not None:
            run.tracker.message(skipped)
        write_step(run, plan, measured, extra | {"data/num_lost": run.ledger.total + measured.num_lost})
    run.ledger.add(measured.num_lost, plan.next_position)


def write_step(run: Run, plan: StepPlan, measured: StepMeasurement, extra: dict[str, float]) -> None:
    """Write the figures of a step, and from time to time what each rank did in each slot."""
    assert run.tracker is not None
    table = run.feed.table
    # FLOPs of a partly frozen model are not known.
    dims = None if run.config.has_frozen_parts else model_dims(run.config.model)
    metrics = step_metrics(plan, measured, table, dims, device_name(run.ranks.device))
    if run.timer.compile_watch is not None:
        metrics |= {"perf/compile_s": measured.compile_s, "perf/num_compiled": run.timer.compile_watch.count}
        if measured.compile_s:
            so_far = f"{run.timer.compile_watch.count} compilations on rank 0 so far"
            run.tracker.message(f"step {plan.step}: torch.compile took {measured.compile_s:.1f} s, {so_far}")
    if run.profiler.is_on(plan.step):
        run.tracker.log(plan.step, untimed(metrics) | extra)
        return
    run.tracker.log(plan.step, metrics | extra)
    if plan.step % run.config.tracking.schedule_every_steps == 0:
        run.tracker.log_schedule(schedule_record(plan, measured, table))
    if named := run.straggler_watch.after_step({"step": plan.step, **metrics}, plan.costs_us):
        run.tracker.message(f"step {plan.step}: {named}")


def adapt(run: Run, plan: StepPlan, measured: StepMeasurement) -> None:
    """Let what was measured reprice later steps, and say so. Collective; a stream is not planned ahead."""
    if run.adaptation is None:
        return
    busy_s = None if run.profiler.is_on(plan.step) else measured.busy_s
    for line in run.adaptation.after_step(plan, busy_s):
        if run.tracker is not None:
            run.tracker.message(f"step {plan.step + 1}: {line}")


def save_where_due(run: Run, watch: GroupWatch, plan: StepPlan, measured: StepMeasurement) -> bool:
    """Begin a save where one is due. After a signal to any rank wait for it: then the run ends here.

    The watch does not bound what waits for the disk: half an hour of the save's own group holds for ranks that wait
    for others there.

    Returns:
        Whether the run ends here.
    """
    step, config = plan.step, run.config
    is_stopped = measured.stop_signal > 0 and step + 1 < config.max_steps
    if measured.save_has_failed:
        watch.at(f"after step {step}, ending a save that has failed", is_bounded=False)
        run.checkpointer.finish()  # raises why
    if is_stopped or measured.save_is_overdue or config.checkpoint.is_due(step + 1, config.max_steps):
        watch.at(f"after step {step}, before its checkpoint")
        state = run.saved_state(plan)  # collective for a stream
        watch.at(f"after step {step}, saving", is_bounded=False)
        saved = run.checkpointer.save(step + 1, state)
    if is_stopped:
        watch.at(f"after step {step}, finishing its checkpoint", is_bounded=False)
        finish_saving(run, step)
        if run.tracker is not None:
            name = signal.Signals(measured.stop_signal).name
            run.tracker.message(f"{name} after step {step + 1}: saved {saved}, ends with code {STOPPED_EXIT_CODE}")
    return is_stopped


def saving_figures(run: Run, step: int) -> dict[str, float]:
    """Figures of the checkpoint that was committed since the last call, none if there is none. Rank 0 says so.

    Where a save had to wait for the one before, both may have been: the earlier one's go on a line of their own.
    """
    figures: dict[str, float] = {}
    for report in run.checkpointer.take_reports():
        if run.tracker is not None:
            if figures:
                run.tracker.log(step, figures)
            run.tracker.message(f"step {step + 1}: {report}")
        figures = report.figures()
    return figures


def finish_saving(run: Run, step: int) -> None:
    """Wait for the save under way, and write its figures."""
    run.checkpointer.finish()
    figures = saving_figures(run, step)
    if figures and run.tracker is not None:
        run.tracker.log(step, figures)


def evaluate(run: Run, step: int) -> None:
    """Held-out loss of the averaged weights."""
    if run.held_out is None or run.held_out.num_draws == 0:
        return
    # Both are collective: every rank takes part, rank 0 writes.
    linear_loss = run.held_out.linear_loss
    with run.ema.swapped_in():
        losses = run.held_out.losses(run.model)
    run.ranks.take_memory_peak_gib()  # not the next step's
    if run.tracker is not None:
        run.tracker.log(step, losses | {"train/loss_heldout_linear": linear_loss})
        loss = losses.get("train/loss_heldout", math.nan)  # nan: none could be read
        run.tracker.message(
            f"step {step + 1}: held-out loss {loss:.4f}, best per-channel linear predictor {linear_loss:.4f} "
            f"({abs(1 - loss / linear_loss):.1%} {'below' if loss < linear_loss else 'above'} it)"
        )


def preview(run: Run, previews: Previews, step: int) -> None:
    """Samples of the averaged weights, by all ranks. No figure of a step knows of their time or memory."""
    started = time.perf_counter()
    run.timer.start_step()  # the blocks' marks of sampling belong to no micro-batch
    with run.ema.swapped_in():
        made = previews.make(run.model, step + 1)
    run.ranks.take_memory_peak_gib()
    if made is not None and run.tracker is not None:
        run.tracker.log_previews(step, *made)
        run.tracker.message(f"step {step + 1}: previews in {made[0]}, {time.perf_counter() - started:.1f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the trainer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", help="YAML file; without one, configs/quickstart.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="configuration keys, for example max_steps=50"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its predictions, train nothing")
    parser.add_argument("--ranks", type=int, help="with --dry-run: plan for this many ranks")
    options = parser.parse_intermixed_args(arguments)
    if options.ranks is not None and not options.dry_run:
        parser.error("--ranks goes with --dry-run; a run has the ranks that it was launched with")
    if options.config is not None and "=" in options.config:
        options.config, options.overrides = None, [options.config, *options.overrides]
    stop = StopSignals()
    started = start(options, stop)
    if started is not None:
        run_to_its_end(*started, stop)


def start(options: argparse.Namespace, stop: StopSignals) -> tuple[Run, GroupWatch] | None:
    """Meet the other ranks and build the run, or, with --dry-run, only print its plan. Ends the process on an error."""
    watch, run_dir = None, None
    try:
        config = load_config(options.config, options.overrides)
        run_dir, is_first = config.run_dir, os.environ.get("RANK", "0") == "0"
        end_at_signals(f"train.py: interrupted; start {config.run_dir} again to go on" if is_first else None, stop)
        if config.checkpoint.is_on and not options.dry_run:
            stop.catch()
        if config.data.num_workers and not options.dry_run:
            start_worker_server()  # its imports take seconds, those of the ranks' own start too
        start_recording(config.run_dir)
        ranks = start_ranks(group_timeout(config.watch))
        config = follow_launcher(config, os.environ, options.ranks or ranks.world_size)
        if ranks.is_main:
            print(ranks.describe(), flush=True)
        if options.dry_run:
            print_plan(config, ranks, options.ranks or ranks.world_size)
            return None
        watch = GroupWatch(ranks.rank, config.watch, config.run_dir)
        run = build_run(config, ranks)
    except Exception as error:
        known = str(error) if isinstance(error, ValueError) else explain_failure(error, run_dir)
        if watch is not None:
            watch.end_all(1, f"rank {watch.rank}, at the start: {known or repr(error)}")
        if known is None:
            say("".join(traceback.format_exception(error)))
        sys.exit(f"train.py: {known or repr(error)}")
    return run, watch


def print_plan(config: RunConfig, ranks: Ranks, num_ranks: int) -> None:
    """What --dry-run prints: the plan of the run on so many ranks, and what is predicted of it."""
    if config.data.mode != "index":
        raise ValueError("--dry-run needs an index: a stream is planned as it is read")
    schedule = build_schedule(config, num_ranks, ranks.device, None, read_records(config.run_dir / LIMITS_NAME))
    if ranks.is_main:
        schedule.corpus.verify()
        print(describe_schedule(schedule, num_ranks))


def run_to_its_end(run: Run, watch: GroupWatch, stop: StopSignals) -> NoReturn:
    """Train, and end this process with the exit code of the run."""
    closes = [run.feed.close] if run.tracker is None else [run.feed.close, run.tracker.close]
    try:
        is_done = train(run, stop, watch)
        watch.at("the end", is_bounded=False)
        run.profiler.close()
        for close in closes:
            close()
    except Exception as error:
        code = give_up(watch, error)
        # Not the profiler: it waits for the GPU, where the others' collectives may be missing.
        for close in closes:
            try:
                close()
            except Exception as another:  # the disk that is full for one is so for all
                say(f"train.py: rank {watch.rank}, as it ends: {another!r}")
        run.checkpointer.leave()
        end_process(code)
    watch.stop()
    finish_ranks(run.ranks, 0 if is_done else STOPPED_EXIT_CODE)


def give_up(watch: GroupWatch, error: Exception) -> int:
    """Say why this rank ends, and have the others end with it.

    Returns:
        Exit code of the process: that of the rank that failed first.
    """
    rank, position = watch.rank, watch.position
    code = error.exit_code if isinstance(error, MicroBatchMemoryError) else 1
    known = explain_failure(error, watch.run_dir)
    reason = f"rank {rank}, {position}: {known or repr(error)}"
    first_code, first = watch.end_all(code, reason)
    if first != reason:
        # It may be the cause all the same: a connection can break before the rank that fails has told why.
        own = known or str(error).partition("\n")[0][:200]
        say(f"train.py: rank {rank} ends too: {position} ({own}). The reason: {first}")
    else:
        frames = "" if known else "".join(traceback.format_exception(error))
        say(f"{frames}train.py: {reason}")
    return first_code


if __name__ == "__main__":
    main()
