"""AdamW with its decay groups, and a learning rate that depends on the step alone."""

import math
from dataclasses import dataclass

import torch
from torch import nn

# Decay shrinks matrices that multiply activations; norms, biases, tables and the first layers keep their scale.
_NO_DECAY_PARTS = ("modulation", "patch_embedding", "time_embedder", "time_proj", "img_in", "timestep_embedder")


@dataclass
class OptimizerConfig:
    """AdamW.

    Attributes:
        lr: Learning rate after warm-up: 1e-4 suits training from scratch and adapters, 1e-5 fine-tuning of all weights.
        beta1, beta2: Decay of the averages of gradients and of their squares.
        eps: Added to the root of the latter.
        weight_decay: On matrices; norms, biases, modulation tables and the first layers are spared.
        warmup_steps: Steps of linear warm-up; constant afterwards.
        max_grad_norm: The whole gradient is clipped to this norm once a step.
        max_skipped_in_a_row: A step whose loss or gradient is not finite is skipped on all ranks; the run stops after
            more than this many in a row.
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    warmup_steps: int = 1000
    max_grad_norm: float = 1.0
    max_skipped_in_a_row: int = 3

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        for name in ("lr", "eps", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be positive and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay={self.weight_decay} must not be negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must be in [0, 1)")
        for name in ("warmup_steps", "max_skipped_in_a_row"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)} must not be negative")


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up to `lr`, then constant.

    A function of the step, not a stateful scheduler: accelerate steps a prepared scheduler once per process
    (accelerate #2142), and diffusers' "constant" schedule ignores its warm-up.
    """
    return config.lr * min(1.0, (step + 1) / max(config.warmup_steps, 1))


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over `model`'s parameters, which must already be sharded and fp32.

    Raises:
        ValueError: If a trainable parameter is not fp32: at lr 1e-5 a bf16 weight takes one step in six.
    """
    decay, keep = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name} is {parameter.dtype}: master weights must be float32 (`precision` sets compute)")
        is_matrix = parameter.ndim >= 2 and not any(part in name for part in _NO_DECAY_PARTS)
        (decay if is_matrix else keep).append(parameter)
    groups = [
        {"name": "matrices", "params": decay, "weight_decay": config.weight_decay},
        {"name": "spared", "params": keep, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=next(model.parameters()).is_cuda,
    )
