"""Low-rank adapters by peft beside frozen linear layers, and the file in which diffusers reads and writes them.

An adapted layer computes `W x + (alpha / rank) * B A x`; A and B are trained, W is not. LoRA, arXiv 2106.09685, eq. 3.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from adaptiveload.models.sharded import draw_whole

LORA_FILE = "pytorch_lora_weights.safetensors"  # the name that `pipeline.load_lora_weights(folder)` looks for
# Parts of layer names that a preset takes; None takes every linear layer.
PRESETS: dict[str, tuple[str, ...] | None] = {
    "attention": ("attn", "attn1", "attn2"),
    "attention+ffn": ("attn", "attn1", "attn2", "ffn", "img_mlp", "txt_mlp"),
    "all-linear": None,
}
_BASE, _A, _B = ".base_layer.", ".lora_A.default.", ".lora_B.default."


@dataclass
class LoraConfig:
    """Low-rank adapters. With them the model's own weights are frozen, but for what `model.trainable` names.

    Attributes:
        rank: Inner dims of every adapter; 0 for no adapters.
        alpha: An adapter's output is multiplied by alpha / rank; None takes the rank, which makes that 1.
        targets: Presets ("attention", "attention+ffn", "all-linear") and patterns of layer names, such as "to_q",
            "ffn.net.2" or "blocks.1?.attn1.*"; a pattern may leave out the beginning of a name.
    """

    rank: int = 0
    alpha: float | None = None
    targets: list[str] = field(default_factory=lambda: ["attention"])

    def check(self) -> None:
        """Raise ValueError for a value outside its range, naming the key."""
        if self.rank < 0:
            raise ValueError(f"lora.rank={self.rank} must not be negative; 0 trains without adapters")
        default = LoraConfig()
        if not self.rank and (self.alpha, self.targets) != (default.alpha, default.targets):
            raise ValueError(
                f"lora.alpha={self.alpha}, lora.targets={self.targets}, but lora.rank=0: there are no adapters"
            )
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha={self.alpha} must be positive and finite, or null for lora.rank")
        if self.rank and not self.targets:
            raise ValueError(f"lora.targets=[] with lora.rank={self.rank}: name a preset, {_presets()}, or layers")

    @property
    def scale(self) -> float:
        """Alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Put adapters on `model` in place, and freeze everything else; before it is sharded, also on the meta device.

    Raises:
        ValueError: If an entry of `lora.targets` matches no linear layer.
    """
    # Imported here because it takes seconds (it imports transformers).
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    # A pattern, because peft takes a list's entries for ends of names.
    names = "|".join(map(re.escape, target_layers(model, config.targets)))
    alpha = config.scale * config.rank
    inject_adapter_in_model(
        PeftConfig(r=config.rank, lora_alpha=alpha, target_modules=names, init_lora_weights=False), model
    )


def target_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers of `model` that `targets` choose, in the model's order.

    Raises:
        ValueError: If an entry matches none.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = set()
    for target in targets:
        matching = [name for name in linear if _is_target(name, target)]
        if not matching:
            raise ValueError(
                f"lora.targets: {target!r} is no preset ({_presets()}) and matches none of the {len(linear)} linear "
                f"layers, such as {linear[len(linear) // 2]}"
            )
        chosen |= set(matching)
    return [name for name in linear if name in chosen]


def draw_adapters(model: nn.Module) -> None:
    """Initialise adapters as peft does: A uniform as a linear layer's weight, B zero, so that nothing changes yet.

    Drawn whole on the CPU in the model's order, so that any number of ranks starts alike.
    """
    for name, parameter in model.named_parameters():
        if _A in name:
            draw_whole(parameter, lambda weight: nn.init.kaiming_uniform_(weight, a=math.sqrt(5)))
        elif _B in name:
            draw_whole(parameter, nn.init.zeros_)


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters without those of adapters, under the names that they have without adapters."""
    return {
        name.replace(_BASE, "."): parameter
        for name, parameter in model.named_parameters()
        if _A not in name and _B not in name
    }


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of adapters by their names in diffusers, `LAYER.lora_A.weight` and `LAYER.lora_B.weight`."""
    return {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if _A in name or _B in name
    }


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Weight of one layer that does what the adapted layer does: W + (alpha / rank) * B A."""
    return weight + scale * (b @ a)


def save_adapters(folder: Path, adapters: Mapping[str, torch.Tensor], scale: float) -> Path:
    """Write adapters as a file that `pipeline.load_lora_weights` of diffusers opens; returns its path.

    B is stored times alpha / rank, so that the file needs no alpha, which tools store in ways of their own.

    Args:
        folder: Created where it is missing; must not hold such a file.
        adapters: By name, as `adapter_parameters` gives them, float32 on the CPU.
        scale: alpha / rank.

    Raises:
        ValueError: If the file exists.
    """
    path = folder / LORA_FILE
    if path.exists():
        raise ValueError(f"{path} exists: give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"transformer.{name}": (tensor * scale if ".lora_B." in name else tensor).contiguous()
        for name, tensor in adapters.items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def _is_target(name: str, target: str) -> bool:
    if target in PRESETS:
        parts = PRESETS[target]
        return parts is None or not set(name.split(".")).isdisjoint(parts)
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _presets() -> str:
    return ", ".join(PRESETS)
