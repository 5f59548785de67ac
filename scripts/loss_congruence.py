"""Do policies and kernels train the same model? Three ways to train, some seeds each, side by side on one device.

    python -m scripts.loss_congruence configs/loss_congruence.yaml --output congruence

The ways are the paper's baseline (equal_token, plain PyTorch AdaLN), the paper's proposal (dual_constraint, its D-tile
backward) and this project's default (balanced, the kernels that are chosen unasked). `slots_per_step` of the paper's
policies is set so that their steps hold as many samples on average as balanced's. A seed decides the initial weights
and the order of the samples; which samples are held out, and the noise of their evaluation, are the same for all runs,
so that held-out losses differ by what was trained alone.

Writes a run's folder for each, `curves.png` and `curves.md`: `scripts.compare_runs --seeds` makes them, and may be run
again. Without a GPU all kernels are plain PyTorch, and only the policies differ.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from adaptiveload.kernels.backends import VARIABLE
from adaptiveload.models.architectures import new_transformer
from adaptiveload.models.pretrained import save_pretrained
from adaptiveload.training.config import RunConfig, load_config
from adaptiveload.training.cost import Hardware, resolve_gpu
from adaptiveload.training.failures import ending_in_words
from adaptiveload.training.schedule import build_schedule

COUNTED_STEPS = 100  # that tell a policy's mean samples a step


@dataclass(frozen=True)
class Way:
    """A policy and the kernels that it runs with; None leaves the choice to the program."""

    name: str
    policy: str
    kernels: str | None


WAYS = (
    Way("equal_token-reference", "equal_token", "reference"),
    Way("dual_constraint-dtile", "dual_constraint", "cuda_dtile"),
    Way("balanced-default", "balanced", None),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    options = parse_arguments(arguments)
    with ending_in_words("loss_congruence"):
        config = load_config(options.config, options.overrides)
        check_comparable(config, options.window)
        commands = {
            f"{way.name}-seed{seed}": (way, command_of(way, seed, slots, options))
            for way, slots in with_slots(config)
            for seed in range(options.seeds)
        }
        for seed in range(options.seeds):
            write_initial_weights(config, seed, weights_of(options.output, seed))
        run_all(commands, options.output, options.at_once)
    runs = [str(options.output / name) for name in commands]
    compare = [sys.executable, "-m", "scripts.compare_runs", "--seeds", "--window", str(options.window)]
    compare += ["--output", str(options.output / "curves.png"), "--runs", *runs]
    compared = subprocess.run(compare, stdout=subprocess.PIPE, text=True)
    if compared.returncode:  # it has said why
        sys.exit(compared.returncode)
    (options.output / "curves.md").write_text(compared.stdout)
    print(compared.stdout)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="YAML of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration keys, for all runs")
    parser.add_argument("--output", type=Path, required=True, help="folder for runs, curves.png and curves.md")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way, two at least (default 3)")
    parser.add_argument("--at-once", type=int, default=9, help="runs that share the device (default 9)")
    parser.add_argument("--window", type=int, default=50, help="steps of a mean in the curves (default 50)")
    options = parser.parse_intermixed_args(arguments)
    for name, least in (("seeds", 2), ("at_once", 1), ("window", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
    return options


def check_comparable(config: RunConfig, window: int) -> None:
    """Raise ValueError for runs that could not be compared once they are trained."""
    if config.max_steps < window:
        raise ValueError(f"max_steps={config.max_steps} is below --window {window}: no mean of so many steps")
    if not config.data.held_out_share or not config.evaluation.max_samples:
        raise ValueError(
            f"data.held_out_share={config.data.held_out_share:g} and evaluation.max_samples="
            f"{config.evaluation.max_samples} must both be positive: held-out losses are compared"
        )


def with_slots(config: RunConfig) -> list[tuple[Way, int]]:
    """Each way with the slots that bring its mean samples a step nearest to `samples_per_step`, said aloud."""
    found = []
    for way in WAYS:
        wanted, means = config.schedule.samples_per_step, dict[int, float]()
        for slots in (1,) if way.policy == "balanced" else range(1, wanted + 1):
            schedule = replace(config.schedule, policy=way.policy, slots_per_step=slots)
            means[slots] = mean_samples(replace(config, schedule=schedule))
            if means[slots] > wanted:  # more slots, more samples
                break
        slots, mean = min(means.items(), key=lambda pair: abs(pair[1] - wanted))
        print(f"{way.name}: {mean:.1f} samples a step, slots_per_step {slots}", flush=True)
        found.append((way, slots))
    return found


def mean_samples(config: RunConfig) -> float:
    """Samples of a step on one rank, on average over the first steps."""
    # As planned on the device that will run it.
    gpu = resolve_gpu(config.cost, Hardware.of(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    config = replace(config, cost=replace(config.cost, gpu=gpu))
    schedule = build_schedule(config, 1, torch.device("cpu"), None)
    return float(np.mean([schedule.policy.plan(step).num_samples for step in range(COUNTED_STEPS)]))


def weights_of(output: Path, seed: int) -> Path:
    """Folder of a seed's initial weights."""
    return output / "initial" / f"seed{seed}"


def write_initial_weights(config: RunConfig, seed: int, folder: Path) -> None:
    """A new model as a folder that `model.pretrained` reads; nothing if it is there."""
    if folder.exists():
        return
    torch.manual_seed(seed)
    state = new_transformer(config.model).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    content = {"_class_name": config.model.diffusers_class, **config.model.to_diffusers()}
    save_pretrained(folder, content, shapes, lambda names: {name: state[name].contiguous() for name in names})


def command_of(way: Way, seed: int, slots: int, options: argparse.Namespace) -> list[str]:
    """Command line of one training, on one rank and without a launcher."""
    keys = [
        *options.overrides,
        f"name={way.name}-seed{seed}",
        f"output_dir={options.output}",
        f"schedule.policy={way.policy}",
        f"schedule.slots_per_step={slots}",
        f"schedule.seed={seed}",
        f"model.pretrained={weights_of(options.output, seed)}",
    ]
    return [sys.executable, "train.py", str(options.config), *keys]


def run_all(commands: dict[str, tuple[Way, list[str]]], output: Path, at_once: int) -> None:
    """Run the commands, so many at a time; each writes `NAME.log`.

    Raises:
        ChildProcessError: If one fails: the others are ended, and its last lines are told.
    """
    waiting, running = list(commands), dict[str, subprocess.Popen[bytes]]()
    began = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                way, command = commands[name]
                with (output / f"{name}.log").open("wb") as log:
                    running[name] = subprocess.Popen(
                        command, env=environment_of(way), stdout=log, stderr=subprocess.STDOUT
                    )
            time.sleep(0.2)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if code := running.pop(name).returncode:
                    lines = (output / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
                    raise ChildProcessError("\n".join([f"{name} ended with {code}:", *lines]))
                print(f"{time.monotonic() - began:.0f} s: {name} is done", flush=True)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def environment_of(way: Way) -> dict[str, str]:
    """One thread a run, and the kernels of the way."""
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    environment |= {"OMP_NUM_THREADS": "1"}
    return environment | ({VARIABLE: way.kernels} if way.kernels is not None else {})


if __name__ == "__main__":
    main()
