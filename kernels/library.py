"""The compiled library: loading it, calling it, and what every call needs to know of PyTorch.

It has a plain C interface, so nothing here depends on the version of Python or PyTorch.
"""

import ctypes
import functools
import logging
import os
from ctypes import POINTER, byref, c_char_p, c_int
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

NO_INSTANCE = -1  # csrc/device.cuh, kNoInstance
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/device.cuh, Dtype
VECTOR = 8  # elements that a thread reads together


class Library:
    """The shared library at `path`.

    Raises:
        OSError: If it cannot be loaded.
    """

    def __init__(self, path: Path):
        self.path = path
        self._functions = ctypes.CDLL(str(path))
        self._functions.adaln_error.restype = c_char_p
        self._functions.adaln_num_multiprocessors.argtypes = (c_int, POINTER(c_int))
        self._multiprocessors: dict[int, int] = {}

    def declare(self, **arguments: tuple) -> None:
        """Say what the named functions take."""
        for name, types in arguments.items():
            getattr(self._functions, name).argtypes = types

    def check_params(self, name: str, params: type[ctypes.Structure]) -> None:
        """Raise RuntimeError unless both sides agree on the parameters, whose size `name` tells."""
        compiled = getattr(self._functions, name)() if hasattr(self._functions, name) else 0
        if compiled != ctypes.sizeof(params):
            sizes = f"{compiled} bytes of parameters, this version {ctypes.sizeof(params)}"
            raise RuntimeError(f"{self.path} takes {sizes}: run python -m adaptiveload.kernels.build")

    def call(self, name: str, *arguments, accept: tuple[int, ...] = ()) -> None:
        """Call a function that returns a cudaError_t; RuntimeError if that is neither success nor in `accept`."""
        code = getattr(self._functions, name)(*arguments)
        if code != 0 and code not in accept:
            raise RuntimeError(f"{name}: {self._functions.adaln_error(code).decode()}")

    def num_multiprocessors(self, device: int) -> int:
        """Of the GPU number `device`."""
        if device not in self._multiprocessors:
            count = c_int()
            self.call("adaln_num_multiprocessors", device, byref(count))
            self._multiprocessors[device] = count.value
        return self._multiprocessors[device]


def address(tensor: torch.Tensor | None) -> int | None:
    """Of the first element; None for none."""
    return None if tensor is None else tensor.data_ptr()


def stream_of(x: torch.Tensor) -> int:
    """The current stream of the device of `x`."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


@functools.cache
def warn_of_scalar_path(operation: str) -> None:
    """Say once, on rank 0, that `operation` is one that the fast kernels cannot do."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s: no fast kernel, so the slow scalar one runs (docs/kernels.md)", operation)
