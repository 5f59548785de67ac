"""This rank's part of a parameter, whether FSDP has sharded the model or not."""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """The tensor that this rank holds of `parameter`, and which part of the whole it is.

    Writing to the tensor writes to the parameter. It may be empty: two ranks cannot share one row.
    """
    parameter = parameter.detach()
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, size) for size in parameter.shape)
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))


def draw_whole(parameter: torch.Tensor, draw: Callable[[torch.Tensor], object]) -> None:
    """Let `draw` fill a whole float32 tensor on the CPU, and take this rank's part of it. Not on the meta device."""
    if parameter.is_meta:
        return
    whole = torch.empty(parameter.shape)
    draw(whole)
    local, part = local_part(parameter)
    local.copy_(whole[part])
