"""The kernels against float64, emulated on the CPU and on a GPU: the same tests, the same source."""

import itertools

import pytest
import torch

from adaptiveload.kernels import backends
from adaptiveload.kernels.adaln import adaln, layer_norm_modulate
from adaptiveload.kernels.extension import MAX_INLINE_OFFSETS, Launch
from adaptiveload.kernels.library import warn_of_scalar_path
from tests.kernels.conftest import Kernels
from tests.kernels.test_adaln import SUBSETS, make_inputs, oracle

ALL = ("y", "gate", "scale", "shift", "weight", "bias")
MODULATED, GATED = ("scale", "shift"), ("y", "gate", "scale", "shift")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def run(kernels, inputs: dict, names, out_dtype=None, grad_x_out: bool = True, function=adaln):
    """Results and gradients by name, computed on the device of `kernels`, as float64 on the CPU."""
    offsets = inputs["segment_offsets"]
    leaves = {name: inputs[name].detach().to(kernels.device).requires_grad_() for name in ("x", *names)}
    more = {} if function is oracle else {"out_dtype": out_dtype}
    h, x_out = function(**leaves, segment_offsets=offsets, **more)
    generator = torch.Generator().manual_seed(1)
    # Exact in every dtype.
    sent = [torch.randn(h.shape, generator=generator).bfloat16().to(kernels.device, t.dtype) for t in (h, x_out)]
    results = (h, x_out) if grad_x_out else (h,)
    grads = torch.autograd.grad(results, list(leaves.values()), sent[: len(results)])
    return {"h": h, "x_out": x_out} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


class OnCpu:
    device = "cpu"


def expected(inputs: dict, names, where=OnCpu, **options):
    """In float64, from the inputs as they are rounded."""
    wide = {name: t if name == "segment_offsets" else t.double() for name, t in inputs.items()}
    return run(where, wide, names, function=oracle, **options)


def assert_matches(got: dict, want: dict, num_rows: int, scale: float = 1.0) -> None:
    """Float32 results within 1e-5 of their size, 16-bit ones within one more rounding; sums over rows by their root."""
    for name, tensor in got.items():
        right = want[name]
        assert tensor.shape == right.shape, name
        size = right.abs().max().item() if right.numel() else 0.0
        is_sum = name in ("dgate", "dscale", "dshift", "dweight", "dbias")
        # 2e-6 is thirty roundings of float32: a product and a sum, and the error of n and dx themselves.
        atol = 2e-6 * max(1.0, num_rows**0.5) * max(size, 1.0) if is_sum else 1e-5 * max(size, 1.0)
        rtol = 0.0 if tensor.dtype == FP32 else torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(
            tensor.cpu().double(), right.cpu(), rtol=rtol, atol=scale * atol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("hidden_size", [64, 37])  # fast and scalar
@pytest.mark.parametrize("subset", SUBSETS, ids=lambda subset: "+".join(subset) or "plain")
def test_every_subset_of_parts(kernels, subset, hidden_size):
    inputs = make_inputs(hidden_size=hidden_size)
    assert_matches(run(kernels, inputs, subset), expected(inputs, subset), num_rows=22)


@pytest.mark.parametrize(
    "dtypes",
    [
        (FP32, FP32, FP32), (BF16, BF16, BF16), (FP16, FP16, FP16), (FP32, BF16, BF16), (FP32, FP16, FP16),
        (BF16, BF16, FP32), (FP32, BF16, FP32), (FP16, FP32, BF16),  # the last has no fast kernel
    ],
    ids=lambda dtypes: "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
)  # fmt: skip
@pytest.mark.parametrize("names", [MODULATED, ("y", *MODULATED), GATED, ("y", "weight", "bias")], ids="+".join)
@pytest.mark.parametrize("modulation", [FP32, BF16])
def test_dtypes(kernels, dtypes, names, modulation):
    x, y, out = dtypes
    inputs = make_inputs(hidden_size=264)  # a last warp that is not full
    inputs = {n: t if n == "segment_offsets" else t.to({"x": x, "y": y}.get(n, modulation)) for n, t in inputs.items()}
    # Without y the stream passes by, and autograd adds its gradient with a rounding of its own.
    is_added = "y" in names
    got = run(kernels, inputs, names, out_dtype=out, grad_x_out=is_added)
    assert (got["h"].dtype, got["x_out"].dtype) == (out, x)
    assert [got[f"d{name}"].dtype for name in ("x", *names)] == [inputs[name].dtype for name in ("x", *names)]
    if is_added:
        # Statistics are those of the stored residual: that is what backward must differentiate.
        want = expected(inputs | {"x": got["x_out"].detach().cpu(), "y": torch.zeros_like(inputs["y"])}, names)
        want["x_out"] = expected(inputs, names)["x_out"]
        if "gate" in names:
            rows = torch.repeat_interleave(torch.arange(6), inputs["segment_offsets"].diff())
            by_token = want["dx"] * inputs["y"].double()
            want["dgate"] = torch.zeros(6, 264, dtype=torch.float64).index_add(0, rows, by_token)
    else:
        want = expected(inputs, names, grad_x_out=False)
    assert_matches(got, want, num_rows=22)


@pytest.mark.parametrize(
    "lengths",
    [[1], [50], [3, 0, 1, 20, 17, 0], [0, 7, 0], [1] * 40, [1009], [700, 651], [5] * 13],
    ids=lambda lengths: f"{len(lengths)}x{max(lengths)}",
)
@pytest.mark.parametrize("hidden_size", [64, 20])
def test_segments(kernels, lengths, hidden_size):
    inputs = make_inputs(lengths, hidden_size=hidden_size)
    for names in (MODULATED, ALL, ("y", "weight", "bias")):
        got = run(kernels, inputs, names)
        assert_matches(got, expected(inputs, names), num_rows=sum(lengths))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(kernels, lengths):
    inputs = make_inputs(lengths, hidden_size=64)
    for name, gradient in run(kernels, inputs, ALL).items():
        assert not gradient.any(), name
    assert run(kernels, inputs, ALL)["dscale"].shape == (len(lengths), 64)


def test_scalar_path_is_said_once(kernels, caplog):
    warn_of_scalar_path.cache_clear()
    for _ in range(2):
        run(kernels, make_inputs(hidden_size=39), MODULATED)
    (record,) = caplog.records
    assert record.getMessage().startswith("AdaLN of D = 39, x float32, h float32: no fast kernel")


def test_more_segments_than_fit_into_the_launch(kernels):
    lengths = [1, 2] * MAX_INLINE_OFFSETS
    inputs = make_inputs(lengths, hidden_size=8)
    assert_matches(run(kernels, inputs, GATED), expected(inputs, GATED), num_rows=2)


LAYOUTS = [Launch(1, 2, 2), Launch(1, 2, 4), Launch(2, 1, 2, 3, 1), Launch(2, 2, 2), Launch(1, 1, 2, 1, 1)]
LAYOUTS += [Launch(2, 2, 4, 1), Launch(2, 1, 4, min_rows=1, in_turn=True)]


@pytest.mark.parametrize("launch", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_layouts_agree(emulated, launch, dtype):  # a GPU's library has each for one direction only, unless for a sweep
    kernels = Kernels(emulated, "cpu")
    inputs = make_inputs([40, 1, 23], hidden_size=264)
    inputs |= {"x": inputs["x"].to(dtype), "y": inputs["y"].to(dtype)}
    with backends.use(emulated):
        usual = run(kernels, inputs, ALL)
    with backends.use(emulated.variant(launch=launch)):
        other = run(kernels, inputs, ALL)
    assert_matches(other, {name: tensor.double() for name, tensor in usual.items()}, num_rows=64)


@pytest.mark.parametrize("names", [MODULATED, GATED, ("weight", "bias"), ALL], ids="+".join)
def test_two_kernel_backward_of_the_paper(kernels, names):
    inputs = make_inputs([40, 0, 1, 23], hidden_size=264)
    with backends.use(kernels.extension.variant(d_tile=True)):
        got = run(kernels, inputs, names)
    assert_matches(got, expected(inputs, names), num_rows=64)


@pytest.mark.parametrize("grad_x_out", [True, False])
def test_gradient_through_the_residual_is_optional(kernels, grad_x_out):
    inputs = make_inputs(hidden_size=64)
    got = run(kernels, inputs, GATED, grad_x_out=grad_x_out)
    assert_matches(got, expected(inputs, GATED, grad_x_out=grad_x_out), num_rows=22)


@pytest.mark.parametrize(
    "frozen", [{"gate"}, {"scale", "shift"}, {"gate", "scale", "shift"}, {"y"}, {"x"}, {"weight", "bias"}]
)
def test_frozen_inputs(kernels, frozen):
    inputs = kernels.to(make_inputs(hidden_size=64))
    full = {n: t.detach().clone().requires_grad_() for n, t in inputs.items() if n != "segment_offsets"}
    part = {n: t.detach().clone().requires_grad_(n not in frozen) for n, t in full.items()}
    for leaves in (full, part):
        h, x_out = adaln(**leaves, segment_offsets=inputs["segment_offsets"])
        (h.square().sum() + x_out.sum()).backward()
    for name, leaf in part.items():
        assert (leaf.grad is None) == (name in frozen)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, full[name].grad, rtol=1e-6, atol=1e-5)


def test_unused_norm_still_sends_the_residual_gradient(kernels):
    inputs = kernels.to(make_inputs(hidden_size=64))
    leaves = {name: inputs[name].requires_grad_() for name in ("x", *GATED)}
    _, x_out = adaln(**leaves, segment_offsets=inputs["segment_offsets"])
    grads = torch.autograd.grad(x_out.sum(), list(leaves.values()))
    rows = torch.repeat_interleave(torch.arange(6), inputs["segment_offsets"].diff())
    torch.testing.assert_close(grads[0], torch.ones_like(grads[0]))
    torch.testing.assert_close(grads[1], inputs["gate"][rows.to(kernels.device)])


def test_values_that_break_careless_kernels(kernels):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 64, generator=generator)
    x[0] += 3000  # E[x^2] - E[x]^2 cancels
    x[1], x[2], x[3], x[4] = 5.0, 0.0, torch.eye(64)[3] * 1e4, 1e-40
    inputs = make_inputs([6], hidden_size=64) | {"x": x}
    inputs["scale"][:, ::2] = -1
    got, want = run(kernels, inputs, MODULATED), expected(inputs, MODULATED)
    # A row near 3000 carries a float32 rounding of 1.2e-4 in its mean; constant rows have a deviation of 1 / 1000.
    assert_matches(got, want, num_rows=6, scale=50)


def test_nan_stays_in_its_row_and_segment(kernels):
    inputs = make_inputs(hidden_size=64)
    inputs["x"][4] = torch.nan  # in the second segment
    got = run(kernels, inputs, GATED)
    for name in ("h", "x_out", "dx"):
        bad = got[name].isnan().any(1).cpu()
        assert bad.tolist() == [i == 4 for i in range(22)], name
    assert got["dscale"].isnan().any(1).tolist() == [i == 1 for i in range(6)]


def views(shape: tuple[int, int], seed: int, device: str) -> dict[str, torch.Tensor]:
    rows, size = shape
    r = lambda *s: torch.randn(*s, generator=torch.Generator().manual_seed(seed)).to(device)  # noqa: E731
    return {
        "contiguous": r(rows, size),
        "chunk": r(rows, 3 * size).chunk(3, 1)[1],
        "transposed": r(size, rows).T,
        "every second row": r(2 * rows, size)[::2],
        "odd start": r(rows, size + 1)[:, 1:],
        "inner stride 2": r(rows, 2 * size)[:, ::2],
        "expanded": r(1, size).expand(rows, size),
        "offset": r(rows + 1, size)[1:],
    }


@pytest.mark.parametrize("hidden_size", [64, 36])
def test_views_of_every_input(kernels, hidden_size):
    """Case C45: strides ignored in a kernel give wrong values in silence, often in backward only."""
    inputs = make_inputs(hidden_size=hidden_size)
    tokens, rows = views((22, hidden_size), 3, kernels.device), views((6, hidden_size), 4, kernels.device)
    for token_view, row_view in itertools.product(tokens, rows):
        case = inputs | {"x": tokens[token_view], "y": views((22, hidden_size), 5, kernels.device)[token_view]}
        case |= {
            "gate": rows[row_view],
            "scale": rows[row_view],
            "shift": views((6, hidden_size), 6, kernels.device)[row_view],
        }
        assert_matches(run(kernels, case, GATED), expected(case, GATED), num_rows=22)


def test_expanded_and_transposed_gradients(kernels):
    inputs = kernels.to(make_inputs(hidden_size=64))
    leaves = [inputs[name].requires_grad_() for name in ("x", "scale", "shift")]
    call = lambda: adaln(  # noqa: E731
        leaves[0], scale=leaves[1], shift=leaves[2], segment_offsets=inputs["segment_offsets"]
    )[0]
    wanted = torch.randn(64, 22, generator=torch.Generator().manual_seed(1)).to(kernels.device).T
    for sent in (torch.ones(1, 1, device=kernels.device).expand(22, 64), wanted):
        grads = torch.autograd.grad(call(), leaves, sent)
        dense = torch.autograd.grad(call(), leaves, sent.contiguous())
        assert all(torch.equal(a, b) for a, b in zip(grads, dense, strict=True))


def test_same_tensor_twice(kernels):
    inputs = make_inputs(hidden_size=64)
    inputs["y"] = inputs["x"]
    got = run(kernels, inputs, ("y", *MODULATED))
    assert_matches(got, expected(inputs, ("y", *MODULATED)), num_rows=22)


def test_runs_are_bitwise_equal(kernels):
    inputs = make_inputs([300, 20, 99], hidden_size=264)
    first, second = run(kernels, inputs, ALL), run(kernels, inputs, ALL)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_zero_gate_lets_its_gradient_through(kernels):
    """adaLN-Zero starts with a gate of 0: y gets no gradient, the gate does."""
    inputs = make_inputs(hidden_size=64)
    inputs["gate"].zero_()
    got = run(kernels, inputs, GATED)
    assert not got["dy"].any()
    assert_matches(got, expected(inputs, GATED), num_rows=22)


@pytest.mark.parametrize("shape", [(3, 64), (3, 1, 64), (3, 7, 64)])
def test_layer_norm_modulate(kernels, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 64, generator=generator)
    scale, shift = (torch.randn(shape, generator=generator) for _ in range(2))
    rows = [t.unsqueeze(1) if t.ndim == 2 else t for t in (scale, shift)]
    want = torch.nn.functional.layer_norm(x, (64,), eps=1e-6) * (1 + rows[0]) + rows[1]
    got = layer_norm_modulate(*(t.to(kernels.device) for t in (x, scale, shift)))
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-5)  # float32 sums of 64 in another order
