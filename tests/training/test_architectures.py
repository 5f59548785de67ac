"""Two architectures, one configuration: which keys there are, and sizes, FLOPs and memory of every preset."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from adaptiveload.models.architectures import CONFIGS, VideoTransformer, new_transformer
from adaptiveload.models.mmdit import MMDiTConfig
from adaptiveload.models.packing import PackedSample, pack
from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.flops import MODELS
from adaptiveload.training.config import load_config, save_config
from adaptiveload.training.cost import model_dims

CONFIGS_DIR = Path(__file__).parent.parent.parent / "configs"
PRESETS = sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml"))
# Counted on diffusers' models on the meta device; a dual-stream block has 36 * D ** 2 weights.
PARAMETERS = {
    "wan_1_3b": 1_418_996_800,
    "wan_14b": 14_288_491_584,
    "wan2_2_ti2v_5b": 4_999_787_712,
    "mmdit_0_35b": 0.354e9,
    "mmdit_1_4b": 1.37e9,
    "mmdit_20b": 20_430_401_088,
}


@cache
def on_meta(name: str) -> VideoTransformer:
    """The preset's model without memory."""
    with torch.device("meta"):
        return new_transformer(load_config(CONFIGS_DIR / f"{name}.yaml").model)


def test_the_architecture_decides_which_keys_there_are(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {architecture: mmdit, num_layers: 2}\n")
    config = load_config(path, ["model.num_layers=3"])
    assert config.model == MMDiTConfig(num_layers=3)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    path.write_text("")
    assert load_config(path).model == WanConfig()
    assert isinstance(load_config(path, ["model.architecture=mmdit"]).model, MMDiTConfig)
    with pytest.raises(ValueError, match=r"unknown key `model\.ffn_dim`"):
        load_config(path, ["model.architecture=mmdit", "model.ffn_dim=8"])
    with pytest.raises(ValueError, match=r"model\.architecture='unet': use wan or mmdit"):
        load_config(path, ["model.architecture=unet"])
    with pytest.raises(ValueError, match="is not what WanConfig configures"):
        WanConfig(architecture="mmdit")
    assert {name: kind().architecture for name, kind in CONFIGS.items()} == {name: name for name in CONFIGS}


def test_presets_have_the_parameters_that_they_are_named_for() -> None:
    assert set(PARAMETERS) <= set(PRESETS)
    for name, expected in PARAMETERS.items():
        config = load_config(CONFIGS_DIR / f"{name}.yaml").model
        count = sum(parameter.numel() for parameter in on_meta(name).parameters())
        assert count == pytest.approx(expected, rel=0 if isinstance(expected, int) else 5e-3), name
        # Matrices alone: norms, biases, tables are left out.
        assert model_dims(config).num_parameters == pytest.approx(count, rel=2e-3), name
        if name in MODELS:
            assert model_dims(config) == MODELS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_flops_of_every_preset_are_those_that_torch_counts(name: str) -> None:
    """On the meta device at full size, one sample of three frames with a short text."""
    config = load_config(CONFIGS_DIR / f"{name}.yaml").model
    grid, text_len = (3, 10, 12), 7
    dims = model_dims(config)
    with torch.device("meta"):
        tokens = torch.zeros(360, dims.token_size)
        text = torch.zeros(text_len, config.text_dim)
    batch = pack([PackedSample("k", grid, tokens, tokens, 0.5, text)])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        on_meta(name)(batch.latents, torch.zeros(1, device="meta"), batch)
    assert counter.get_total_flops() == pytest.approx(dims.forward_flops(360, text_len), rel=1e-6)
    assert dims.train_flops(360, text_len) == 3 * dims.forward_flops(360, text_len)


def test_memory_of_a_token_is_what_backward_keeps() -> None:
    """Saved tensors of one block more, weights left out, all but the fp32 parts in bf16; 36 tokens, 20 text rows."""
    kept = []
    for num_layers in (3, 4):
        config = MMDiTConfig(num_attention_heads=2, num_layers=num_layers, text_dim=16)
        model = new_transformer(config)
        for module in (model.img_in, model.txt_in, model.txt_norm, model.transformer_blocks):
            module.bfloat16()
        tokens = torch.randn(360, 64)
        batch = pack([PackedSample("k", (3, 10, 12), tokens, tokens, 0.5, torch.randn(200, 16))])
        storages = {}

        def note(tensor: torch.Tensor, storages=storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            velocity = model(batch.latents, torch.tensor([500.0]), batch)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept.append(sum(size for place, size in storages.items() if place not in weights))
        del velocity
    assert kept[1] - kept[0] == pytest.approx(model_dims(config).block_token_bytes * 560, rel=0.02)
