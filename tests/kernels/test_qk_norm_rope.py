"""RMSNorm and rotation of queries and keys against float64: plain PyTorch, the kernels emulated, and on a GPU."""

from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adaptiveload.kernels import backends
from adaptiveload.kernels.build import LIBRARY
from adaptiveload.kernels.extension import Extension
from adaptiveload.kernels.qk_norm_rope import qk_norm_rope
from adaptiveload.kernels.qk_reference import rotate

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-6
NAMES = ("q", "k", "q_weight", "k_weight")


@dataclass(frozen=True)
class Where:
    device: str


@pytest.fixture(params=["reference", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    """The device of the inputs; the call is computed by the backend that the parameter names."""
    if request.param == "reference":
        yield Where("cpu")
        return
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    is_emulated = request.param == "emulated"
    extension = request.getfixturevalue("emulated") if is_emulated else Extension(LIBRARY)
    with backends.use(extension):
        yield Where("cpu" if is_emulated else "cuda")


def make_inputs(num_tokens=9, num_keys=None, num_heads=2, head_dim=64, *, per_head=False, rotary=True, dtype=FP32):
    generator = torch.Generator().manual_seed(0)
    r = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    num_keys = num_tokens if num_keys is None else num_keys
    width = head_dim if per_head else num_heads * head_dim
    inputs = {
        "q": (3 * r(num_tokens, num_heads, head_dim)).to(dtype),
        "k": r(num_keys, num_heads, head_dim).to(dtype),
        "q_weight": 1 + 0.5 * r(width),
        "k_weight": 1 + 0.5 * r(width),
    }
    if rotary:
        inputs["rotary"] = torch.polar(torch.ones(num_tokens, head_dim // 2), 10 * r(num_tokens, head_dim // 2))
    return inputs


def oracle_one(x, weight, rotary):
    """Float64, head by head and pair by pair; no shared code with the implementation."""
    x, weight = x.double(), weight.double()
    per_head = len(weight) == x.shape[2]
    mean_square = x.square().mean((2,) if per_head else (1, 2), keepdim=True)
    out = x / (mean_square + EPS).sqrt() * (weight if per_head else weight.view(x.shape[1:]))
    if rotary is None:
        return out
    repeats = len(x) // len(rotary)
    cosine, sine = (part.double().repeat(repeats, 1).unsqueeze(1) for part in (rotary.real, rotary.imag))
    first, second = out[..., 0::2], out[..., 1::2]
    return torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1).flatten(-2)


def oracle(q, k, q_weight, k_weight, rotary=None):
    return oracle_one(q, q_weight, rotary), oracle_one(k, k_weight, rotary)


def run(where, inputs: dict, function=qk_norm_rope) -> dict:
    """Results and gradients by name, the gradients sent back the same whatever the function."""
    leaves = {name: inputs[name].detach().to(where.device).requires_grad_() for name in NAMES}
    rotary = inputs.get("rotary")
    results = function(**leaves, rotary=None if rotary is None else rotary.to(where.device))
    generator = torch.Generator().manual_seed(1)
    sent = [torch.randn(r.shape, generator=generator).bfloat16().to(where.device, r.dtype) for r in results]
    grads = torch.autograd.grad(results, list(leaves.values()), sent)
    return {"q_out": results[0], "k_out": results[1]} | {f"d{n}": g for n, g in zip(leaves, grads, strict=True)}


def assert_matches(got: dict, inputs: dict) -> None:
    """Float32 within 1e-5 of the size, 16 bits within one rounding more, sums over rows by the root of their number."""
    want = run(Where("cpu"), inputs, oracle)
    width = len(inputs["q_weight"])
    for name, tensor in got.items():
        right = want[name].double()
        assert tensor.shape == right.shape, name
        size = max(1.0, right.abs().max().item() if right.numel() else 0.0)
        atol = 1e-5 * size
        if name.endswith("weight"):
            num_summands = max(1, inputs[name[1]].numel() // width)
            atol = 2e-6 * num_summands**0.5 * size
        rtol = 0.0 if tensor.dtype == FP32 else torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(
            tensor.cpu().double(), right, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


# 8 lanes a head, 16, 12 (not a power of two), 3, and what the scalar kernels take: 10 and 7 dims, and too many heads.
SIZES = [(2, 64), (3, 128), (5, 96), (2, 24), (3, 10), (1, 8), (41, 128)]


@pytest.mark.parametrize(("num_heads", "head_dim"), SIZES)
@pytest.mark.parametrize("per_head", [False, True], ids=["all_heads", "per_head"])
@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
def test_results_and_gradients(where, num_heads, head_dim, per_head, rotary):
    inputs = make_inputs(num_heads=num_heads, head_dim=head_dim, per_head=per_head, rotary=rotary)
    assert_matches(run(where, inputs), inputs)


@pytest.mark.parametrize("per_head", [False, True], ids=["all_heads", "per_head"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
@pytest.mark.parametrize("head_dim", [64, 10])
def test_dtypes(where, dtype, weight_dtype, head_dim, per_head):
    inputs = make_inputs(head_dim=head_dim, per_head=per_head, dtype=dtype)
    inputs |= {name: inputs[name].to(weight_dtype) for name in ("q_weight", "k_weight")}
    got = run(where, inputs)
    assert [got[name].dtype for name in ("q_out", "k_out", "dq", "dk")] == [dtype] * 4
    assert got["dq_weight"].dtype == weight_dtype
    assert_matches(got, inputs)


@pytest.mark.parametrize("num_tokens", [(1, 1), (100, 3), (3, 100), (0, 5), (5, 0), (0, 0), (131, 131)])
@pytest.mark.parametrize("per_head", [False, True], ids=["all_heads", "per_head"])
def test_cross_attention_has_other_numbers_of_keys(where, num_tokens, per_head):
    inputs = make_inputs(*num_tokens, per_head=per_head, rotary=False)
    assert_matches(run(where, inputs), inputs)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_too_wide_for_shared_memory_take_the_scalar_path(where, dtype):  # float32 backward: 256 KiB for a block
    inputs = make_inputs(3, num_heads=64, head_dim=128, dtype=dtype)
    assert_matches(run(where, inputs), inputs)


def test_odd_head_dim_without_rotation(where):
    for per_head in (False, True):
        inputs = make_inputs(head_dim=7, per_head=per_head, rotary=False)
        assert_matches(run(where, inputs), inputs)


@pytest.mark.parametrize("head_dim", [64, 10])
def test_rows_of_rotary_repeat_for_every_sample(where, head_dim):
    inputs = make_inputs(12, head_dim=head_dim)
    inputs["rotary"] = inputs["rotary"][:4]
    assert_matches(run(where, inputs), inputs)


def views_of_qkv(num_tokens: int, num_heads: int, head_dim: int, dtype=FP32) -> dict[str, torch.Tensor]:
    """q, k and v [3, N, H, hd] as the views that projections leave."""
    r = lambda *s: torch.randn(*s, generator=torch.Generator().manual_seed(3)).to(dtype)  # noqa: E731
    size = num_heads * head_dim
    return {
        "chunks": r(num_tokens, 3 * size).unflatten(1, (3, num_heads, head_dim)).movedim(1, 0),
        "interleaved": r(num_tokens, num_heads, 3, head_dim).movedim(2, 0),
        "heads first": r(3, num_heads, num_tokens, head_dim).transpose(1, 2),
        "odd start": r(num_tokens, 3 * size + 1)[:, 1:].unflatten(1, (3, num_heads, head_dim)).movedim(1, 0),
        "transposed": r(3, head_dim, num_heads, num_tokens).transpose(1, 3),
        "expanded": r(3, 1, 1, head_dim).expand(3, num_tokens, num_heads, head_dim),
    }


@pytest.mark.parametrize("view", list(views_of_qkv(1, 1, 8)))
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("per_head", [False, True], ids=["all_heads", "per_head"])
def test_views_of_one_qkv_tensor(where, view, dtype, per_head):
    inputs = make_inputs(per_head=per_head, dtype=dtype)
    q, k, _ = views_of_qkv(9, 2, 64, dtype)[view].to(where.device)
    inputs |= {"q": q, "k": k}
    assert_matches(run(where, inputs), inputs)


def test_views_are_kept_and_read_without_a_copy(where):
    """For backward: the qkv tensor itself and one number for each norm. One node."""
    qkv = torch.randn(50, 3 * 128, dtype=BF16, device=where.device, requires_grad=True)
    q, k, _ = qkv.unflatten(1, (3, 2, 64)).unbind(1)
    inputs = make_inputs(50)
    weights = [inputs[name].to(where.device).requires_grad_() for name in ("q_weight", "k_weight")]
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        q_out, k_out = qk_norm_rope(q, k, *weights, inputs["rotary"].to(where.device))
    assert qkv.untyped_storage().data_ptr() in storages
    shared = qkv.untyped_storage().nbytes() + 2 * 128 * 4 + 50 * 32 * 8  # qkv, weights, rotary
    assert sum(storages.values()) - shared == 2 * 50 * 4
    assert q_out.grad_fn is k_out.grad_fn
    assert {parent.name() for parent, _ in q_out.grad_fn.next_functions if parent} == {
        "UnbindBackward0",
        "torch::autograd::AccumulateGrad",
    }


def test_strided_and_expanded_gradients(where):
    inputs = make_inputs(12)
    leaves = [inputs[name].to(where.device).requires_grad_() for name in NAMES]
    rotary = inputs["rotary"].to(where.device)
    r = lambda *s: torch.randn(*s, generator=torch.Generator().manual_seed(5)).to(where.device)  # noqa: E731
    for sent in (
        torch.ones(1, 1, 1, device=where.device).expand(12, 2, 64),
        r(2, 12, 64).transpose(0, 1),
        r(64, 2, 12).permute(2, 1, 0),
    ):
        grads = torch.autograd.grad(qk_norm_rope(*leaves, rotary), leaves, (sent, sent))
        dense = torch.autograd.grad(qk_norm_rope(*leaves, rotary), leaves, (sent.contiguous(), sent.contiguous()))
        for name, grad, right in zip(NAMES, grads, dense, strict=True):
            # The scalar kernels add in another order.
            torch.testing.assert_close(grad, right, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("unused", [0, 1])
def test_unused_result(where, unused):
    inputs = make_inputs()
    leaves = [inputs[name].to(where.device).requires_grad_() for name in NAMES]
    results = qk_norm_rope(*leaves, inputs["rotary"].to(where.device))
    grads = torch.autograd.grad(results[1 - unused].square().sum(), leaves)
    assert not grads[unused].any()
    assert not grads[2 + unused].any()
    assert grads[1 - unused].any()
    assert grads[3 - unused].any()


def test_frozen_weights_and_frozen_inputs(where):
    inputs = {name: tensor.to(where.device) for name, tensor in make_inputs().items()}
    full = run(where, inputs)
    for frozen in ({"q_weight", "k_weight"}, {"q"}, {"k", "k_weight"}, {"q", "k"}):
        leaves = {name: inputs[name].detach().requires_grad_(name not in frozen) for name in NAMES}
        results = qk_norm_rope(**leaves, rotary=inputs["rotary"])
        generator = torch.Generator().manual_seed(1)
        sent = [torch.randn(r.shape, generator=generator).bfloat16().to(r) for r in results]
        torch.autograd.backward(results, sent)
        for name, leaf in leaves.items():
            assert (leaf.grad is None) == (name in frozen)
            if leaf.grad is not None:
                assert torch.equal(leaf.grad, full[f"d{name}"]), name


def test_fillers_stay_finite_and_nan_stays_in_its_row(where):
    """Rows of zeros: the norm is 1 / sqrt(eps) = 1000, the result zero, the gradient finite."""
    inputs = make_inputs(8)
    inputs["q"][2] = 0
    inputs["k"][5] = torch.nan
    got = run(where, inputs)
    assert not got["q_out"][2].any()
    assert all(got[name].isfinite().all() for name in ("q_out", "dq", "dq_weight"))
    for name in ("k_out", "dk"):
        assert got[name].isnan().flatten(1).all(1).tolist() == [row == 5 for row in range(8)], name
    assert got["dk_weight"].isnan().all()  # it did reach the sum


def test_rotation_keeps_norms_and_row_of_ones_leaves_a_token_alone(where):
    inputs = make_inputs(6)
    inputs["rotary"][0] = 1
    turned, _ = qk_norm_rope(*(inputs[name].to(where.device) for name in (*NAMES, "rotary")))
    plain, _ = qk_norm_rope(*(inputs[name].to(where.device) for name in NAMES))
    assert torch.equal(turned[0], plain[0])
    assert not torch.allclose(turned[1], plain[1])
    torch.testing.assert_close(turned.norm(dim=-1), plain.norm(dim=-1), rtol=1e-6, atol=0)


def test_rotation_and_its_inverse_cancel():
    inputs = make_inputs(6)
    turns = torch.view_as_real(inputs["rotary"])
    again = rotate(rotate(inputs["q"], turns), turns, is_inverse=True)
    torch.testing.assert_close(again, inputs["q"], rtol=0, atol=3e-6)  # four roundings of numbers up to 10


@pytest.mark.parametrize("per_head", [False, True], ids=["all_heads", "per_head"])
def test_runs_are_bitwise_equal(where, per_head):
    inputs = make_inputs(100, per_head=per_head, dtype=BF16)
    first, second = run(where, inputs), run(where, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradcheck_in_float64():
    for per_head in (False, True):
        inputs = make_inputs(4, head_dim=6, per_head=per_head)
        rotary = inputs["rotary"][:2].to(torch.complex128)
        rotary /= rotary.abs()
        leaves = [inputs[name].double().requires_grad_() for name in NAMES]
        assert torch.autograd.gradcheck(lambda *tensors, r=rotary: qk_norm_rope(*tensors, r), leaves)


def test_opcheck():
    operator = torch.ops.adaptiveload.qk_norm_rope.default
    for per_head in (False, True):
        inputs = make_inputs(num_keys=None, head_dim=8, per_head=per_head)
        leaves = [inputs[name].requires_grad_() for name in NAMES]
        torch.library.opcheck(operator, (*leaves, torch.view_as_real(inputs["rotary"]), EPS))
    qkv = torch.randn(5, 3, 2, 8, dtype=BF16, requires_grad=True)
    q, k, _ = qkv.unbind(1)
    torch.library.opcheck(operator, (q, k, torch.ones(16), torch.ones(16), None, EPS))


def block(q, k, q_weight, k_weight, rotary):
    q, k = qk_norm_rope(torch.sin(q), k, q_weight, k_weight, rotary)
    return torch.relu(q) + k


def test_compiles_into_one_graph_and_is_recomputed_to_the_same_bits(where):
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (9, 17):
        inputs = make_inputs(num_tokens)
        leaves = [inputs[name].to(where.device).requires_grad_() for name in NAMES]
        rotary = inputs["rotary"].to(where.device)
        eager = block(*leaves, rotary)
        wanted = torch.autograd.grad(eager.square().sum(), leaves)
        again = checkpoint(block, *leaves, rotary, use_reentrant=False)
        for result in (compiled(*leaves, rotary), again):
            assert torch.equal(result, eager)
            grads = torch.autograd.grad(result.square().sum(), leaves)
            assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_second_derivative_is_refused():
    inputs = make_inputs(head_dim=8)
    leaves = [inputs[name].requires_grad_() for name in NAMES]
    q, _ = qk_norm_rope(*leaves)
    (grad,) = torch.autograd.grad(q.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(9, 128)}, r"must be \[N, H, hd\] and \[M, H, hd\], got \[9, 128\]"),
        ({"k": torch.zeros(9, 4, 32)}, r"got \[9, 2, 64\] and \[9, 4, 32\]"),
        ({"k": torch.zeros(9, 2, 64, dtype=BF16)}, "k is torch.bfloat16, q torch.float32"),
        ({"k": torch.zeros(9, 2, 64, device="meta")}, "k is on meta, q on cpu"),
        ({"q_weight": torch.ones(32), "k_weight": torch.ones(32)}, r"both be \[64\] \(each head\) or \[128\]"),
        ({"k_weight": torch.ones(64)}, r"got \[128\] and \[64\]"),
        ({"q_weight": torch.ones(128, dtype=torch.int32)}, "q_weight is torch.int32"),
        ({"rotary": torch.ones(9, 64)}, "rotary is torch.float32; it must be complex64"),
        ({"rotary": torch.ones(9, 64, dtype=torch.complex64)}, r"rotary must be \[R, hd / 2\] .* got \[9, 64\]"),
        ({"rotary": torch.ones(4, 32, dtype=torch.complex64)}, "q has 9 tokens, not a multiple of the 4 rows"),
    ],
)
def test_wrong_input_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(**(make_inputs() | changes))


# ---- full sizes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with backends.use(Extension(LIBRARY)):
        yield Where("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_heads", "head_dim"), [(12, 128), (24, 128), (40, 128), (24, 64), (80, 64), (16, 96), (53, 96), (48, 128)]
)
@pytest.mark.parametrize("per_head", [False, True], ids=["all_heads", "per_head"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_widths_of_released_models(on_gpu, num_heads, head_dim, per_head, dtype):
    inputs = make_inputs(3001, num_heads=num_heads, head_dim=head_dim, per_head=per_head, dtype=dtype)
    assert_matches(run(on_gpu, inputs), inputs)


@pytest.mark.gpu
def test_cross_attention_of_a_long_clip(on_gpu):
    inputs = make_inputs(32760, 512, num_heads=12, head_dim=128, rotary=False, dtype=BF16)
    assert_matches(run(on_gpu, inputs), inputs)


@pytest.mark.gpu
def test_more_than_32_bits_of_elements(on_gpu):
    """Views of a qkv tensor of 3.2e9 elements; the last rows are those of a small call."""
    num_tokens = 210_000
    qkv = torch.zeros(num_tokens, 3, 40, 128, dtype=BF16, device="cuda")
    qkv[-9:] = torch.randn(9, 3, 40, 128, device="cuda").bfloat16()
    weight = torch.rand(5120, device="cuda")
    q, k, _ = qkv.unbind(1)
    with torch.no_grad():
        results = qk_norm_rope(q, k, weight, weight)
        wanted = qk_norm_rope(q[-9:].contiguous(), k[-9:].contiguous(), weight, weight)
    for result, right in zip(results, wanted, strict=True):
        assert torch.equal(result[-9:], right)
        assert not result[: num_tokens // 2].any()


@pytest.mark.gpu
def test_cuda_graph_and_side_streams(on_gpu):
    inputs = make_inputs(500, num_heads=12, head_dim=128, dtype=BF16)
    leaves = [inputs[name].cuda().requires_grad_() for name in NAMES]
    rotary, sent = inputs["rotary"].cuda(), torch.randn(500, 12, 128, device="cuda").bfloat16()

    def step():
        return torch.autograd.grad(qk_norm_rope(*leaves, rotary), leaves, (sent, sent))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = step()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        leaves[0].normal_()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        assert torch.equal(a, b)
