"""Which cost model the planner gets: the analytic prior of the run's model on a named GPU."""

import math
from dataclasses import dataclass

import torch

from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.cost import GPU_TFLOPS, TwoTermCost, analytic_prior
from adaptiveload.scheduling.flops import ModelDims


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


def build_cost_model(config: CostConfig, model: WanConfig, device: torch.device, recompute: str) -> TwoTermCost:
    """Cost model of a micro-batch, in microseconds.

    Raises:
        ValueError: If `cost.gpu` names no known device.
    """
    gpu = config.gpu
    if gpu == "auto":
        name = device_name(device).lower()
        gpu = next((known for known in GPU_TFLOPS if known in name), name)
    return analytic_prior(model_dims(model), gpu, recompute)
