"""The CUDA kernels of AdaLN: lays out their launches.

Legend: `N` tokens of all samples side by side, `D` hidden size, `G` segments (tokens that share a modulation row).
"""

from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from adaptiveload.kernels.library import DTYPES, NO_INSTANCE, VECTOR, Library, address, stream_of, warn_of_scalar_path
from adaptiveload.kernels.qk_extension import QkExtension
from adaptiveload.kernels.reference import Gradients, Inputs, Wanted

MAX_INLINE_OFFSETS = 512
MAX_VECTOR_HIDDEN_SIZE = 8192
ITEM_SIZES = {number: dtype.itemsize for dtype, number in DTYPES.items()}


class Matrix(Structure):
    """csrc/params.cuh, Matrix."""

    _fields_ = [("data", c_void_p), ("row_stride", c_int64), ("column_stride", c_int64), ("dtype", c_int64)]


class Params(Structure):
    """csrc/params.cuh, Params."""

    _fields_ = [
        *((name, Matrix) for name in ["x", "y", "h", "x_out", "dx", "dy", "gate", "scale", "shift", "weight", "bias"]),
        *((name, Matrix) for name in ["dgate", "dscale", "dshift", "dweight", "dbias"]),
        *((name, c_void_p) for name in ["mean", "rstd", "row_sums", "partials", "affine_partials", "offsets"]),
        *((name, c_int32) for name in ["num_rows", "hidden_size", "num_segments", "num_blocks", "rows_per_block"]),
        *((name, c_int32) for name in ["stages", "vectors", "rows"]),
        ("eps", c_float),
        ("device", c_int32),
        ("inline_offsets", c_int32 * MAX_INLINE_OFFSETS),
    ]


@dataclass(frozen=True)
class Launch:
    """How the work is laid out on the GPU; the same results up to the order of sums.

    What is compiled stands in csrc/instances.cuh; another choice has no kernel.

    Attributes:
        vectors: Groups of eight elements that a thread owns in each row.
        rows: Rows that share a barrier.
        stages: Rows on their way to a block or being worked on.
        blocks_per_multiprocessor: If 0, as many as have enough bytes under way.
        min_rows: A block that does fewer is not worth its start.
        in_turn: Deal rows out in turn where segments are long: all blocks together then go through memory from front to
            back. For forward; in backward a block would lose its place in a sum.
    """

    vectors: int
    rows: int = 1
    stages: int = 2
    blocks_per_multiprocessor: int = 0
    min_rows: int = 8
    in_turn: bool = False


# Rows of one segment that a block must get, dealt out in turn, for loading the segment's modulation to be worth it.
ROWS_PER_RELOAD = 50


def default_launches(hidden_size: int, is_backward: bool, bytes_per_element: int) -> tuple[Launch, ...]:
    """The layouts for rows of D = `hidden_size`, best first; the first whose ring fits into shared memory is taken.

    Args:
        hidden_size: D.
        is_backward: For the one-pass backward.
        bytes_per_element: Of what forward reads: x, and y if it is added.
    """
    if is_backward:
        smaller = Launch(vectors=2, rows=1, stages=2, min_rows=16)
        return (Launch(vectors=1, rows=2, stages=4, min_rows=16), smaller) if hidden_size <= 4096 else (smaller,)
    if hidden_size <= 2048:
        return (Launch(vectors=1, rows=2, stages=2, min_rows=4, in_turn=True),)
    # Short rows need more of them under way.
    row_kib = hidden_size * bytes_per_element / 1024
    deep = Launch(vectors=2, rows=1 if row_kib <= 8 else 2, stages=4, min_rows=4, in_turn=True)
    return (deep if row_kib <= 11 else Launch(vectors=2, rows=2, stages=2, min_rows=4, in_turn=True),)


class Extension:
    """A backend of `adaptiveload.kernels.backends` that runs the compiled kernels.

    Args:
        path: The shared library.
        d_tile: Take the two kernels of the AdaptiveLoad paper for backward: one for dx, one for the column sums.
        launch: Layout of all launches, for measurements; chosen per launch by default.

    Raises:
        OSError: If the library cannot be loaded.
        RuntimeError: If it was compiled from other sources.
    """

    def __init__(self, path: Path, d_tile: bool = False, launch: Launch | None = None):
        self._library = Library(path)
        self._library.check_params("adaln_params_bytes", Params)
        self._library.declare(
            adaln_rows=(POINTER(Params), c_int, c_void_p),
            adaln_scalar_rows=(POINTER(Params), c_int, c_void_p),
            adaln_columns=(POINTER(Params), c_void_p),
            adaln_finish=(POINTER(Params), c_void_p),
            adaln_blocks_per_multiprocessor=(POINTER(Params), c_int, POINTER(c_int)),
        )
        self.qk = QkExtension(self._library)
        self.name = "cuda_dtile" if d_tile else "cuda"
        self._d_tile = d_tile
        self._launch = launch
        self._blocks_that_fit: dict[tuple[int, ...], int] = {}

    def variant(self, *, d_tile: bool | None = None, launch: Launch | None = None) -> "Extension":
        """The same library with another backward or layout."""
        other = object.__new__(Extension)
        other.__dict__.update(self.__dict__)
        other._d_tile = self._d_tile if d_tile is None else d_tile
        other._launch = launch
        return other

    def check(self, device: int) -> None:
        """Raise RuntimeError if the library has no code for this GPU."""
        params = Params(device=device, hidden_size=VECTOR, vectors=1, rows=2, stages=2)
        self._library.call("adaln_blocks_per_multiprocessor", byref(params), 0, byref(c_int()))

    def forward(
        self, inputs: Inputs, eps: float, out_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """As `reference.forward`."""
        x, y, gate, scale, shift, weight, bias, segment_offsets = inputs
        can_vector = _can_vector(x)
        x, y = _rows(x, can_vector), _rows(y, can_vector)
        h = torch.empty(x.shape, dtype=out_dtype, device=x.device)
        x_out = None if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mean, rstd = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
        if x.numel():
            matrices = {"x": x, "y": y, "h": h, "x_out": x_out, "gate": gate, "scale": scale, "shift": shift}
            matrices |= {"weight": weight, "bias": bias}
            params, _keep = _params(x, matrices, segment_offsets.tolist(), mean, rstd, eps)
            is_vector = can_vector and self._lay_out(params, is_backward=False)
            if not is_vector:
                self._lay_out_scalar(params)
            self._library.call("adaln_rows" if is_vector else "adaln_scalar_rows", byref(params), 0, stream_of(x))
        return h, x_out, mean, rstd

    def backward(self, dh, dx_out, inputs: Inputs, mean, rstd, wanted: Wanted, y_dtype: torch.dtype) -> Gradients:
        """As `reference.backward`."""
        x, y, gate, scale, shift, weight, bias, segment_offsets = inputs
        can_vector = _can_vector(x)
        dx_out = None if dx_out is None else dx_out.to(x.dtype)
        dh, dx_out, x, y = (_rows(tensor, can_vector) for tensor in (dh, dx_out, x, y))
        offsets = segment_offsets.tolist()
        is_modulation_wanted = wanted.gate or wanted.scale or wanted.shift
        is_affine_wanted = wanted.weight or wanted.bias
        if gate is None and scale is None and not is_modulation_wanted:
            offsets = [0, len(x)]  # nothing depends on the segment

        def empty(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(rows, x.shape[1], dtype=dtype, device=x.device)

        parts = {"gate": gate, "scale": scale, "shift": shift, "weight": weight, "bias": bias}
        gradients = {
            name: empty(len(offsets) - 1 if name in ("gate", "scale", "shift") else 1, tensor.dtype)
            for name, tensor in parts.items()
            if getattr(wanted, name)
        }
        if len(x) == 0 or len(set(offsets)) < len(offsets):  # the kernels pass over segments without tokens
            for gradient in gradients.values():
                gradient.zero_()
        dx = empty(len(x), x.dtype)
        # The kernel with a gate writes dy whether it is wanted or not.
        dy = empty(len(x), y_dtype) if wanted.y or gate is not None else None
        if x.numel():
            matrices = {"x": x, "h": dh, "x_out": dx_out, "y": y if gate is not None else None, "dx": dx, "dy": dy}
            matrices |= parts | {f"d{name}": gradient for name, gradient in gradients.items()}
            params, _keep = _params(x, matrices, offsets, mean, rstd)
            is_vector = can_vector and self._lay_out(params, is_backward=True)
            if not is_vector:
                self._lay_out_scalar(params)
            rows_kernel = "adaln_rows" if is_vector else "adaln_scalar_rows"
            num_sums = 2 if gate is None else 3
            partials = empty(2 * params.num_blocks * num_sums) if is_modulation_wanted else None
            affine_partials = empty(2 * params.num_blocks) if is_affine_wanted else None
            has_column_kernel = (not is_vector or self._d_tile) and (is_modulation_wanted or is_affine_wanted)
            if has_column_kernel:
                row_sums = torch.empty(len(x), 2, dtype=torch.float32, device=x.device)
                params.row_sums = row_sums.data_ptr()
                self._library.call(rows_kernel, byref(params), 1, stream_of(x))
            params.partials, params.affine_partials = address(partials), address(affine_partials)
            if has_column_kernel:
                self._library.call("adaln_columns", byref(params), stream_of(x))
            else:
                self._library.call(rows_kernel, byref(params), 1, stream_of(x))
            if is_modulation_wanted or is_affine_wanted:
                self._library.call("adaln_finish", byref(params), stream_of(x))
        for name in ("weight", "bias"):
            if name in gradients:
                gradients[name] = gradients[name].squeeze(0)
        return Gradients(x=dx, y=dy if wanted.y else None, **{name: gradients.get(name) for name in parts})

    def _lay_out(self, params: Params, is_backward: bool) -> bool:
        """Fill in the layout for the fast kernels; False if there is none for these dtypes and this D."""
        read = sum(ITEM_SIZES[stream.dtype] for stream in (params.x, params.y) if stream.data)
        launches = (self._launch,) if self._launch else default_launches(params.hidden_size, is_backward, read)
        for launch in launches:
            params.vectors, params.rows, params.stages = launch.vectors, launch.rows, launch.stages
            if blocks := self._num_blocks(params, is_backward):
                self._deal_out(params, launch.blocks_per_multiprocessor or blocks, launch.min_rows)
                rows_per_reload = params.num_rows // (params.num_blocks * max(params.num_segments, 1))
                if launch.in_turn and rows_per_reload >= ROWS_PER_RELOAD:
                    params.rows_per_block = launch.rows
                return True
        if self._launch is not None:
            raise RuntimeError(f"{self._launch} has no kernel for D = {params.hidden_size} and these dtypes")
        return False

    def _num_blocks(self, params: Params, is_backward: bool) -> int:
        """Blocks of this layout that a multiprocessor should have; 0 if there is no such kernel."""
        key = (params.device, is_backward, params.hidden_size, params.vectors, params.rows, params.stages)
        streams = (params.x, params.y, params.h, params.x_out, params.dy, params.gate)
        key += tuple((stream.dtype, bool(stream.data)) for stream in streams)
        if key not in self._blocks_that_fit:
            count = c_int()
            self._library.call(
                "adaln_blocks_per_multiprocessor", byref(params), int(is_backward), byref(count), accept=(NO_INSTANCE,)
            )
            self._blocks_that_fit[key] = count.value
        return self._blocks_that_fit[key]

    def _lay_out_scalar(self, params: Params) -> None:
        names = {number: str(dtype).removeprefix("torch.") for dtype, number in DTYPES.items()}
        dtypes = ", ".join(
            f"{name} {names[getattr(params, name).dtype]}" for name in "xyh" if getattr(params, name).data
        )
        warn_of_scalar_path(f"AdaLN of D = {params.hidden_size}, {dtypes}")
        self._deal_out(params, blocks_per_multiprocessor=8, min_rows=1)

    def _deal_out(self, params: Params, blocks_per_multiprocessor: int, min_rows: int) -> None:
        num_blocks = self._library.num_multiprocessors(params.device) * blocks_per_multiprocessor
        num_blocks = max(1, min(num_blocks, params.num_rows // min_rows))
        params.rows_per_block = -(-params.num_rows // num_blocks)
        params.num_blocks = -(-params.num_rows // params.rows_per_block)


def _params(
    x: torch.Tensor,
    matrices: dict[str, torch.Tensor | None],
    offsets: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float = 0.0,
) -> tuple[Params, torch.Tensor | None]:
    """Parameters without the layout, and what must outlive the launch beside the tensors given."""
    params = Params(
        mean=mean.data_ptr(),
        rstd=rstd.data_ptr(),
        num_rows=x.shape[0],
        hidden_size=x.shape[1],
        num_segments=len(offsets) - 1,
        eps=eps,
        device=x.device.index or 0,
    )
    for name, tensor in matrices.items():
        if tensor is not None:
            row_stride, column_stride = (0, *tensor.stride())[-2:]
            setattr(params, name, Matrix(tensor.data_ptr(), row_stride, column_stride, DTYPES[tensor.dtype]))
    if len(offsets) <= MAX_INLINE_OFFSETS:
        params.inline_offsets[: len(offsets)] = offsets
        return params, None
    on_device = _offsets_on_device(tuple(offsets), x.device)
    params.offsets = on_device.data_ptr()
    return params, on_device


@lru_cache(maxsize=64)
def _offsets_on_device(offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """All layers share the offsets of a micro-batch: one copy to the device serves them."""
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def _can_vector(x: torch.Tensor) -> bool:
    return x.shape[1] % VECTOR == 0 and x.shape[1] <= MAX_VECTOR_HIDDEN_SIZE


def _rows(tensor: torch.Tensor | None, can_vector: bool) -> torch.Tensor | None:
    """The tensor itself, or a copy where the kernels cannot read its rows."""
    if tensor is None or not tensor.numel():
        return tensor
    is_aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
    if tensor.stride(1) == 1 and (is_aligned or not can_vector):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
