"""The CUDA kernels of `qk_norm_rope`: lays out their launches.

Legend: `N` query tokens, `M` key tokens, `H` heads, `hd` head dim, `W` dims of one norm: H * hd or hd.
"""

from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_void_p

import torch

from adaptiveload.kernels.library import DTYPES, NO_INSTANCE, VECTOR, Library, address, stream_of, warn_of_scalar_path
from adaptiveload.kernels.qk_reference import QkInputs

MAX_THREADS = 512
MIN_ROWS = 4  # a block that does fewer is not worth its start
SCALAR_BLOCKS_PER_MULTIPROCESSOR = 8


class Heads(Structure):
    """csrc/qk_norm_rope.cuh, Heads."""

    _fields_ = [("data", c_void_p), ("row_stride", c_int64), ("head_stride", c_int64)]


class QkSide(Structure):
    """csrc/qk_norm_rope.cuh, QkSide."""

    _fields_ = [
        *((name, Heads) for name in ["x", "out", "dx"]),
        *((name, c_void_p) for name in ["weight", "dweight", "rstd", "partials"]),
        *((name, c_int32) for name in ["weight_dtype", "num_rows", "num_blocks", "unused"]),
    ]


class QkParams(Structure):
    """csrc/qk_norm_rope.cuh, QkParams."""

    _fields_ = [
        ("sides", QkSide * 2),
        ("rotary", c_void_p),
        *((name, c_int32) for name in ["rotary_rows", "num_heads", "head_dim", "width", "rows_per_block", "dtype"]),
        *((name, c_int32) for name in ["vectors", "rows"]),
        ("eps", c_float),
        ("device", c_int32),
    ]


def choose_layout(num_heads: int, is_backward: bool) -> tuple[int, int]:
    """Vectors that a thread owns of each row, and rows between barriers; as measured on an H200.

    Two vectors share a turn, but lie in different heads: an odd number of heads leaves one.
    """
    if num_heads % 2:
        return 1, 2
    return (2, 1) if is_backward else (2, 2)


class QkExtension:
    """As the module `adaptiveload.kernels.qk_reference`, by the compiled kernels.

    Raises:
        RuntimeError: If the library was compiled from other sources.
    """

    def __init__(self, library: Library):
        library.check_params("qk_params_bytes", QkParams)
        library.declare(
            qk_rows=(POINTER(QkParams), c_int, c_void_p),
            qk_scalar_rows=(POINTER(QkParams), c_int, c_void_p),
            qk_finish=(POINTER(QkParams), c_void_p),
            qk_blocks_per_multiprocessor=(POINTER(QkParams), c_int, POINTER(c_int)),
        )
        self._library = library
        self._blocks_that_fit: dict[tuple[int, ...], int] = {}

    def forward(self, inputs: QkInputs, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `qk_reference.forward`."""
        given, weights, rotary = _readable_inputs(inputs)
        results = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in given]
        num_groups = given[0].shape[1] * given[0].shape[2] // len(weights[0])
        rstds = [torch.empty(len(x), num_groups, dtype=torch.float32, device=x.device) for x in given]
        params = _params(given, weights, rstds, rotary, eps)
        for side, result in zip(params.sides, results, strict=True):
            side.out = _heads(result)
        if any(tensor.numel() for tensor in given):
            is_aligned = all(_is_aligned(tensor) for tensor in given)
            is_fast = self._lay_out(params, is_aligned, is_backward=False)
            self._library.call("qk_rows" if is_fast else "qk_scalar_rows", byref(params), 0, stream_of(given[0]))
        return *results, *rstds

    def backward(
        self, dq_out, dk_out, inputs: QkInputs, q_rstd, k_rstd, are_weights_wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """As `qk_reference.backward`."""
        given, weights, rotary = _readable_inputs(inputs)
        grads = [_readable(grad.to(given[0].dtype)) for grad in (dq_out, dk_out)]
        results = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in given]
        dweights = [torch.zeros_like(weight) for weight in weights] if are_weights_wanted else [None, None]
        params = _params(given, weights, [q_rstd, k_rstd], rotary)
        for side, grad, result, dweight in zip(params.sides, grads, results, dweights, strict=True):
            side.out, side.dx, side.dweight = _heads(grad), _heads(result), address(dweight)
        if any(tensor.numel() for tensor in given):
            is_aligned = all(_is_aligned(tensor) for tensor in (*given, *grads))
            is_fast = self._lay_out(params, is_aligned, is_backward=True)
            if are_weights_wanted:
                partials = [
                    torch.empty(side.num_blocks, params.width, dtype=torch.float32, device=given[0].device)
                    for side in params.sides
                ]
                for side, partial in zip(params.sides, partials, strict=True):
                    side.partials = partial.data_ptr()
            self._library.call("qk_rows" if is_fast else "qk_scalar_rows", byref(params), 1, stream_of(given[0]))
            if are_weights_wanted:
                self._library.call("qk_finish", byref(params), stream_of(given[0]))
        return *results, *dweights

    def _lay_out(self, params: QkParams, is_aligned: bool, is_backward: bool) -> bool:
        """Deal the rows of q, then those of k, out to blocks: equally many each, as many blocks as run together.

        Returns:
            Whether the fast kernels can read these heads.
        """
        params.vectors, params.rows = choose_layout(params.num_heads, is_backward)
        fits = is_aligned and params.num_heads * params.head_dim <= MAX_THREADS * VECTOR * params.vectors
        blocks = self._num_blocks(params, is_backward) if fits else 0
        is_fast = blocks > 0
        if not is_fast:
            warn_of_scalar_path(f"QK norm of {params.num_heads} heads of {params.head_dim}, too wide or misaligned")
            blocks = SCALAR_BLOCKS_PER_MULTIPROCESSOR
        num_rows = sum(side.num_rows for side in params.sides)
        # One less, because the last block of q and the last of k may both be partly filled.
        num_blocks = max(1, self._library.num_multiprocessors(params.device) * blocks - 1)
        params.rows_per_block = max(MIN_ROWS, -(-num_rows // num_blocks))
        for side in params.sides:
            side.num_blocks = -(-side.num_rows // params.rows_per_block)
        return is_fast

    def _num_blocks(self, params: QkParams, is_backward: bool) -> int:
        """Blocks of the fast kernel that fit on a multiprocessor; 0 if not even one does."""
        key = (params.device, params.dtype, params.num_heads, params.head_dim, params.width, is_backward)
        if key not in self._blocks_that_fit:
            count = c_int()
            self._library.call(
                "qk_blocks_per_multiprocessor", byref(params), int(is_backward), byref(count), accept=(NO_INSTANCE,)
            )
            self._blocks_that_fit[key] = count.value
        return self._blocks_that_fit[key]


def _readable_inputs(
    inputs: QkInputs,
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
    """Queries and keys, their weights, and the turns, as the kernels can read them; copies only where needed."""
    weights = [inputs.q_weight.contiguous(), inputs.k_weight.contiguous()]
    rotary = inputs.rotary  # cosine and sine side by side, aligned
    if rotary is not None and not (rotary.is_contiguous() and rotary.data_ptr() % 16 == 0):
        rotary = rotary.clone(memory_format=torch.contiguous_format)
    return [_readable(inputs.q), _readable(inputs.k)], weights, rotary


def _params(
    given: list[torch.Tensor],
    weights: list[torch.Tensor],
    rstds: list[torch.Tensor],
    rotary: torch.Tensor | None,
    eps: float = 0.0,
) -> QkParams:
    """Parameters without the layout and the results."""
    x = given[0]
    params = QkParams(
        rotary=address(rotary),
        rotary_rows=1 if rotary is None else len(rotary),
        num_heads=x.shape[1],
        head_dim=x.shape[2],
        width=len(weights[0]),
        dtype=DTYPES[x.dtype],
        eps=eps,
        device=x.device.index or 0,
    )
    for side, tensor, weight, rstd in zip(params.sides, given, weights, rstds, strict=True):
        side.x, side.num_rows = _heads(tensor), len(tensor)
        side.weight, side.weight_dtype, side.rstd = weight.data_ptr(), DTYPES[weight.dtype], rstd.data_ptr()
    return params


def _heads(tensor: torch.Tensor) -> Heads:
    return Heads(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy where the dims of a head are not neighbours."""
    return tensor if tensor.stride(2) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the fast kernels can read it in 16 bytes."""
    steps = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:2]))
    return tensor.shape[2] % VECTOR == 0 and all(step % 16 == 0 for step in steps)
