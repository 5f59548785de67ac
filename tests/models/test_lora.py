"""Adapters against peft and diffusers: outputs, the file, merging; which layers they go to; what they leave alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from adaptiveload.models.flow_matching import timesteps
from adaptiveload.models.frozen import freeze
from adaptiveload.models.layers import sinusoid
from adaptiveload.models.lora import (
    LORA_FILE,
    LoraConfig,
    adapter_parameters,
    add_adapters,
    draw_adapters,
    merged,
    own_parameters,
    save_adapters,
    target_layers,
)
from adaptiveload.models.mmdit import VideoMMDiT
from adaptiveload.models.packing import pack, patchify, unpatchify

# Sums in another order, twice over: the base's and the adapter's.
TOLERANCE = 1e-5
KINDS = ("wan", "mmdit")
CONFIG = {"rank": 3, "alpha": 6.0}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def make(kind: str, make_wan, make_mmdit):
    return make_wan if kind == "wan" else make_mmdit


def adapted(model: nn.Module, config: LoraConfig) -> nn.Module:
    """With adapters that are not zero."""
    add_adapters(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.normal_(std=0.2)
    return model


def diffusers_model(model: nn.Module) -> nn.Module:
    """diffusers' own of the same sizes and weights."""
    import diffusers

    theirs = getattr(diffusers, model.config.diffusers_class)(**model.config.to_diffusers())
    theirs.load_state_dict({name: p.detach() for name, p in model.diffusers_parameters().items()})
    if isinstance(model, VideoMMDiT):
        theirs.time_text_embed.time_proj = PreciseSinusoid()
    return theirs.eval()


class PreciseSinusoid(nn.Module):
    """In float64, as ours: diffusers' angle 1000 * t is off by up to 1e-4 (test_mmdit.py)."""

    def forward(self, timestep: torch.Tensor) -> torch.Tensor:
        return sinusoid(1000 * timestep, 256)


def run_ours(model: nn.Module, sample) -> torch.Tensor:
    batch = pack([sample])
    with torch.no_grad():
        return model(batch.latents, timesteps(batch), batch)


def run_theirs(model: nn.Module, sample, text_len: int) -> torch.Tensor:
    """Velocity of `sample` by diffusers, as our tokens [S, token_size]."""
    with torch.no_grad():
        if type(model).__name__ == "WanTransformer3DModel":
            text = torch.zeros(1, text_len, sample.text.shape[1])
            text[0, : len(sample.text)] = sample.text
            latents = unpatchify(sample.latents, sample.grid, (1, 2, 2)).unsqueeze(0)
            timestep = torch.tensor([1000 * sample.sigma])
            return patchify(model(latents, timestep, text, return_dict=False)[0][0], (1, 2, 2))
        return model(
            sample.latents.unsqueeze(0),
            encoder_hidden_states=sample.text.unsqueeze(0),
            encoder_hidden_states_mask=torch.ones(1, len(sample.text), dtype=torch.bool),
            timestep=torch.tensor([sample.sigma]),
            img_shapes=[[sample.grid]],
            return_dict=False,
        )[0][0]


@pytest.mark.parametrize("targets", [["attention"], ["attention+ffn"], ["all-linear"], ["to_q", "proj_out"]])
def test_adapters_merged_in_peft_and_in_diffusers_say_the_same(make, samples, tmp_path: Path, targets) -> None:
    config = LoraConfig(**CONFIG, targets=targets)
    plain, sample = make(), samples[1]
    before = run_ours(plain, sample)
    theirs = diffusers_model(plain)
    model = adapted(make(), config)
    active = run_ours(model, sample)
    assert (active - before).abs().max() > 100 * TOLERANCE, "the adapters must do something"

    # By diffusers, from the file.
    adapters = {name: p.detach() for name, p in adapter_parameters(model).items()}
    save_adapters(tmp_path, adapters, config.scale)
    theirs.load_lora_adapter(str(tmp_path), weight_name=LORA_FILE, prefix="transformer")
    text_len = plain.config.text_len
    torch.testing.assert_close(run_theirs(theirs, sample, text_len), active, rtol=0, atol=TOLERANCE)
    theirs.fuse_lora()
    torch.testing.assert_close(run_theirs(theirs, sample, text_len), active, rtol=0, atol=TOLERANCE)

    # Merged, by us and by peft.
    own = own_parameters(plain)
    for name in adapters:
        if ".lora_A." in name:
            layer = name.removesuffix("lora_A.weight")
            weight = own[f"{layer}weight"]
            weight.data = merged(weight.detach(), adapters[name], adapters[f"{layer}lora_B.weight"], config.scale)
    torch.testing.assert_close(run_ours(plain, sample), active, rtol=0, atol=TOLERANCE)
    for module in model.modules():
        if hasattr(module, "merge") and hasattr(module, "lora_A"):
            module.merge()
    torch.testing.assert_close(run_ours(model, sample), active, rtol=0, atol=TOLERANCE)


def test_pipelines_load_the_file(kind, make, samples, tmp_path: Path) -> None:
    import diffusers

    config = LoraConfig(**CONFIG)
    model = adapted(make(), config)
    save_adapters(tmp_path, {name: p.detach() for name, p in adapter_parameters(model).items()}, config.scale)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    parts = {"vae": None, "text_encoder": None, "tokenizer": None, "scheduler": scheduler}
    cls = diffusers.WanPipeline if kind == "wan" else diffusers.QwenImagePipeline
    pipeline = cls(transformer=diffusers_model(make()), **parts)
    pipeline.load_lora_weights(str(tmp_path))
    found = run_theirs(pipeline.transformer, samples[1], model.config.text_len)
    torch.testing.assert_close(found, run_ours(model, samples[1]), rtol=0, atol=TOLERANCE)
    with pytest.raises(ValueError, match="exists"):
        save_adapters(tmp_path, {}, 1.0)


def test_the_file_has_the_names_of_diffusers_and_needs_no_alpha(make, tmp_path: Path) -> None:
    model = adapted(make(), LoraConfig(**CONFIG))
    adapters = {name: p.detach() for name, p in adapter_parameters(model).items()}
    stored = load_file(save_adapters(tmp_path, adapters, 2.0))
    assert set(stored) == {f"transformer.{name}" for name in adapters}
    assert all("default" not in name and "base_layer" not in name for name in stored)
    for name, tensor in adapters.items():
        assert torch.equal(stored[f"transformer.{name}"], tensor * (2 if "lora_B" in name else 1)), name


def test_new_adapters_change_nothing_and_only_they_are_trained(make, samples) -> None:
    plain, model = make(), make()
    add_adapters(model, LoraConfig(rank=2))
    draw_adapters(model)
    assert torch.equal(run_ours(model, samples[1]), run_ours(plain, samples[1]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in trained if ".lora_" in name}
    assert len(trained) == len(adapter_parameters(model))
    assert set(own_parameters(model)) == {name for name, _ in plain.named_parameters()}
    assert all((p != 0).all() for name, p in adapter_parameters(model).items() if "lora_A" in name)


def test_presets_and_patterns(make_wan, make_mmdit) -> None:
    wan, mmdit = make_wan(), make_mmdit()
    attention = target_layers(wan, ["attention"])
    parts = [f"{attn}.{part}" for attn in ("attn1", "attn2") for part in ("to_q", "to_k", "to_v", "to_out.0")]
    assert attention == [f"blocks.{i}.{part}" for i in range(2) for part in parts]
    ffn = [f"blocks.{i}.ffn.net.{part}" for i in range(2) for part in ("0.proj", "2")]
    assert set(target_layers(wan, ["attention+ffn"])) == {*attention, *ffn}
    everything = {name for name, module in wan.named_modules() if isinstance(module, nn.Linear)}
    assert set(target_layers(wan, ["all-linear"])) == everything
    assert len(everything) == 2 * 10 + 2 + 1 + 2 + 1
    assert target_layers(wan, ["blocks.1.*.to_q", "attn2.to_k"]) == [
        "blocks.0.attn2.to_k", "blocks.1.attn1.to_q", "blocks.1.attn2.to_q", "blocks.1.attn2.to_k",
    ]  # fmt: skip
    assert len(target_layers(mmdit, ["attention"])) == 3 * 8
    assert len(target_layers(mmdit, ["attention+ffn"])) == 3 * 12
    with pytest.raises(ValueError, match=r"lora\.targets: 'attn3' is no preset \(attention, .*matches none of the 26"):
        target_layers(wan, ["attention", "attn3"])


def test_trainable_and_frozen_patterns(make_wan) -> None:
    def trained(trainable, frozen=(), lora: bool = False) -> set[str]:
        model = make_wan()
        if lora:
            add_adapters(model, LoraConfig(rank=2, targets=["blocks.0.attn1.to_q"]))
        freeze(model, trainable, frozen)
        return {name for name, p in model.diffusers_parameters().items() if p.requires_grad}

    everything = trained(None)
    assert trained(None, ["blocks.*.attn1"]) == {name for name in everything if ".attn1." not in name}
    assert trained(["blocks.1", "proj_out"]) == {n for n in everything if n.startswith(("blocks.1.", "proj_out."))}
    assert trained(["*.bias"], ["blocks"]) == {n for n in everything if n.endswith(".bias") and "blocks" not in n}
    assert trained(["scale_shift_table", "blocks.*.scale_shift_table"]) == {n for n in everything if "table" in n}
    assert trained(None, lora=True) == set()
    assert trained(["blocks.*.attn1"], lora=True) == {n for n in everything if ".attn1." in n}
    for trainable, frozen, message in (
        (["block.1"], [], r"model\.trainable: 'block\.1' matches none"),
        (None, ["proj_in"], r"model\.frozen: 'proj_in' matches none"),
        (["proj_out"], ["blocks"], r"model\.frozen: 'blocks' matches none of the 2"),
        ([], [], "leaves no parameter"),
        (None, ["*"], "leaves no parameter"),
    ):
        with pytest.raises(ValueError, match=message):
            trained(trainable, frozen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, r"lora\.rank=-1"),
        ({"rank": 2, "alpha": 0.0}, r"lora\.alpha=0\.0"),
        ({"rank": 2, "targets": []}, r"lora\.targets=\[\] with lora\.rank=2"),
    ],
)
def test_config_mistakes_are_named(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraConfig(**options).check()
