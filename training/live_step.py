"""The part of a step that training and the benchmarks share: model, timer and optimizer, and one micro-batch."""

from typing import TYPE_CHECKING

import torch
from torch.autograd.profiler import record_function

from adaptiveload.models.architectures import VideoTransformer, new_transformer
from adaptiveload.models.flow_matching import noisy_latents, timesteps, weighted_losses
from adaptiveload.models.frozen import freeze, round_frozen
from adaptiveload.models.layers import compile_blocks
from adaptiveload.models.lora import add_adapters, draw_adapters
from adaptiveload.models.packing import PackedBatch
from adaptiveload.models.pretrained import load_pretrained
from adaptiveload.training.compile_watch import CompileWatch
from adaptiveload.training.distributed import Ranks, set_meeting, shard_model
from adaptiveload.training.optimizer import build_optimizer
from adaptiveload.training.step_timer import StepTimer

if TYPE_CHECKING:
    from adaptiveload.training.config import RunConfig


def lay_out_model(config: "RunConfig") -> VideoTransformer:
    """The model of a run on the meta device, with its adapters, and frozen where it is not trained.

    Raises:
        ValueError: If a pattern of `lora.targets`, `model.trainable` or `model.frozen` matches nothing.
    """
    with torch.device("meta"):
        model = new_transformer(config.model)
        if config.lora.rank:
            add_adapters(model, config.lora)
    freeze(model, config.model.trainable, config.model.frozen)
    if config.precision == "bf16":
        round_frozen(model)
    return model


def build_model(
    config: "RunConfig", ranks: Ranks, *, is_resumed: bool = False
) -> tuple[VideoTransformer, StepTimer, torch.optim.AdamW]:
    """The sharded model of a run, the timer on its blocks, and its optimizer.

    Each rank holds only its shards at any time: the model is laid out without memory, sharded, and then read from
    `model.pretrained` or drawn. With `is_resumed` a checkpoint will fill what is trained, which is left undefined.

    Raises:
        ValueError: If `model.pretrained` cannot be read or is not of this model, or a pattern of `lora.targets`,
            `model.trainable` or `model.frozen` matches nothing.
    """
    model = lay_out_model(config)
    shard_model(model, ranks, config.precision, config.schedule.shard_ranks)
    model.to_empty(device=ranks.device)
    torch.manual_seed(config.seed)
    if config.model.pretrained is not None and (not is_resumed or config.has_frozen_parts):
        load_pretrained(model, config.model.pretrained)
    elif not is_resumed:
        model.init_weights()
    if not is_resumed:
        draw_adapters(model)
    blocks = model.fsdp_units()[1]
    if config.compile:
        compile_blocks(blocks)
    timer = StepTimer(ranks.device, CompileWatch() if config.compile else None)
    timer.attach(blocks)
    optimizer = build_optimizer(model, config.optimizer)
    check_optimizer(model, optimizer)
    return model, timer, optimizer


def check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Assert that `optimizer` holds what is trained of `model`, and nothing else.

    One that was made before sharding holds parameters that the model no longer has: its steps would move nothing, and
    nothing would say so.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert held == trained, "the optimizer's parameters are not those of the model: was it made before sharding?"


def run_micro_batch(
    model: VideoTransformer,
    timer: StepTimer,
    batch: PackedBatch,
    *,
    scale: float,
    meet: str,
    is_last: bool,
    recompute: str,
    permille: int = 1000,
) -> torch.Tensor:
    """Forward and backward of one micro-batch of this rank; call it on all ranks as often as the plan says.

    Args:
        model: Sharded model.
        timer: Its timer.
        batch: The micro-batch, on the model's device.
        scale: What the sum of w_i * l_i is multiplied by: R/Z, because FSDP averages over the ranks.
        meet: "slot" or "step".
        is_last: Whether it is this rank's last of the step.
        recompute: "none", "full" or "attention", see the models' forward.
        permille: Thousandths of the blocks that it is for.

    Returns:
        w_i * l_i of each real sample, float32 on the device.
    """
    set_meeting(model, meet=meet, is_last=is_last)
    with record_function(f"micro_batch {timer.start_micro_batch()}"):
        velocity = model(noisy_latents(batch), timesteps(batch), batch, recompute=recompute, permille=permille)
        losses = weighted_losses(batch, velocity)
        (losses.sum() * scale).backward()
    return losses.detach()
