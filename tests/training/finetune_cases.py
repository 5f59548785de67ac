"""Launched by test_finetune.py on two ranks: runs with adapters, with frozen parts and with steps that must be skipped.

Many short runs of what train.py runs in one process group, because a launch takes longer than what is tested.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from adaptiveload.models.lora import draw_adapters
from adaptiveload.models.pretrained import load_pretrained
from adaptiveload.scheduling.shapes import Shape
from adaptiveload.training.config import load_config
from adaptiveload.training.distributed import Ranks, finish_ranks, shard_model, start_ranks
from adaptiveload.training.group_watch import GroupWatch
from adaptiveload.training.live_step import build_model, lay_out_model, run_micro_batch
from adaptiveload.training.run import Run, build_run
from adaptiveload.training.schedule import model_geometry
from adaptiveload.training.step_timer import StepTimer
from adaptiveload.training.stop_signals import StopSignals
from adaptiveload.training.synthetic import synthetic_batch
from scripts.export import export_run
from train import train

PARTS = {
    "lora": ["lora.rank=2"],
    "lora-and-a-part": ["lora.rank=2", "lora.targets=[blocks.1.attn1.*]", "model.trainable=[proj_out]"],
    "a-part": ["model.trainable=[blocks.1]", "model.frozen=['*.bias']"],
    "mmdit": ["lora.rank=2", "lora.targets=[all-linear]", "schedule.recompute=full", "precision=bf16"],
}


def run_training(config_path: Path, ranks: Ranks, *overrides: str) -> tuple[Run, dict, dict, str | None]:
    """A run, this rank's part of it before and after, and the message of the RuntimeError that ended it, if any."""
    settings = ("evaluation.max_samples=0", "checkpoint.every_steps=100")
    run = build_run(load_config(config_path, [*settings, *overrides]), ranks)
    before, error = parts_of(run), None
    watch = GroupWatch(ranks.rank, run.config.watch, run.config.run_dir)
    try:
        train(run, StopSignals(), watch)
    except RuntimeError as caught:
        error = str(caught)
    watch.stop()
    run.feed.close()
    if run.tracker is not None:
        run.tracker.close()
    return run, before, parts_of(run), error


def parts_of(run: Run) -> dict[str, torch.Tensor]:
    """This rank's part of every parameter, of what the optimizer keeps and of the averages."""
    parts = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    for name, parameter in run.model.named_parameters():
        parts |= {f"{name}/{key}": value for key, value in run.optimizer.state.get(parameter, {}).items()}
    parts |= {f"ema/{name}": value for name, value in run.ema.shadow.items()}
    return {name: (part.to_local() if hasattr(part, "to_local") else part).clone() for name, part in parts.items()}


def moved_names(folder: Path, ranks: Ranks) -> dict[str, list[str]]:
    """Names of the parameters that three steps moved on any rank, by case."""
    moved = {}
    for name, keys in PARTS.items():
        kind = name if name == "mmdit" else "wan"
        options = (f"name={name}", "max_steps=3", f"model.pretrained={folder / f'given-{kind}'}", *keys)
        run, before, after, error = run_training(folder / f"{kind}.yaml", ranks, *options)
        assert error is None, error
        trained = {n for n, p in run.model.named_parameters() if p.requires_grad}
        assert set(run.ema.shadow) == trained
        assert {n for n, p in run.model.named_parameters() if p in run.optimizer.state} == trained
        mine = [n for n, _ in run.model.named_parameters() if not torch.equal(before[n], after[n])]
        moved[name] = sorted({n for names in ranks.gather_objects(mine) for n in names})
    return moved


def resumed(config_path: Path, ranks: Ranks, given: str) -> tuple[bool, str]:
    """Whether three steps, a checkpoint and three more leave every part as six steps do, to the bit.

    And what a resume says whose frozen weights are others.
    """
    options = ("lora.rank=2", f"model.pretrained={given}", "optimizer.warmup_steps=8")
    *_, straight, _ = run_training(config_path, ranks, *options, "name=straight", "max_steps=6")
    run_training(config_path, ranks, *options, "name=resumed", "max_steps=3")
    *_, again, _ = run_training(config_path, ranks, *options, "name=resumed", "max_steps=6")
    is_same = straight.keys() == again.keys() and all(torch.equal(straight[name], again[name]) for name in straight)
    try:
        run_training(config_path, ranks, "lora.rank=2", f"model.pretrained={given}-changed", "name=resumed")
    except ValueError as error:
        return is_same, str(error)
    return is_same, "nothing"


def continued(config_path: Path, ranks: Ranks, folder: Path) -> None:
    """A run; its averaged and its last weights exported; and runs that go on from these folders."""
    run_training(config_path, ranks, "name=first", "max_steps=8", "evaluation.max_samples=64")
    if ranks.is_main:
        export_run(folder / "runs" / "first", folder / "first-averaged", ema=True)
        export_run(folder / "runs" / "first", folder / "first-last", ema=False)
    ranks.barrier()
    given = f"model.pretrained={folder / 'given-wan'}"
    run_training(config_path, ranks, "name=three", "max_steps=3", given, "data.held_out_share=0")
    # As good as no training: the evaluation is of the weights that were read.
    options = ("max_steps=1", "evaluation.max_samples=64", "optimizer.lr=1e-12")
    run_training(config_path, ranks, "name=read", f"model.pretrained={folder / 'first-averaged'}", *options)
    run_training(config_path, ranks, "name=tuned", f"model.pretrained={folder / 'first-last'}", "max_steps=8")


def rounded_frozen_weights(config_path: Path, ranks: Ranks, given: str) -> dict[str, object]:
    """Losses and gradients of bf16 training with frozen weights kept in bf16, and kept in fp32 and cast by FSDP."""
    config = load_config(config_path, ["lora.rank=2", "precision=bf16", f"model.pretrained={given}"])
    rounded, timer, _ = build_model(config, ranks)
    whole = lay_out_model(replace(config, precision="fp32"))
    shard_model(whole, ranks, "bf16")
    whole.to_empty(device=ranks.device)
    torch.manual_seed(config.seed)
    load_pretrained(whole, given)
    draw_adapters(whole)
    batch = synthetic_batch([Shape(5, 32, 32)] * 2, model_geometry(config.model), config.model, ranks.device)
    found = []
    for model, its_timer in ((rounded, timer), (whole, StepTimer(ranks.device))):
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.detach().to_local().fill_(0.01)
        options = {"scale": 1.0, "meet": "slot", "is_last": True, "recompute": "full"}
        losses = run_micro_batch(model, its_timer, batch, **options)
        gradients = [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]
        found.append([losses, *gradients])
    stored = {name: p.dtype for name, p in rounded.named_parameters()}
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(*found, strict=True)),
        "gradient": max(float(gradient.abs().max()) for gradient in found[0][1:]),
        "bf16": sorted(name for name, dtype in stored.items() if dtype == torch.bfloat16),
        "lora": sorted({str(dtype) for name, dtype in stored.items() if ".lora_" in name}),
    }


def skipped(config_path: Path, ranks: Ranks, folder: Path) -> dict[str, list]:
    """What each rank saw of runs on data sets with captions and latents that are not what they should be."""
    results = {}
    for name, limit in (("one", 3), ("all", 2)):
        keys = (f"data.path={folder / name}", f"optimizer.max_skipped_in_a_row={limit}", "objective.text_dropout=0")
        keys = (*keys, "optimizer.warmup_steps=8")
        options = (f"name={name}", "max_steps=6", "data.held_out_share=0", "data.max_lost_share=0.5")
        run, before, after, error = run_training(config_path, ranks, *keys, *options)
        finite = all(bool(part.isfinite().all()) for part in after.values())
        stays = all(torch.equal(part, after[n]) for n, part in before.items() if not n.endswith("/step"))
        steps = sorted({int(part) for n, part in after.items() if n.endswith("/step")})
        plans = [run.schedule.policy.plan(step).sample_ids.tolist() for step in range(6)]
        keys = [[str(run.schedule.corpus.place(i).name) for i in plan] for plan in plans]
        results[name] = ranks.gather_objects([run.guard.total, steps, finite, stays, error, keys])
    return results


def main(folder: str) -> None:
    ranks = start_ranks()
    path, given = Path(folder, "wan.yaml"), f"{folder}/given-wan"
    results = {
        "moved": moved_names(Path(folder), ranks),
        "continued": continued(path, ranks, Path(folder)),
        "resumed": ranks.gather_objects(resumed(path, ranks, given)),
        "rounded": rounded_frozen_weights(path, ranks, given),
        "skipped": skipped(path, ranks, Path(folder)),
    }
    if ranks.is_main:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    finish_ranks(ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
