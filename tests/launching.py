"""Starts real launches for tests: one process a rank, gloo on CPU."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent


# What a user starts, and what does the same three seconds faster: for tests of what comes after the launcher.
ACCELERATE = ("accelerate.commands.accelerate_cli", "launch")
PLAIN = ("tests.start_ranks",)


def launch_command(
    *arguments: object, ranks: int, script: str = "train.py", launcher: Sequence[str] = ACCELERATE
) -> list[str]:
    """Command line that starts `script` on `ranks` CPU ranks; a module is "-m" with its name as the first argument."""
    if launcher == PLAIN:
        options = [str(ranks)]
    elif ranks > 1:
        options = ["--config_file", "configs/accelerate/cpu.yaml", "--num_processes", str(ranks)]
    else:
        options = ["--config_file", "configs/accelerate/1gpu.yaml"]
    return [sys.executable, "-m", *launcher, *options, script, *map(str, arguments)]


def environment(on_gpu: bool = False) -> dict[str, str]:
    """One thread a rank, no GPU unless asked for, the checkout importable from anywhere."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **hidden}


def launch(
    *arguments: object,
    ranks: int,
    script: str = "train.py",
    check: bool = True,
    on_gpu: bool = False,
    launcher: Sequence[str] = PLAIN,
) -> subprocess.CompletedProcess:
    """Run a launch to its end; output is kept as text."""
    result = subprocess.run(
        launch_command(*arguments, ranks=ranks, script=script, launcher=launcher),
        cwd=ROOT,
        env=environment(on_gpu),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if check and result.returncode:
        raise AssertionError(f"{' '.join(result.args)}\n{result.stdout}\n{result.stderr}")
    return result


def run_ranks(script: str, *arguments: object, ranks: int) -> list[str]:
    """Run a Python file once for each rank, the rank as its last argument; what each printed."""
    command = [sys.executable, script, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    workers = [subprocess.Popen([*command, str(r)], text=True, env=environment(), **pipes) for r in range(ranks)]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()  # a rank whose peer failed waits in a collective
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output
    return outputs


def run_script(name: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess:
    """Run `python -m scripts.NAME` to its end."""
    command = [sys.executable, "-m", f"scripts.{name}", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    if check and result.returncode:
        raise AssertionError(f"{' '.join(command)}\n{result.stdout}\n{result.stderr}")
    return result


def kill_all(process: subprocess.Popen) -> None:
    """SIGKILL to launcher, ranks and workers at once, as when a node goes; returns when they are gone.

    Not to the launcher's process group: ranks of `accelerate launch` have sessions of their own, and would go on. Nor
    to Python's resource trackers, which end by themselves and then remove the semaphores of the dead.
    """
    killed = []
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in each.cmdline()):
                each.kill()
                killed.append(each)
    process.wait()
    # A signal is obeyed after the system call under way: a checkpoint may still be renamed.
    psutil.wait_procs(killed, timeout=30)


def data_workers(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those of `family` that are workers of a DataLoader, by the name that torch gives them."""
    return [process for process in family if process.name() == "pt_data_worker"]
