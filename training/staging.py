"""Host memory for a copy of a rank's shards, from which a checkpoint is written while training goes on."""

import weakref
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Copies of a GPU's memory are fastest to addresses that are multiples of this.
_ALIGNMENT = 512


class HostMemoryError(RuntimeError):
    """The system does not give the page-locked memory that a copy needs; the message is for the user."""


class HostCopy:
    """A copy of tensors in one piece of host memory, made again and again.

    For a GPU the memory is page-locked, so that a copy of all tensors only takes what the bus takes (0.2 s for 10 GB at
    50 GB/s) and the host does not wait for it.

    Args:
        tensors: What `take` will be given: names, shapes and dtypes. Of a DTensor this rank's shard is copied.
        device: Where they lie, apart from some on the host.

    Attributes:
        tensors: The copies, each in a storage of its own; a DTensor's is a DTensor with its shard on the host.

    Raises:
        HostMemoryError: If the system does not give so much page-locked memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        ends = np.cumsum([0] + [-(-_local(tensor).nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()])
        memory = np.empty(int(ends[-1]), np.uint8)
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda" and memory.nbytes:
            self._lock_pages(memory)
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.tensors: dict[str, Tensor] = {}
        for start, (name, tensor) in zip(ends[:-1].tolist(), tensors.items(), strict=True):
            local = _local(tensor)
            # Not a view of one tensor: the writer would copy it once more, to write a storage of its size.
            copy = torch.from_numpy(memory[start : start + local.nbytes]).view(local.dtype).view(local.shape)
            if isinstance(tensor, DTensor):
                copy = DTensor(copy, tensor._spec, requires_grad=False)  # from_local would move it to the GPU
            self.tensors[name] = copy

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors`, in the order of the current stream: later work there may change them at once."""
        if self._events is not None:
            self._events[0].record()
        for name, copy in self.tensors.items():
            _local(copy).copy_(_local(tensors[name]), non_blocking=True)
        if self._events is not None:
            self._events[1].record()

    def wait(self) -> float:
        """Wait until the copies are there; returns the seconds that the GPU was held by them, 0 without one."""
        if self._events is None:
            return 0.0
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1000

    def _lock_pages(self, memory: np.ndarray) -> None:
        """Not by torch's own allocator of page-locked memory: it rounds every size up to a power of two."""
        runtime, address = torch.cuda.cudart(), memory.ctypes.data
        if error := int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
            raise HostMemoryError(
                f"{memory.nbytes / 1e9:.3g} GB of host memory, which this rank needs for saving checkpoints, cannot be "
                f"page-locked: {torch.cuda.CudaError(error)}. Give the job more memory, or train on more ranks"
            )
        weakref.finalize(self, runtime.cudaHostUnregister, address)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
