"""Which code computes AdaLN: the CUDA kernels or plain PyTorch.

`ADAPTIVELOAD_KERNELS` asks for one: `cuda`, `cuda_dtile` (the two-kernel backward of the AdaptiveLoad paper, kept for
comparison) or `reference`. A request never falls back. On the CPU everything runs as plain PyTorch.
"""

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from adaptiveload.kernels import reference
from adaptiveload.kernels.build import LIBRARY
from adaptiveload.kernels.extension import Extension

logger = logging.getLogger(__name__)

VARIABLE = "ADAPTIVELOAD_KERNELS"
CHOICES = ("cuda", "cuda_dtile", "reference")


class Backend(Protocol):
    """`reference` is one, as a module; arguments and results are described there. `qk` is as `qk_reference`."""

    name: str
    forward: object
    backward: object
    qk: object


_used: Backend | None = None


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Compute with `backend` on every device, for tests and measurements. Not for several threads at once."""
    global _used
    before, _used = _used, backend
    try:
        yield
    finally:
        _used = before


def backend_for(device: torch.device) -> Backend:
    """The backend for tensors on `device`.

    Raises:
        ValueError: If `ADAPTIVELOAD_KERNELS` is none of the choices, or asks for kernels that cannot be had.
    """
    if _used is not None:
        return _used
    if device.type != "cuda":
        return reference
    return _cuda_backend(os.environ.get(VARIABLE, ""), device.index or 0)


@functools.cache
def _cuda_backend(request: str, device: int) -> Backend:
    if request and request not in CHOICES:
        raise ValueError(f"{VARIABLE} is {request!r}; it is one of {', '.join(CHOICES)}, or unset")
    choice = request or "cuda"
    reason = f"{VARIABLE}={request}" if request else "the automatic choice"
    backend: Backend = reference
    if choice != "reference":
        try:
            backend = Extension(LIBRARY, d_tile=choice == "cuda_dtile")
            backend.check(device)
        except (OSError, RuntimeError) as error:
            if request:
                raise ValueError(f"{VARIABLE}={request}, but the kernels cannot be used: {error}") from error
            backend, choice, reason = reference, "reference", f"the kernels cannot be used: {error}"
    if os.environ.get("RANK", "0") == "0":
        logger.warning("AdaLN on CUDA runs as %s (%s)", choice, reason)
    return backend
