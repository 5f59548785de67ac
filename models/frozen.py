"""Which parameters are trained."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from adaptiveload.models.lora import own_parameters


def freeze(model: nn.Module, trainable: Sequence[str] | None, frozen: Sequence[str]) -> None:
    """Freeze the parameters of `model` in place, those of adapters aside; before it is sharded.

    A pattern stands for parameters and for modules with all that is in them: "blocks.*.attn1", "proj_out",
    "*.bias". Names are those of diffusers.

    Args:
        model: With `diffusers_parameters()`.
        trainable: Patterns of what is trained; None keeps what is trained now: all, or with adapters nothing.
        frozen: Patterns of what is not trained after all.

    Raises:
        ValueError: If a pattern matches nothing that it could change, or nothing is left to train.
    """
    parameters = model.diffusers_parameters()
    if trainable is not None:
        chosen = _matching(parameters, trainable, "model.trainable")
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in chosen)
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    for name in _matching(trained, frozen, "model.frozen"):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"model.trainable={trainable} without model.frozen={list(frozen)} leaves no parameter to train"
        )


def round_frozen(model: nn.Module) -> None:
    """Keep frozen weights that only compute in bfloat16 in bfloat16: what training computes is the same to the bit.

    Those of the float32 parts stay. Before `model` is sharded or has memory.
    """
    fp32_parts = {id(parameter) for module in model.fsdp_units()[0] for parameter in module.parameters()}
    for parameter in own_parameters(model).values():
        if not parameter.requires_grad and id(parameter) not in fp32_parts:
            parameter.data = parameter.data.to(torch.bfloat16)


def _matching(names: Iterable[str], patterns: Sequence[str], key: str) -> set[str]:
    names = list(names)
    found = set()
    for pattern in patterns:
        matching = {name for name in names if any(fnmatchcase(prefix, pattern) for prefix in _prefixes(name))}
        if not matching:
            near = f"; there are {names[0]} to {names[-1]}" if names else ""
            raise ValueError(f"{key}: {pattern!r} matches none of the {len(names)} trainable parameters{near}")
        found |= matching
    return found


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
