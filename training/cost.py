"""Which cost model the planner gets: the analytic prior of the run's model on a named GPU."""

import math
from dataclasses import dataclass

import torch

from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.cost import GPU_TFLOPS, TwoTermCost, analytic_prior
from adaptiveload.scheduling.flops import ModelDims

# Vendors' data sheets; decides `schedule.meet: auto`. On a CPU it is the machine's own.
GPU_MEMORY_BYTES = {"h200": 141e9, "h100": 80e9, "a100": 80e9, "l40s": 48e9}


@dataclass
class CostConfig:
    """`gpu` names the entry of the prior's rate table; "auto" asks the device."""

    gpu: str = "auto"


def model_dims(model: WanConfig) -> ModelDims:
    """The sizes that FLOPs and costs depend on."""
    return ModelDims(
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_attention_heads,
        ffn_dim=model.ffn_dim,
        text_len=model.text_len,
        text_dim=model.text_dim,
        freq_dim=model.freq_dim,
        token_size=model.in_channels * math.prod(model.patch_size),
        out_token_size=model.out_channels * math.prod(model.patch_size),
    )


def device_name(device: torch.device) -> str:
    """Name of the device as the prior's rate table and the reports have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def resolve_gpu(config: CostConfig, device: torch.device) -> str:
    """The entry of the rate table that `cost.gpu` names, or that the device's name contains.

    Raises:
        ValueError: If there is none.
    """
    name = device_name(device).lower() if config.gpu == "auto" else config.gpu
    if config.gpu == "auto":
        name = next((known for known in GPU_TFLOPS if known in name), name)
    if name not in GPU_TFLOPS:
        raise ValueError(f"no rates for {name!r}: set cost.gpu to the nearest of {', '.join(GPU_TFLOPS)}")
    return name


def build_cost_model(gpu: str, model: WanConfig, recompute: str) -> TwoTermCost:
    """Cost model of a micro-batch on `gpu`, an entry of the rate table, in microseconds."""
    return analytic_prior(model_dims(model), gpu, recompute)
