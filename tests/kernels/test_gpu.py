"""What only a GPU can show: full sizes, streams, graphs, devices, more than 2**31 elements."""

import pytest
import torch

from adaptiveload.kernels import backends
from adaptiveload.kernels.adaln import adaln
from adaptiveload.kernels.build import LIBRARY
from adaptiveload.kernels.extension import Extension
from tests.kernels.test_adaln import make_inputs
from tests.kernels.test_extension import ALL, GATED, MODULATED, assert_matches, expected, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class OnGpu:
    device = "cuda"


@pytest.fixture(autouse=True, params=[False, True], ids=["one_pass", "d_tile"])
def extension(request):
    extension = Extension(LIBRARY, d_tile=request.param)
    with backends.use(extension):
        yield extension


@pytest.mark.parametrize("hidden_size", [1536, 3072, 5120, 8192, 8200, 1001, 1])
@pytest.mark.parametrize("names", [MODULATED, GATED, ALL], ids="+".join)
def test_widths(hidden_size, names):
    inputs = make_inputs([1009, 1, 500], hidden_size=hidden_size)
    got = run(OnGpu, inputs, names)
    # With D = 1 every row is constant: its normalised value is a rounding error times 1000.
    assert_matches(got, expected(inputs, names, OnGpu), num_rows=1510, scale=1.0 if hidden_size > 1 else 100.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden_size", [1536, 5120])
def test_a_long_clip_beside_images(dtype, hidden_size):
    """Sums over 32,760 rows: many blocks share a segment, and a block many segments."""
    inputs = make_inputs([32760, *[256] * 40], hidden_size=hidden_size)
    inputs |= {"x": inputs["x"].to(dtype)}
    names = MODULATED
    got = run(OnGpu, inputs, names, out_dtype=torch.float32, grad_x_out=False)
    assert_matches(got, expected(inputs, names, OnGpu, grad_x_out=False), num_rows=32760)


def test_repeats_bitwise_on_side_streams():
    inputs = make_inputs([3000, 17, 5000], hidden_size=1536)
    first = run(OnGpu, inputs, GATED)
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            again = run(OnGpu, inputs, GATED)
        torch.cuda.synchronize()
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_cuda_graph():
    inputs = make_inputs([300, 200], hidden_size=1536)
    leaves = {name: inputs[name].cuda().requires_grad_() for name in ("x", *GATED)}
    sent = torch.randn(500, 1536, device="cuda")

    def step():
        h, x_out = adaln(**leaves, segment_offsets=inputs["segment_offsets"])
        return torch.autograd.grad([h, x_out], list(leaves.values()), [sent, sent])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        leaves["x"].normal_()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)


def test_another_device_than_the_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make_inputs([30, 20], hidden_size=64)

    class OnSecond:
        device = "cuda:1"

    assert_matches(run(OnSecond, inputs, GATED), expected(inputs, GATED), num_rows=50)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    ("num_rows", "hidden_size"), [(419431, 5120), (2**22 + 1, 1024), (2**23 + 16, 257), (70000, 5)]
)
def test_more_than_32_bits_of_elements(num_rows, hidden_size):
    """Case C44. Only marked rows carry values and send gradients back."""
    picked = torch.tensor(sorted({0, 1, num_rows // 2, num_rows - 2, num_rows - 1, 65535}), device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.zeros(num_rows, hidden_size, dtype=torch.bfloat16, device="cuda")
    x[picked] = torch.randn(len(picked), hidden_size, generator=generator, device="cuda").bfloat16()
    scale, shift = (torch.full((1, hidden_size), value, device="cuda", requires_grad=True) for value in (0.5, 0.25))
    x.requires_grad_()
    h, _ = adaln(x, scale=scale, shift=shift, segment_offsets=torch.tensor([0, num_rows]))
    small = x.detach()[picked].requires_grad_()
    want, _ = adaln(small, scale=scale, shift=shift, segment_offsets=torch.tensor([0, len(picked)]))
    assert torch.equal(h[picked], want)
    assert (h[num_rows // 3] == 0.25).all()
    dh = torch.zeros_like(h)
    dh[picked] = 1
    grads = torch.autograd.grad(h, (x, scale, shift), dh)
    wanted = torch.autograd.grad(want, (small, scale, shift), torch.ones_like(want))
    assert torch.equal(grads[0][picked], wanted[0])
    assert not grads[0][num_rows // 3].any()
    for grad, right in zip(grads[1:], wanted[1:], strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-5, atol=1e-5)  # six summands, in another order
