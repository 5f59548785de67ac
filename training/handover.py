"""How a worker hands an item over to its rank: all its tensors in one piece of shared memory, which is used again.

To write to new shared memory takes a page fault for every 4 KiB, and to open it in the rank a conversation of the two
processes: together five times as long as the copy itself. So a worker keeps its pieces of memory. The rank uses an item
where it lies, and the piece is free when the last tensor in it is gone. There are as many pieces as items under way,
and none is larger than the largest item.
"""

import io
import logging
import os
import pickle
import shutil
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

# The first byte of a piece says whether its item is still in use; the tensors begin at multiples of this.
_ALIGNMENT = 64

# In a worker its pieces; in a rank those of each worker that it has opened. Bytes, by number.
_pieces: list[torch.Tensor] = []
_opened: dict[int, dict[int, torch.Tensor]] = {}


@dataclass(frozen=True)
class Parcel:
    """What crosses instead of an item.

    Attributes:
        worker: Process id of the worker.
        piece: Number of the piece of its memory that holds the tensors.
        spans: First byte and size of each buffer there.
        pickled: The rest of the item.
        is_new: Whether the rank has not opened the piece yet.
    """

    worker: int
    piece: int
    spans: list[tuple[int, int]]
    pickled: bytes
    is_new: bool

    def open(self) -> Any:
        """The item. Once only: its memory is the worker's again as soon as the item's tensors are gone."""
        memory = _opened[self.worker][self.piece].numpy()
        # What is made of the buffers refers to `lent`. A slice of `memory` would not do: numpy refers to the whole.
        lent = np.frombuffer(memoryview(memory), np.uint8)
        weakref.finalize(lent, memory.__setitem__, 0, 0).atexit = False
        buffers = memoryview(lent)
        return pickle.loads(self.pickled, buffers=[buffers[start : start + size] for start, size in self.spans])

    def pin_memory(self) -> Any:
        """The item, in page-locked memory if it can be; called by DataLoader."""
        item = self.open()
        return item.pin_memory() if hasattr(item, "pin_memory") else item

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.worker, self.piece, self.spans, self.pickled)
        return _receive, (*fields, _pieces[self.piece] if self.is_new else None)


def pack_up(item: Any) -> Parcel:
    """In a worker, put an item's tensors and arrays into shared memory."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(item)
    spans, end = [], _ALIGNMENT
    for buffer in buffers:
        size = buffer.raw().nbytes
        spans.append((end, size))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    piece, is_new = _free_piece(end)
    memory = _pieces[piece].numpy()
    for (start, size), buffer in zip(spans, buffers, strict=True):
        memory[start : start + size] = buffer.raw()
    memory[0] = 1
    return Parcel(os.getpid(), piece, spans, stream.getvalue(), is_new)


def warn_of_little_room(num_bytes: int, folder: str = "/dev/shm") -> None:
    """Log a warning if the workers of this machine may need more shared memory than there is: one that gets none dies.

    Args:
        num_bytes: For the workers of one rank.
        folder: Where shared memory is.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    num_bytes *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if os.path.isdir(folder) and (free := shutil.disk_usage(folder).free) < num_bytes:
        logger.warning(
            "%s has %.0f MiB left, the data workers of this machine may need %.0f MiB there and die without: give it "
            "more room (docker run --shm-size), or lower data.prefetch_mib or data.num_workers",
            folder,
            free / 2**20,
            num_bytes / 2**20,
        )


def forget(worker: int) -> None:
    """In a rank, close the memory of a worker that has ended; items that are still in use keep theirs."""
    _opened.pop(worker, None)


def _receive(
    worker: int, piece: int, spans: list[tuple[int, int]], pickled: bytes, memory: torch.Tensor | None
) -> Parcel:
    if memory is not None:
        _opened.setdefault(worker, {})[piece] = memory
    return Parcel(worker, piece, spans, pickled, memory is not None)


def _free_piece(size: int) -> tuple[int, bool]:
    """Number of a piece that is not in use and has at least `size` bytes, and whether it was made for that."""
    free = sorted((len(memory), number) for number, memory in enumerate(_pieces) if not memory.numpy()[0])
    for length, number in free:
        if length >= size:
            return number, False
    memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
    if free:  # all too small: the new one takes the place of the largest
        _pieces[free[-1][1]] = memory
        return free[-1][1], True
    _pieces.append(memory)
    return len(_pieces) - 1, True


class _Pickler(pickle.Pickler):
    """Leaves the data of tensors out, as pickle itself does with those of arrays."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(data), value.dtype, value.shape)


def _tensor(data: memoryview, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    # torch takes no empty buffer.
    return torch.frombuffer(data, dtype=dtype).view(shape) if data.nbytes else torch.empty(shape, dtype=dtype)
