"""Learning rate, decay groups, fp32 masters, and the weights' average."""

import pytest
import torch
from torch import nn

from adaptiveload.models.wan import WanConfig, WanTransformer
from adaptiveload.training.ema import Ema, EmaConfig
from adaptiveload.training.optimizer import OptimizerConfig, build_optimizer, learning_rate

TINY = WanConfig(
    num_attention_heads=2, attention_head_dim=12, ffn_dim=32, num_layers=1, text_dim=8, text_len=4, freq_dim=8
)


def test_warm_up_warms_up_and_depends_on_the_step_alone() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=0), 0) == 1.0


def test_decay_spares_norms_biases_tables_and_embeddings() -> None:
    model = WanTransformer(TINY)
    optimizer = build_optimizer(model, OptimizerConfig())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert len(decayed) + len(kept) == len(names)
    assert all(name.endswith("weight") and "norm" not in name for name in decayed)
    assert any("attn1.to_q" in name for name in decayed)
    assert any("modulation" in name for name in kept)
    assert any("patch_embedding" in name for name in kept)


def test_bf16_masters_are_refused() -> None:
    model = WanTransformer(TINY).bfloat16()
    with pytest.raises(ValueError, match="must be float32"):
        build_optimizer(model, OptimizerConfig())


def test_ema_warms_up_and_stays_fp32() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    ema = Ema(model, EmaConfig(decay=0.5))
    expected = 0.0
    for step in range(20):
        nn.init.constant_(model.weight, float(step + 1))
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * (step + 1)
    assert ema.shadow["weight"].dtype == torch.float32
    torch.testing.assert_close(ema.shadow["weight"], torch.full((1, 2), expected))


def test_swapped_in_swaps_back_even_after_an_error() -> None:
    model = nn.Linear(2, 1, bias=False)
    ema = Ema(model, EmaConfig())
    own = model.weight.detach().clone()
    nn.init.constant_(model.weight, 7.0)
    seen = []

    def use_and_fail() -> None:
        with ema.swapped_in():
            seen.append(model.weight.detach().clone())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        use_and_fail()
    assert torch.equal(seen[0], own)
    assert torch.equal(model.weight, torch.full((1, 2), 7.0))
    assert torch.equal(ema.shadow["weight"], own)
