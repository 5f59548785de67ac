"""AdaLN as an operator: what PyTorch asks of one (case c48), and what it keeps for backward."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from adaptiveload.kernels.adaln import adaln, layer_norm_modulate
from tests.kernels.test_adaln import make_inputs
from tests.kernels.test_extension import ALL, GATED, MODULATED

SITES = [(), MODULATED, ("y", *MODULATED), GATED, ("y", "weight", "bias"), ALL]


def leaves_of(inputs: dict, names, device: str = "cpu") -> tuple[dict, torch.Tensor]:
    leaves = {name: inputs[name].detach().to(device).requires_grad_() for name in ("x", *names)}
    return leaves, inputs["segment_offsets"]


@pytest.mark.parametrize("names", SITES, ids=lambda names: "+".join(names) or "plain")
def test_opcheck(names):
    """Schema, fake tensors, autograd and tracing as PyTorch wants them of an operator (case c48)."""
    leaves, offsets = leaves_of(make_inputs(hidden_size=16), names)
    given = [leaves.get(name) for name in ("x", *ALL)]
    torch.library.opcheck(torch.ops.adaptiveload.adaln.default, (*given, offsets, 1e-6, torch.float32))
    six = torch.randn(6, 6, 16, requires_grad=True)
    if "scale" in names:  # strided rows
        given[3] = six.unbind(1)[1]
        torch.library.opcheck(torch.ops.adaptiveload.adaln.default, (*given, offsets, 1e-6, torch.bfloat16))


def block(x, y, gate, scale, shift, segment_offsets):
    h, x = adaln(torch.sin(x), y=y, gate=gate, scale=scale, shift=shift, segment_offsets=segment_offsets)
    return torch.relu(h) + x


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiles_into_one_graph(kernels, backend):
    """Also with another number of tokens and segments; the numbers are those of eager (case c48)."""
    if backend == "inductor" and kernels.device == "cpu":
        pytest.skip("compiles C++")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for lengths in ([3, 3, 5], [4, 9], [7, 1, 1, 20]):
        leaves, offsets = leaves_of(make_inputs(lengths, hidden_size=64), GATED, kernels.device)
        results = [function(*leaves.values(), offsets) for function in (compiled, block)]
        torch.testing.assert_close(*results)
        grads = [torch.autograd.grad(result.square().sum(), list(leaves.values())) for result in results]
        torch.testing.assert_close(*grads)


def test_compiles_in_the_plain_form():
    torch._dynamo.reset()
    x, scale, shift = torch.randn(2, 17, 64), torch.randn(2, 64), torch.randn(2, 64)
    compiled = torch.compile(layer_norm_modulate, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, scale, shift), layer_norm_modulate(x, scale, shift))


def test_checkpoint_recomputes_the_same_bits(kernels):
    leaves, offsets = leaves_of(make_inputs(hidden_size=64), GATED, kernels.device)
    plain = torch.autograd.grad(block(*leaves.values(), offsets).sum(), list(leaves.values()))
    again = checkpoint(block, *leaves.values(), offsets, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(again.sum(), list(leaves.values())), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("policy", "num_runs"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)], ids=str
)
def test_selective_checkpoint_keeps_the_operator_or_runs_it_again(kernels, monkeypatch, policy, num_runs):
    """As its policy says, in the same bits."""
    leaves, offsets = leaves_of(make_inputs(hidden_size=64), GATED, kernels.device)
    plain = torch.autograd.grad(block(*leaves.values(), offsets).sum(), list(leaves.values()))
    forward, runs = kernels.extension.forward, []
    monkeypatch.setattr(kernels.extension, "forward", lambda *args: runs.append(1) or forward(*args))

    def decide(context, operator, *args, **kwargs):
        is_ours = operator is torch.ops.adaptiveload.adaln.default
        return policy if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, decide)
    again = checkpoint(block, *leaves.values(), offsets, use_reentrant=False, context_fn=contexts)
    for a, b in zip(plain, torch.autograd.grad(again.sum(), list(leaves.values())), strict=True):
        assert torch.equal(a, b)
    assert len(runs) == num_runs


def test_autocast_leaves_float32_modulation_alone(kernels):
    inputs = kernels.to(make_inputs(hidden_size=64))
    tiny = torch.full_like(inputs["scale"], 2**-10)  # 1 + 2**-10 is 1 in bfloat16
    with torch.autocast(kernels.device, torch.bfloat16):
        h, _ = adaln(inputs["x"], scale=tiny, segment_offsets=inputs["segment_offsets"])
    plain, _ = adaln(inputs["x"], segment_offsets=inputs["segment_offsets"])
    assert h.dtype == torch.float32
    torch.testing.assert_close(h, plain * (1 + 2**-10), rtol=1e-6, atol=0)


def test_gradients_accumulate_and_graphs_are_kept(kernels):
    leaves, offsets = leaves_of(make_inputs(hidden_size=64), GATED, kernels.device)
    result = block(*leaves.values(), offsets).sum()
    result.backward(retain_graph=True)
    first = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    result.backward()
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, 2 * first[name]), name


def test_second_derivative_is_refused():
    leaves, offsets = leaves_of(make_inputs(hidden_size=16), MODULATED)
    h, _ = adaln(**leaves, segment_offsets=offsets)
    (grad,) = torch.autograd.grad(h.square().sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def diffusers_form(x, scale, shift):
    """`WanTransformerBlock`: LayerNorm in float32, modulation, back to the dtype of x. One sample."""
    h = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=1e-6)
    return (h * (1 + scale) + shift).type_as(x)


def saved_bytes_and_nodes(function, x: torch.Tensor, linear: torch.nn.Linear) -> tuple[int, int]:
    """Bytes kept for backward of a norm and the linear layer behind it, parameters left out, and the norm's nodes."""
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.shape != linear.weight.T.shape:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        h = function(x)
        linear(h)
    nodes, queue = set(), [h.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in nodes and "AccumulateGrad" not in node.name():
            nodes.add(node)
            queue += [parent for parent, _ in node.next_functions]
    return sum(seen.values()), len(nodes)


def test_memory_kept_for_backward():
    """4.0 bytes an element where the diffusers form keeps 10: at 64,000 tokens of Wan 14B 2 GB a norm less.

    The paper speaks of 4.8 GB saved at 64,000 tokens. Counted, not measured: the same on every device.
    """
    num_tokens, hidden_size = 512, 1024
    x = torch.randn(num_tokens, hidden_size, dtype=torch.bfloat16, requires_grad=True)
    scale, shift = (torch.randn(1, hidden_size, requires_grad=True) for _ in range(2))
    linear = torch.nn.Linear(hidden_size, 8, dtype=torch.bfloat16)
    offsets = torch.tensor([0, num_tokens])
    ours, our_nodes = saved_bytes_and_nodes(
        lambda x: adaln(x, scale=scale, shift=shift, segment_offsets=offsets)[0], x, linear
    )
    theirs, their_nodes = saved_bytes_and_nodes(lambda x: diffusers_form(x, scale, shift), x, linear)
    assert ours / x.numel() <= 4.1
    assert theirs / x.numel() >= 9.9
    assert our_nodes == 1
    assert their_nodes >= 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": torch.zeros(6, 24, dtype=torch.int32)}, "scale is torch.int32; it must be float32"),
        ({"y": torch.zeros(22, 24, device="meta")}, "y is on meta, x on cpu"),
        ({"segment_offsets": torch.zeros(7, device="meta")}, r"segment_offsets must be a CPU tensor .* on meta"),
        (
            {"segment_offsets": torch.tensor([0, 9, 6, 7, 12, 17, 22])},
            r"\[0, 9, 6, 7, 12, 17, 22\] must rise",
        ),
        ({"segment_offsets": torch.tensor([1, 3, 6, 7, 12, 17, 22])}, "must rise from 0 and must end at 22"),
    ],
)
def test_wrong_input_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        adaln(**(make_inputs() | changes))


def test_wrong_plain_form_is_named():
    with pytest.raises(ValueError, match=r"scale must be .* got \[2, 24\]"):
        layer_norm_modulate(torch.zeros(3, 7, 24), torch.zeros(2, 24), torch.zeros(3, 24))
