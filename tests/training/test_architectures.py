"""Two architectures, one configuration: which keys there are, and sizes, FLOPs and memory of every preset."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from adaptiveload.models.architectures import CONFIGS, VideoTransformer, new_transformer
from adaptiveload.models.mmdit import MMDiTConfig
from adaptiveload.models.packing import PackedSample, pack
from adaptiveload.models.wan import WanConfig
from adaptiveload.scheduling.cost import analytic_prior
from adaptiveload.scheduling.flops import MODELS
from adaptiveload.scheduling.memory import memory_prior
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import POLICIES, build_policy
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.training.config import load_config, save_config
from adaptiveload.training.cost import RunModels, model_dims, resolve_memory
from adaptiveload.training.schedule import model_geometry

CONFIGS_DIR = Path(__file__).parent.parent.parent / "configs"
PRESETS = sorted(path.stem for path in CONFIGS_DIR.glob("*.yaml"))
# Counted on diffusers' models on the meta device; 0.35B and 1.4B on ours: a dual-stream block has 36 * D ** 2 weights.
PARAMETERS = {
    "wan_1_3b": 1_418_996_800,
    "wan_14b": 14_288_491_584,
    "wan2_2_ti2v_5b": 4_999_787_712,
    "mmdit_0_35b": 353_897_536,
    "mmdit_1_4b": 1_373_672_512,
    "mmdit_20b": 20_430_401_088,
}

# What mixes/mixed.yaml has no place for: frames, height, width and share.
SMALL_SHAPES = [(1, 96, 128, 0.5), (17, 96, 128, 0.3), (33, 96, 128, 0.2)]
CLIPS_480P = [(1, 480, 832, 0.2), (33, 480, 832, 0.4), (81, 480, 832, 0.4)]
OTHER_SHAPES = {
    "quickstart": SMALL_SHAPES,
    "loss_congruence": SMALL_SHAPES,
    "mmdit_tiny": SMALL_SHAPES,
    "wan_1_3b_lora": CLIPS_480P,  # as docs/finetune.md cuts
    "wan_14b": CLIPS_480P,
    "mmdit_20b": CLIPS_480P,
    "wan2_2_ti2v_5b": [(1, 704, 1280, 0.5), (49, 352, 640, 0.3), (121, 704, 1280, 0.2)],
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
        assert count == expected, name
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


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_plans_steps_of_a_mix(name: str, tmp_path: Path) -> None:
    """On eight H200s, by each policy: within memory, all samples there, text priced where it joins the sequence."""
    config = load_config(CONFIGS_DIR / f"{name}.yaml")
    mix = CONFIGS_DIR / "mixes" / "mixed.yaml"
    if name in OTHER_SHAPES:
        mix = tmp_path / "mix.yaml"
        rows = [dict(zip(("frames", "height", "width", "share"), row, strict=True)) for row in OTHER_SHAPES[name]]
        mix.write_text(yaml.safe_dump({"shapes": rows}))
    dims = model_dims(config.model)
    table = SampleTable.from_mix(mix, 20_000, 0, model_geometry(config.model))
    text_len = np.random.default_rng(0).integers(1, config.model.text_len + 1, len(table)).astype(np.int32)
    table = replace(table, text_len=text_len, text_joins=dims.text_joins)
    cost = analytic_prior(dims, "h200", config.schedule.recompute)
    level = config.schedule.recompute.replace("auto", "attention")
    memory, kept_memory = (memory_prior(dims, level, "slot", 8) for level in (level, "none"))
    models = RunModels(cost, memory, kept_memory, "", False)
    resolved = resolve_memory(config.schedule, models, 141_000_000_000)
    limit = config.schedule.memory_limit_tokens
    if level == "attention":
        assert resolved.kept_tokens < resolved.most_tokens
        assert limit <= resolved.most_tokens
    assert limit <= memory.max_tokens(141e9), "fits in a GPU, with what allocator and NCCL take"
    if config.schedule.recompute == "full":
        assert limit <= 0.7 * memory.max_tokens(141e9), "well below a prior that nothing has measured"
    for policy in POLICIES:
        settings = replace(resolved, policy=policy, seed=0, cost_exponent=1.45, compute_limit_factor=1.0)
        planner = build_policy(settings, table, EndlessOrder(np.arange(len(table)), 0), cost, 8, "slot")
        for step in (0, 7):
            plan = planner.plan(step)
            assert policy != "balanced" or plan.num_samples == config.schedule.samples_per_step
            for rank in range(8):
                for slot, members in enumerate(plan.micro_batches(rank)):
                    ids = plan.sample_ids[list(members)]
                    computed = table.num_tokens[ids] + (table.text_len[ids] if dims.text_joins else 0)
                    assert computed.sum() <= limit
                    share = plan.recomputed[slot][rank] if level == "attention" else 0  # else it is in the law
                    again = cost.again_us(computed).sum() * share // 1000
                    price = cost.micro_batch_us(cost.sample_us(computed, table.text_len[ids]).sum() + again)
                    assert plan.costs_us[slot][rank] == price


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
