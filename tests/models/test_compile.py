"""Blocks under `torch.compile`: the numbers of eager ones, and a bounded number of compilations over many shapes."""

import random
from dataclasses import replace

import pytest
import torch

from adaptiveload.models.flow_matching import noisy_latents, timesteps, weighted_losses
from adaptiveload.models.layers import Block, compile_blocks
from adaptiveload.models.lora import LoraConfig, add_adapters, draw_adapters
from adaptiveload.models.packing import pack
from adaptiveload.training.compile_watch import CompileWatch


def draw_batches(config, make_samples, count: int = 8) -> list:
    """Micro-batches of 1 to 8 samples in many shapes, some with clean first frames; the last is one sample."""
    rng = random.Random(0)
    batches = []
    for index in range(count):
        grids = [tuple(rng.choice(range(1, most)) for most in (4, 5, 5)) for _ in range(rng.choice((2, 3, 5, 8)))]
        samples = make_samples(config, tuple(grids), seed=index)
        if index % 3 == 0:
            samples = [replace(sample, clean_frames=int(sample.grid[0] > 1)) for sample in samples]
        batches.append(pack(samples))
    return [*batches, pack(make_samples(config, ((2, 3, 2),)))]


def gradient(model, batch, recompute: str) -> torch.Tensor:
    model.zero_grad()
    weighted_losses(batch, model(noisy_latents(batch), timesteps(batch), batch, recompute=recompute)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", ["mmdit", "wan with adapters"])
def test_gradients_are_those_of_eager_blocks_and_few_graphs_serve_all_shapes(
    kind: str, make_wan, make_mmdit, config, sample_maker
) -> None:
    """Adapters and the weights under them are trained here, both at once."""
    # Tracing is what is tested; inductor's code takes half a minute (tests/end_to_end/test_compile.py).
    torch._dynamo.reset()
    plain, model = (make_mmdit(num_layers=2) if kind == "mmdit" else make_wan() for _ in range(2))
    for each in (plain, model) if "adapters" in kind else ():
        add_adapters(each, LoraConfig(rank=2, targets=["attention+ffn"]))
        torch.manual_seed(0)
        draw_adapters(each)
        each.requires_grad_()
    compile_blocks(model.fsdp_units()[1], backend="eager")
    watch = CompileWatch()
    counts = []
    for index, batch in enumerate(draw_batches(config, sample_maker)):
        recompute = ("none", "full", "attention")[index % 3]
        found, expected = gradient(model, batch, recompute), gradient(plain, batch, recompute)
        assert (found - expected).norm() <= 1e-6 * expected.norm()
        counts.append(watch.count)
    watch.close()
    assert watch.seconds > 0
    # All in the first two micro-batches (the second recomputes), and some for a single sample: measured 6 to 9.
    assert counts[1] == counts[-2], counts
    assert 0 < counts[-1] <= 14
    with torch.no_grad():
        model(noisy_latents(batch), timesteps(batch), batch)
    assert watch.count == counts[-1]


class Doubling(Block):
    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_the_fusion_that_gives_wrong_gradients_is_off_whatever_is_configured() -> None:
    """pytorch#193061. Looked at while inductor compiles, where the configuration asks for it."""
    block, seen = Doubling(), []
    compile_blocks([block])

    def look(_graph: torch.fx.Graph) -> None:
        seen.append(torch._inductor.config.triton.mix_order_reduction)

    with torch._inductor.config.patch({"triton.mix_order_reduction": True, "post_grad_custom_post_pass": look}):
        x = torch.ones(4, requires_grad=True)
        assert torch.equal(block(x, recompute="none"), 2 * torch.ones(4))
        assert torch._inductor.config.triton.mix_order_reduction
    assert seen
    assert not any(seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("recompute", ["none", "full", "attention"])
def test_inductor_gives_the_gradients_of_eager_on_cuda(make_wan, config, sample_maker, recompute: str) -> None:
    """Beyond 16k tokens, where torch 2.10 to 2.14 get chained modulated norms wrong (pytorch#193061)."""
    plain, model = make_wan().cuda(), make_wan().cuda()
    compile_blocks(model.fsdp_units()[1])
    batch = pack(sample_maker(config, ((4, 48, 48), (5, 48, 48)))).to(torch.device("cuda"))
    assert batch.num_tokens > 16_384
    found, expected = gradient(model, batch, recompute), gradient(plain, batch, recompute)
    # Float32, sums over 20,736 tokens in another order; a wrong gradient is off by its own size.
    assert (found - expected).norm() <= 1e-3 * expected.norm()
