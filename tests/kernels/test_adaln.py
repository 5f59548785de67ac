"""AdaLN against its equations in float64, written out token by token, for every subset of its parts."""

import itertools
import logging

import pytest
import torch

from adaptiveload.kernels.adaln import adaln, layer_norm_modulate
from adaptiveload.kernels.segments import equal_runs, merge_runs

LENGTHS = [3, 3, 1, 5, 5, 5]
PARTS = ("y", "gate", "scale", "shift", "weight", "bias")


def make_inputs(lengths=tuple(LENGTHS), hidden_size: int = 24, dtype=torch.float32, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"x": sum(lengths), "y": sum(lengths), "gate": len(lengths), "scale": len(lengths), "shift": len(lengths)}
    inputs = {name: torch.randn(size, hidden_size, generator=generator, dtype=dtype) for name, size in sizes.items()}
    inputs |= {name: torch.randn(hidden_size, generator=generator, dtype=dtype) for name in ("weight", "bias")}
    return inputs | {"segment_offsets": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)}


def oracle(x, segment_offsets, eps=1e-6, y=None, gate=None, scale=None, shift=None, weight=None, bias=None):
    """Float64, one modulation row per token, no shared code with the implementation."""
    rows = torch.repeat_interleave(torch.arange(len(segment_offsets) - 1), segment_offsets.diff())
    x, y, gate, scale, shift, weight, bias = (
        None if tensor is None else tensor.double() for tensor in (x, y, gate, scale, shift, weight, bias)
    )
    if y is not None:
        x = x + (y if gate is None else gate[rows] * y)
    centred = x - x.mean(1, keepdim=True)
    h = centred / (centred.square().mean(1, keepdim=True) + eps).sqrt()
    h = h if weight is None else h * weight
    h = h if bias is None else h + bias
    h = h if scale is None else h * (1 + scale[rows])
    return (h if shift is None else h + shift[rows]), x


SUBSETS = [
    subset
    for size in range(len(PARTS) + 1)
    for subset in itertools.combinations(PARTS, size)
    if "gate" not in subset or "y" in subset
]


@pytest.mark.parametrize("subset", SUBSETS, ids=lambda subset: "+".join(subset) or "plain")
def test_forward_and_gradients_of_every_subset_of_parts(subset):
    inputs = make_inputs()
    leaves = {name: inputs[name].requires_grad_() for name in ("x", *subset)}
    h, x_out = adaln(**leaves, segment_offsets=inputs["segment_offsets"])
    expected_h, expected_x = oracle(**leaves, segment_offsets=inputs["segment_offsets"])
    # float32 sums of 24 numbers of size 1.
    torch.testing.assert_close(h, expected_h.float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(x_out, expected_x.float(), rtol=0, atol=1e-6)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(h.shape, generator=generator) for _ in range(2)]
    # Both results are used, as in a block, where x_out goes on as the residual stream.
    grads = torch.autograd.grad([h, x_out], list(leaves.values()), weights)
    expected = torch.autograd.grad([expected_h, expected_x], list(leaves.values()), [w.double() for w in weights])
    for name, grad, expected_grad in zip(leaves, grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=5e-5, msg=name)  # sums of up to 22 tokens


def test_gradcheck_in_float64():
    inputs = make_inputs([2, 2, 1], hidden_size=5, dtype=torch.float64)
    offsets = inputs.pop("segment_offsets")
    names = list(inputs)

    def function(*tensors):
        return adaln(**dict(zip(names, tensors, strict=True)), segment_offsets=offsets)

    assert torch.autograd.gradcheck(function, [tensor.requires_grad_() for tensor in inputs.values()])


def test_statistics_are_those_of_the_rounded_residual():
    """A backward that reads the stored bfloat16 residual must see what the forward normalised."""
    inputs = make_inputs(hidden_size=64)
    x, y = inputs["x"].bfloat16(), inputs["y"].bfloat16()
    h, x_out = adaln(
        x, y=y, gate=inputs["gate"], scale=inputs["scale"], shift=inputs["shift"],
        segment_offsets=inputs["segment_offsets"], out_dtype=torch.float32,
    )  # fmt: skip
    assert x_out.dtype == torch.bfloat16
    again, _ = adaln(
        x_out, scale=inputs["scale"], shift=inputs["shift"],
        segment_offsets=inputs["segment_offsets"], out_dtype=torch.float32,
    )  # fmt: skip
    assert torch.equal(h, again)


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_mixed_dtypes_compute_in_fp32(stream):
    """bfloat16 tokens with float32 modulation: the result is the float64 one, rounded."""
    inputs = make_inputs(hidden_size=64)
    inputs["x"], inputs["y"] = inputs["x"].to(stream), inputs["y"].bfloat16()
    for name in ("weight", "bias"):  # gathered in bfloat16 by FSDP
        inputs[name] = inputs[name].bfloat16()
    h, x_out = adaln(**inputs, out_dtype=torch.bfloat16)
    assert (h.dtype, x_out.dtype) == (torch.bfloat16, stream)
    parts = {name: inputs[name] for name in ("scale", "shift", "weight", "bias", "segment_offsets")}
    expected, _ = oracle(x_out, **parts)
    # One bfloat16 rounding (2**-9), and where float32 lands on the other side of a tie, one more.
    torch.testing.assert_close(h.double(), expected, rtol=2**-8, atol=1e-5)


def test_modulation_smaller_than_a_bf16_step_still_counts():
    inputs = make_inputs(hidden_size=64)
    tiny = torch.full_like(inputs["scale"], 2**-10)  # 1 + 2**-10 is 1 in bfloat16
    h, _ = adaln(inputs["x"], scale=tiny, segment_offsets=inputs["segment_offsets"])
    plain, _ = adaln(inputs["x"], segment_offsets=inputs["segment_offsets"])
    torch.testing.assert_close(h, plain * (1 + 2**-10), rtol=1e-6, atol=0)


def test_values_that_break_careless_kernels():
    rows = torch.stack(
        [
            3000 + torch.randn(64, generator=torch.Generator().manual_seed(0)),  # E[x^2] - E[x]^2 cancels
            torch.full((64,), 5.0),  # variance 0
            torch.zeros(64),
            torch.eye(64)[3] * 1e4,  # one outlier
        ]
    )
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    h, _ = adaln(rows, segment_offsets=offsets)
    expected, _ = oracle(rows, offsets)
    # Rows near 3000 carry a float32 rounding of 1.2e-4 in their mean.
    torch.testing.assert_close(h, expected.float(), rtol=0, atol=5e-4)
    assert torch.equal(h[1:3], torch.zeros(2, 64))


def test_nan_stays_in_its_row():
    inputs = make_inputs()
    inputs["x"][4] = torch.nan
    h, x_out = adaln(**inputs)
    bad = h.isnan().any(1)
    assert bad.tolist() == [index == 4 for index in range(22)]
    assert torch.equal(x_out.isnan().any(1), bad)


def test_strided_modulation_and_expanded_gradients():
    """Modulation rows are views of one [G, 6, D] tensor; sum() sends back a gradient of stride 0."""
    inputs = make_inputs()
    six = torch.randn(6, 6, 24, generator=torch.Generator().manual_seed(2), requires_grad=True)
    shift, scale, gate, *_ = six.unbind(1)
    assert shift.stride() == (144, 1)
    common = {name: inputs[name] for name in ("x", "y", "segment_offsets")}
    h, x_out = adaln(**common, gate=gate, scale=scale, shift=shift)
    expected = oracle(**common, gate=gate, scale=scale, shift=shift)
    (grad,) = torch.autograd.grad(h.sum() + x_out.sum(), six)
    (expected_grad,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), six)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=5e-5)  # as above


@pytest.mark.parametrize("lengths", [[22], [1] * 22, [11, 11]])
def test_results_do_not_depend_on_how_runs_are_merged(lengths):
    inputs = make_inputs()
    rows = inputs["scale"][:1]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    h, _ = adaln(inputs["x"], scale=rows.expand(len(lengths), -1), segment_offsets=offsets)
    whole, _ = adaln(inputs["x"], scale=rows, segment_offsets=torch.tensor([0, 22]))
    assert torch.equal(h, whole)


def test_without_update_the_stream_is_passed_through():
    inputs = make_inputs()
    assert adaln(inputs["x"], segment_offsets=inputs["segment_offsets"])[1] is inputs["x"]


def test_updated_stream_is_not_a_view():
    """FSDP refuses views as results of a module that it wraps."""
    for lengths in ([22], LENGTHS):
        _, x_out = adaln(**make_inputs(lengths))
        assert not x_out._is_view()


def test_layer_norm_modulate_is_the_case_of_equal_lengths():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 24, generator=generator)
    scale, shift = (torch.randn(3, 24, generator=generator) for _ in range(2))
    expected = torch.nn.functional.layer_norm(x, (24,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(layer_norm_modulate(x, scale, shift), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(22)}, r"x must be \[N, D\]"),
        ({"y": None}, "gate multiplies y"),
        ({"y": torch.zeros(21, 24)}, r"y must be \[22, 24\], got \[21, 24\]"),
        ({"scale": torch.zeros(22, 24)}, r"scale must be \[6, 24\]"),
        ({"weight": torch.zeros(23)}, r"weight must be \[24\]"),
        ({"segment_offsets": torch.tensor([0, 3, 6, 7, 12, 17, 21])}, "must end at 22"),
    ],
)
def test_wrong_shapes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        adaln(**(make_inputs() | changes))


def test_runs():
    assert merge_runs([3, 3, 5, 3]) == [(2, 3), (1, 5), (1, 3)]
    assert equal_runs(torch.tensor([0, 3, 6, 7, 12])) == [(2, 3), (1, 1), (1, 5)]
    with pytest.raises(ValueError, match="on meta"):
        equal_runs(torch.zeros(3, device="meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_agrees_with_the_cpu_and_says_once_what_it_runs(caplog):
    inputs = make_inputs(hidden_size=1536)
    moved = {name: tensor if name == "segment_offsets" else tensor.cuda() for name, tensor in inputs.items()}
    with caplog.at_level(logging.WARNING, logger="adaptiveload.kernels.backends"):
        for _ in range(2):
            h, x_out = adaln(**moved)
    assert len(caplog.records) <= 1  # none where another test came first
    expected_h, expected_x = adaln(**inputs)
    torch.testing.assert_close(h.cpu(), expected_h, rtol=0, atol=2e-5)  # float32 sums of 1,536 in another order
    torch.testing.assert_close(x_out.cpu(), expected_x, rtol=0, atol=1e-6)
