"""Start-up of the ranks, the guards against launches that went wrong in silence, and FSDP2 sharding.

One rank on a laptop runs the same code as 64 on a cluster: always a process group, always `fully_shard`.
"""

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import torch
import torch.distributed as dist
import yaml
from accelerate import PartialState
from accelerate.commands.config.config_args import default_config_file
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from adaptiveload.models.architectures import VideoTransformer
from adaptiveload.scheduling.policies import num_replicas
from adaptiveload.training.stop_signals import STOP_SIGNALS

_MORE_RANKS = "accelerate launch --config_file configs/accelerate/{file}.yaml --num_processes N train.py ..."
# What says that a process manager has started so many processes.
_STARTED_KEYS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank: From 0 to world_size - 1.
        world_size: Processes that train together.
        device: Where this rank computes.
        host_group: gloo group for host data; it never waits for the GPU.
    """

    rank: int
    world_size: int
    device: torch.device
    host_group: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        """Rank 0 prints and writes."""
        return self.rank == 0

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (host, same size on all ranks) of every rank, stacked: [world_size, ...]."""
        parts = [torch.empty_like(values) for _ in range(self.world_size)]
        dist.all_gather(parts, values.contiguous(), group=self.host_group)
        return torch.stack(parts)

    def gather_objects(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order. For rare messages, not for each step."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """`value` of rank 0, on every rank; what the others give is not looked at."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host_group)
        return values[0]

    def run_on_main(self, action: Callable[[], _Value]) -> _Value:
        """What `action` returns on rank 0, on every rank, or the OSError or ValueError it raises, or a RuntimeError."""
        result, error = None, None
        if self.is_main:
            try:
                result = action()
            except (OSError, ValueError) as raised:
                error = raised
            except Exception as raised:  # perhaps one that cannot be sent
                error = RuntimeError(repr(raised))
        result, error = self.broadcast_object((result, error))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def seconds_until(self, end: float) -> float:
        """Seconds until `end` of `time.monotonic()`, by rank 0's clock, so that all ranks decide alike."""
        return float(self.gather(torch.tensor([end - time.monotonic()], dtype=torch.float64))[0])

    def barrier(self) -> None:
        """Wait for all ranks, on the host group."""
        dist.barrier(group=self.host_group)

    def take_memory_peak_gib(self) -> float:
        """Peak allocated GPU memory since the last call, in GiB; 0 on CPU."""
        if self.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def describe(self) -> str:
        """The run's first line: how many ranks, on what, and how to get more."""
        if self.device.type == "cuda":
            name, file = torch.cuda.get_device_name(self.device), "1node"
        else:
            name, file = f"CPU ({torch.get_num_threads()} threads a rank)", "cpu"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"{ranks} on {name}. For more ranks: {_MORE_RANKS.format(file=file)}"


def start_ranks(timeout: timedelta | None = None) -> Ranks:
    """Join the process group that the launcher made, or make one of a single rank.

    `timeout` is that of its collectives (None: torch's own); that of host data keeps torch's half an hour, because
    ranks save and start at unequal speed.

    The group is made here and not by accelerate: without a GPU accelerate leaves `--multi_gpu` launches as several
    processes that each believe to be rank 0 of 1.

    `STOP_SIGNALS`, which `scripts.launch` starts ranks without, come through from here on: they end a rank that has not
    said before that it catches them.

    Raises:
        LaunchError: If the launcher was asked for several processes and started one, or started more than there
            are GPUs.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    check_launch(os.environ, parent_command())
    use_cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() != "true"
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}; lower --num_processes"
        )
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device if use_cuda else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # Accelerate's process state then agrees with the group that exists, whatever launched us.
    state = PartialState(cpu=not use_cuda)
    if (state.num_processes, state.process_index) != (dist.get_world_size(), dist.get_rank()):
        raise LaunchError(
            f"accelerate sees rank {state.process_index} of {state.num_processes}, torch.distributed sees rank "
            f"{dist.get_rank()} of {dist.get_world_size()}: launch with {_MORE_RANKS.format(file='1node')}"
        )
    return Ranks(
        dist.get_rank(), dist.get_world_size(), device, dist.new_group(backend="gloo", timeout=default_pg_timeout)
    )


def finish_ranks(ranks: Ranks, code: int = 0) -> NoReturn:
    """End this process with the exit code, once all ranks have come here.

    Without the interpreter's own shutdown: a gloo thread that drops its last work object meanwhile asks for the lock
    that is being torn down and aborts the process (seen twice in some hundred launches on a busy machine).
    """
    ranks.barrier()
    for number in STOP_SIGNALS:  # the launcher sends SIGTERM to those that end a moment after the first
        signal.signal(number, signal.SIG_IGN)
    dist.destroy_process_group()
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End this process now; nothing of it is waited for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe
            stream.flush()
    os._exit(code)


class LaunchError(RuntimeError):
    """The launcher did not start what it was asked for."""


def check_launch(environment: "os._Environ[str] | dict[str, str]", parent: list[str]) -> None:
    """Refuse a launch that was asked for several processes and became one, or as many runs of one rank.

    `srun -n 8 python train.py` and `mpirun -n 8 ...` start processes that know nothing of each other.
    `accelerate launch --cpu --num_processes 2`, `--num_processes 2` alone on a machine without GPUs, and a
    MULTI_CPU config file all start a single process and say nothing (accelerate 1.15).

    Args:
        environment: The process's environment.
        parent: The parent's command line, where the launcher's arguments stand.

    Raises:
        LaunchError: If the launcher's arguments name more processes than were started, or something that is no
            launcher has started several.
    """
    if "WORLD_SIZE" in environment:
        return
    for key in _STARTED_KEYS:
        if (count := environment.get(key, "1")).isdigit() and int(count) > 1:
            raise LaunchError(
                f"{count} processes were started ({key}={count}); without WORLD_SIZE each would be a run of its own, "
                "all in one folder: start one launcher a node (scripts/slurm/launch.sh, docs/slurm.md), as in "
                f"{_MORE_RANKS.format(file='1node')}. Where this is to be a run of one rank, unset {key}"
            )
    if not {"launch", "scripts.launch"} & set(parent):
        return
    asked = _asked_processes(parent)
    if asked > 1:
        raise LaunchError(
            f"accelerate was asked for {asked} processes and started one. Without GPUs use "
            f"{_MORE_RANKS.format(file='cpu').replace('N train.py', f'{asked} train.py')}"
        )


def _asked_processes(command: list[str]) -> int:
    arguments = dict(zip(command, [*command[1:], ""], strict=True))
    arguments |= dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)
    for flag in ("--num_processes", "--num-processes"):
        if arguments.get(flag, "").isdigit():
            return int(arguments[flag])
    for flag in ("--config_file", "--config-file"):
        if flag in arguments and Path(arguments[flag]).is_file():
            return _processes_of(Path(arguments[flag]))
    if Path(default_config_file).is_file():
        return _processes_of(Path(default_config_file))
    return 1


def _processes_of(config_file: Path) -> int:
    content = yaml.safe_load(config_file.read_text())
    return int(content.get("num_processes", 1)) if isinstance(content, dict) else 1


def parent_command() -> list[str]:
    """The command line of the process that started this one: under a launch the launcher's."""
    try:
        parent = psutil.Process().parent()
        return parent.cmdline() if parent else []
    except psutil.Error as error:  # another user's process: say so, the check is a convenience
        print(f"cannot read the launcher's command line: {error}", file=sys.stderr)
        return []


def shard_model(model: VideoTransformer, ranks: Ranks, precision: str, shard_ranks: int = 0) -> None:
    """Shard `model` in place with FSDP2: one unit of fp32 parts, one a block, one for the rest.

    Masters stay fp32. Under "bf16" blocks gather bf16 weights; time embedding and modulation tables gather fp32,
    because a bf16 timestep of 998.4 is 1000. Gradients are reduced in fp32. Inputs are never cast by FSDP
    (`cast_forward_inputs=False`): its default rounds timesteps and rotary tables to bf16.

    Args:
        model: On any device, also meta.
        ranks: All of them call this together.
        precision: "bf16" or "fp32".
        shard_ranks: Consecutive ranks that share one copy of the model (HSDP), a divisor of all; 0 for all of them.
    """
    replicas = num_replicas(shard_ranks, ranks.world_size)
    shape = (ranks.world_size,) if replicas == 1 else (replicas, shard_ranks)
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    compute = torch.bfloat16 if precision == "bf16" else None
    fp32 = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mixed = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fp32_modules, blocks = model.fsdp_units()
    fully_shard(fp32_modules, mesh=mesh, mp_policy=fp32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)


def set_meeting(model: nn.Module, *, meet: str, is_last: bool) -> None:
    """Prepare the next micro-batch's collectives.

    meet="slot": every unit gathers and reduces in every micro-batch (FSDP2's default).
    meet="step": units stay unsharded over the step and only the last micro-batch reduces, so that ranks may even run
    different numbers of micro-batches. All gathers are begun at once: gathered block by block, the ranks' first
    micro-batches would wait for each other in every block. So ranks meet at the start and in the last backward. A
    forward must follow before weights change: what is on its way would be used after it.
    Copies of the model add up their gradients in the last micro-batch alone, either way.
    """
    assert isinstance(model, FSDPModule)
    whole_step = meet == "step"
    model.set_reshard_after_forward(not whole_step)
    model.set_reshard_after_backward(not whole_step or is_last)
    model.set_requires_gradient_sync(not whole_step or is_last)
    model.set_requires_all_reduce(is_last)
    if whole_step:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)  # nothing to do from the second micro-batch on


def reshard(model: nn.Module) -> None:
    """Free every unit's unsharded weights, so that the next forward gathers what the optimizer wrote."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> tuple[float, dict[str, float]]:
    """Scale the gradients to a norm of at most `max_norm`, all of them together.

    Call it once a step, after the last micro-batch. Waits for the backward pass.

    Returns:
        Norm of the whole gradient before that, and of each parameter group by its name; the same on every rank.
    """
    norms = {}
    for group in optimizer.param_groups:
        norm = nn.utils.get_total_norm([p.grad for p in group["params"] if p.grad is not None])
        # A DTensor's value is the norm of this rank's shards until it is made whole.
        norms[group["name"]] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = math.hypot(*norms.values())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.tensor(total, device=parameters[0].device))
    return total, norms
