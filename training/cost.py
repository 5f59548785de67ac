"""Which cost and memory models a run plans with: a fitted file, or priors from the model's sizes on a named GPU."""

import logging
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil
import torch

from adaptiveload.kernels.backends import backend_for
from adaptiveload.models.config import ModelConfig
from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.choices import check_choice
from adaptiveload.scheduling.cost import GPU_TFLOPS, PowerCost, TwoTermCost, analytic_prior
from adaptiveload.scheduling.cost_file import LAWS, CostFile
from adaptiveload.scheduling.fit import power_law_of
from adaptiveload.scheduling.flops import MMDiTDims, ModelDims, WanDims
from adaptiveload.scheduling.memory import MemoryModel, memory_prior
from adaptiveload.scheduling.policies import ScheduleConfig
from adaptiveload.training.distributed import Ranks

if TYPE_CHECKING:
    from adaptiveload.training.config import RunConfig

logger = logging.getLogger(__name__)

# Vendors' data sheets; decides `schedule.meet: auto`. On a CPU it is the machine's own.
GPU_MEMORY_BYTES = {"h200": 141e9, "h100": 80e9, "a100": 80e9, "l40s": 48e9}
# Memories that differ by less are not worth a line.
_EQUAL_MEMORY = 0.99


@dataclass
class CostConfig:
    """How micro-batches are priced.

    Attributes:
        file: YAML of scripts.fit_cost_model; None prices by FLOPs.
        law: "two_term" (additive, prices mixed micro-batches) or "power" (the paper's).
        allow_mismatch: Use a file that was fitted for another GPU, model, layout or torch.
        gpu: Without a file, whose rates the prior has: h200, h100, a100, l40s or cpu; "auto" finds that name in the
            device's. On another GPU set the nearest.
        adaptive: Refit to the micro-batches that run, so that a wrong prior heals.
        refit_every_steps: Steps between refits. A refit takes effect once no plan made ahead is left.
        tolerance: A refit that changes no price by more than this share is dropped.
    """

    file: str | None = None
    law: str = "two_term"
    allow_mismatch: bool = False
    gpu: str = "auto"
    adaptive: bool = True
    refit_every_steps: int = 5
    tolerance: float = 0.05

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        check_choice("cost.law", self.law, LAWS)
        if self.file is None:  # which needs no rates
            check_choice("cost.gpu", self.gpu, ("auto", *GPU_TFLOPS))
        if self.refit_every_steps < 1:
            raise ValueError(f"cost.refit_every_steps={self.refit_every_steps} must be at least 1")
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"cost.tolerance={self.tolerance} must be in [0, 1)")


@dataclass(frozen=True)
class RunModels:
    """Models that a run starts with.

    Attributes:
        cost: Prices micro-batches.
        memory: Predicts their memory; with `schedule.recompute: auto` when all blocks are computed again.
        kept_memory: The same when none is.
        source: Where they come from, for a reader.
        is_memory_measured: Whether the memory model was fitted; a prior is an estimate.
    """

    cost: TwoTermCost | PowerCost
    memory: MemoryModel
    kept_memory: MemoryModel
    source: str
    is_memory_measured: bool


def model_dims(model: ModelConfig) -> ModelDims:
    """The sizes that FLOPs and costs depend on."""
    common = {
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_attention_heads,
        "text_dim": model.text_dim,
        "token_size": model.in_channels * model.patch_volume,
        "out_token_size": model.out_channels * model.patch_volume,
    }
    if isinstance(model, WanConfig):
        return WanDims(**common, ffn_dim=model.ffn_dim, text_len=model.text_len, freq_dim=model.freq_dim)
    return MMDiTDims(**common)


def device_name(device: torch.device) -> str:
    """Name of the device as cost files, the prior's rate table and the reports have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@dataclass(frozen=True)
class Hardware:
    """What plans take every rank's device to be.

    Attributes:
        device: Its kind; a CPU also stands for a GPU of which no more than `cost.gpu` is known.
        name: See `device_name`.
        memory_bytes: All memory of the device; of the host on CPU.
    """

    device: torch.device
    name: str
    memory_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "Hardware":
        """That of this process."""
        if device.type == "cuda":
            memory_bytes = torch.cuda.get_device_properties(device).total_memory
        else:
            memory_bytes = psutil.virtual_memory().total
        return cls(device, device_name(device), int(memory_bytes))

    @classmethod
    def of_all(cls, ranks: Ranks) -> "Hardware":
        """One for all ranks, or unequal ones would make unequal plans: rank 0's name, the least memory. Collective."""
        mine = cls.of(ranks.device)
        names, sizes = zip(*ranks.gather_objects((mine.name, mine.memory_bytes)), strict=True)
        least = min(sizes)
        # Hosts of one kind, and GPUs under other drivers, differ by less.
        if ranks.is_main and (len(set(names)) > 1 or least < _EQUAL_MEMORY * max(sizes)):
            devices = (f"{name}, {size / 1e9:.1f} GB" for name, size in zip(names, sizes, strict=True))
            kinds = (f"{count} of {device}" for device, count in Counter(devices).items())
            print(
                f"ranks differ: {'; '.join(kinds)}. All are planned for as {names[0]} with {least / 1e9:.1f} GB",
                flush=True,
            )
        return replace(mine, name=names[0], memory_bytes=least)


def resolve_gpu(config: CostConfig, hardware: Hardware) -> str:
    """The entry of the rate table that `cost.gpu` names, or that the device's name contains.

    Raises:
        ValueError: If there is none, and no cost file either that would do without.
    """
    name = hardware.name.lower() if config.gpu == "auto" else config.gpu
    if config.gpu == "auto":
        name = next((known for known in GPU_TFLOPS if known in name), name)
    if name not in GPU_TFLOPS and config.file is None:
        raise ValueError(f"no rates for {name!r}: set cost.gpu to the nearest of {', '.join(GPU_TFLOPS)}")
    return name


def device_memory_bytes(gpu: str, hardware: Hardware) -> int:
    """All memory of the device; without one, that of `gpu` by its data sheet, and the host's on CPU."""
    if hardware.device.type == "cuda":
        return hardware.memory_bytes
    return int(GPU_MEMORY_BYTES.get(gpu, hardware.memory_bytes))


def provenance(config: "RunConfig", gpu: str, hardware: Hardware, meet: str, ranks: int) -> dict[str, Any]:
    """What a cost file is fitted for, but for the recompute level, which its layout gets as well."""
    layout: dict[str, Any] = {
        "precision": config.precision,
        "meet": meet,
        "ranks": ranks,
        "trained": config.describe_trained(),
        "compile": config.compile,
    }
    if config.schedule.shard_ranks:
        layout["shard_ranks"] = config.schedule.shard_ranks
    on_gpu = hardware.device.type == "cuda"
    if on_gpu:  # without one a plan for a GPU may be made, but nothing is known of its kernels
        layout["kernels"] = backend_for(hardware.device).name
    return {
        "gpu": hardware.name if on_gpu else gpu,
        "model": asdict(model_dims(config.model)),
        "layout": layout,
        "versions": {"torch": torch.__version__},
    }


def mismatches(file: CostFile, run: "RunConfig", gpu: str, hardware: Hardware, meet: str, ranks: int) -> list[str]:
    """What `file` was fitted for and the run is not, a phrase each. Arguments as of `build_models`."""
    here = provenance(run, gpu, hardware, meet, ranks)
    # "auto" adds to what was measured without recompute.
    recompute = "none" if run.schedule.recompute == "auto" else run.schedule.recompute
    return file.mismatches(here["gpu"], here["model"], {**here["layout"], "recompute": recompute}, here["versions"])


def build_models(
    run: "RunConfig",
    gpu: str,
    hardware: Hardware,
    *,
    meet: str,
    ranks: int,
    sharded_over: int,
    seq_lens: list[int],
    trained_share: float,
) -> RunModels:
    """Cost and memory models of a run on `ranks` ranks.

    Args:
        run: The run's configuration.
        gpu: From `resolve_gpu`.
        hardware: Whose name a cost file must be for; on CPU, `gpu`.
        meet: "slot" or "step".
        ranks: Ranks that train together.
        sharded_over: Those of them that share one copy of weights and states.
        seq_lens: Lengths of the data set, over which the power law is fitted to a prior.
        trained_share: Trained parameters over all.

    Raises:
        ValueError: If the file is unreadable, lacks the law, or was fitted for something else.
    """
    config, recompute, dims = run.cost, run.schedule.recompute, model_dims(run.model)
    is_auto = recompute == "auto"
    memory = memory_prior(dims, "attention" if is_auto else recompute, meet, sharded_over, trained_share)
    kept_memory = memory_prior(dims, "none", meet, sharded_over, trained_share)
    if config.file is None:
        prior = analytic_prior(dims, gpu, recompute)
        limit = run.schedule.memory_limit_tokens or 2 * max(seq_lens)
        cost = prior if config.law == "two_term" else power_law_of(prior, seq_lens, limit)
        return RunModels(cost, memory, kept_memory, "a prior from FLOPs, not measured", False)
    file, source = CostFile.read(config.file), f"{config.file}, law {config.law}"
    if found := mismatches(file, run, gpu, hardware, meet, ranks):
        message = f"{config.file} was fitted for something else: {'; '.join(found)}"
        if not config.allow_mismatch:
            raise ValueError(f"{message}. Fit one here (scripts.benchmark_shapes), or set cost.allow_mismatch=true")
        logger.warning("%s; used all the same (cost.allow_mismatch)", message)
        source += f", fitted for something else ({'; '.join(found)})"
    if file.memory is not None:
        if is_auto:
            kept_memory, memory = file.memory, replace(memory, static_bytes=file.memory.static_bytes)
        else:
            memory = file.memory
    is_measured = file.memory is not None and not is_auto  # what computing all blocks again takes is a prior's
    return RunModels(file.law(config.law), memory, kept_memory, source, is_measured)


def resolve_memory(schedule: ScheduleConfig, models: RunModels, capacity_bytes: int) -> ScheduleConfig:
    """`schedule` with what its nulls leave to the memory models: the limit, and where recompute begins.

    Raises:
        ValueError: If weights and states leave no room for tokens.
    """
    text_tokens = models.memory.text_tokens
    if schedule.recompute == "auto":
        text_tokens = max(text_tokens, models.kept_memory.text_tokens)
        kept, most = schedule.kept_tokens, schedule.most_tokens
        if kept is None or most is None:
            schedule = replace(schedule, recompute_text_tokens=text_tokens)
        try:
            kept = models.kept_memory.max_tokens(capacity_bytes) if kept is None else kept
            most = max(models.memory.max_tokens(capacity_bytes), kept + 1) if most is None else most
        except ValueError as error:
            keys = "schedule.kept_tokens and schedule.most_tokens, or schedule.recompute=full"
            raise ValueError(f"schedule.recompute=auto: {error}, and {keys}") from error
        schedule = replace(schedule, kept_tokens=kept, most_tokens=most)
    if schedule.memory_limit_tokens is None:
        limit = schedule.most_tokens if schedule.recompute == "auto" else models.memory.max_tokens(capacity_bytes)
        schedule = replace(schedule, memory_limit_tokens=limit, text_memory_tokens=text_tokens)
    return schedule
