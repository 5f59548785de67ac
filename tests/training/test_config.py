"""Configuration: bad keys and values are refused in words; what was used is saved."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from adaptiveload.scheduling.policies import ScheduleConfig
from adaptiveload.training.config import load_config, save_config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.lrr=1", "unknown key `optimizer.lrr`; the nearest key is `optimizer.lr`"),
        ("sed=3", "the nearest key is `seed`"),
        ("schedule.memory_limit_token=1", "the nearest key is `schedule.memory_limit_tokens`"),
        ("optimizer.lr=abc", "optimizer.lr: Value 'abc' of type 'str' could not be converted to Float"),
        ("max_steps=1e6", "max_steps: Value '1000000.0' of type 'float' could not be converted to Integer"),
        ("max_steps=None", "max_steps: Value 'None'"),
        ("precision=no", "use bf16 or fp32"),
        ("precision=fp16", "use bf16 or fp32"),
        ("optimizer=1", "`optimizer` is a group of keys"),
        ("model.patch_size.0=2", "a list is replaced whole"),
        ("seed", "write key=value"),
        ("--seed=3", "write key=value"),
        ("model.frozen=[*.bias]", "perhaps the shell took the quotes away: 'model.frozen="),
        ("data.held_out_share=1.5", "data.held_out_share=1.5"),
        ("num-workers=2", "unknown key `num-workers`; the nearest key is `data.num_workers`"),
        ("max_steps=-5", "max_steps=-5 must be at least 1"),
        ("name=..", "name='..' must be a folder name"),
        ("seed=-1", "seed=-1 must be at least 0"),
        ("data.mode=streams", "data.mode='streams': use index or stream; the nearest is stream"),
        ("cost.gpu=h2000", "cost.gpu='h2000': use auto, h200, h100, a100, l40s or cpu; the nearest is h200"),
        ("schedule.policy=balancd", "schedule.policy='balancd': use balanced, "),
        ("schedule.policy=balancd", "the nearest is balanced"),
        ("schedule.policy=local", "schedule.policy='local' needs data.mode=stream"),
        ("schedule.meet=slots", "schedule.meet='slots': use auto, slot or step; the nearest is slot"),
        ("schedule.rank_speed=of", "schedule.rank_speed='of': use auto or off; the nearest is off"),
        ("schedule.rank_speed=off", "quote it: an unquoted on, off, yes or no is a bool in YAML"),
        ("schedule.recompute=half", "schedule.recompute='half': use none, full or auto"),
        ("schedule.lookahead=abc", "schedule.lookahead='abc'"),
        ("schedule.lookahead=0", "schedule.lookahead='0'"),
        ("schedule.samples_per_step=-5", "schedule.samples_per_step=-5 must be at least 1"),
        ("schedule.memory_limit_tokens=0", "schedule.memory_limit_tokens=0 must be at least 1"),
        ("schedule.max_samples_per_micro_batch=0", "schedule.max_samples_per_micro_batch=0"),
        ("schedule.slots_per_step=0", "schedule.slots_per_step=0"),
        ("schedule.shard_ranks=-1", "schedule.shard_ranks=-1"),
        ("schedule.order_block_size=0", "schedule.order_block_size=0"),
        ("schedule.kept_tokens=-1", "schedule.kept_tokens=-1"),
        ("schedule.compute_limit_factor=-1", "schedule.compute_limit_factor=-1.0 must be a positive number"),
        ("schedule.cost_exponent=.inf", "schedule.cost_exponent=inf"),
        ("schedule.loss_weight_exponent=.nan", "schedule.loss_weight_exponent=nan"),
        ("optimizer.beta1=1", "optimizer.beta1"),
        ("ema.decay=1", "ema.decay"),
        ("checkpoint.keep=0", "checkpoint.keep"),
        ("tracking.wandb=yes", "tracking.wandb"),
        ("tracking.finish_timeout_s=0", "tracking.finish_timeout_s=0"),
        ("tracking.init_timeout_s=.nan", "tracking.init_timeout_s=nan"),
        ("optimizer.max_skipped_in_a_row=-1", "optimizer.max_skipped_in_a_row"),
        ("lora.rank=-2", "lora.rank=-2"),
        ("lora.targets=attention", "lora.targets: "),
        ("lora.targets=[to_q]", "lora.targets=['to_q'], but lora.rank=0"),
        ("lora.alpha=8", "lora.alpha=8.0, lora.targets=['attention'], but lora.rank=0"),
        ("lora.rank=4", "need model.pretrained"),
        ("model.frozen=[blocks]", "need model.pretrained"),
        ("compile=maybe", "compile: Value 'maybe'"),
    ],
)
def test_bad_override_names_key_and_reason(override: str, expected: str) -> None:
    """Before any model or data is loaded (case c55)."""
    with pytest.raises(ValueError, match=re.escape(expected)):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["profile.steps=[1,2]", "profile.ranks=[]"], "profile.ranks=[]"),
        (["schedule.recompute=auto", "schedule.kept_tokens=9", "schedule.most_tokens=9"], "schedule.kept_tokens=9"),
        (["data.mode=stream", "data.held_out_share=0"], "schedule.policy='balanced' needs an index"),
        (["data.mode=stream", "data.held_out_share=0", "schedule.policy=local", "schedule.slots_per_step=0"], "slots"),
    ],
)
def test_values_that_do_not_go_together_are_named(overrides: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        load_config(None, overrides)


def test_every_number_of_a_schedule_is_checked() -> None:
    """A new key must get its range too."""
    for key in fields(ScheduleConfig):
        if key.type in ("int", "float", int, float) or "None" in str(key.type):
            with pytest.raises(ValueError, match=rf"schedule\.{key.name}"):
                replace(ScheduleConfig(), **{key.name: -math.inf}).check()


def test_bad_key_in_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optimizer:\n  learning_rate: 1.0e-4\n")
    with pytest.raises(ValueError, match=r"run\.yaml: unknown key `optimizer\.learning_rate`"):
        load_config(path)
    with pytest.raises(ValueError, match="no such configuration file"):
        load_config(tmp_path / "none.yaml")
    path.write_text("a: [1, 2")
    with pytest.raises(ValueError, match=r"run\.yaml cannot be read: "):
        load_config(path)
    path.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="mapping"):
        load_config(path)


def test_command_line_wins_over_file_and_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 5\nmax_steps: 7\n")
    config = load_config(path, ["max_steps=9"])
    assert (config.seed, config.max_steps, config.optimizer.beta2) == (5, 9, 0.95)
    assert config.schedule.seed == 5, "the order's seed follows the run's"
    assert load_config(path, ["schedule.seed=6"]).schedule.seed == 6


def test_saved_configuration_loads_equal(tmp_path: Path) -> None:
    config = load_config(None, ["seed=3", "model.num_layers=2"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_what_is_trained_is_told_in_words() -> None:
    def told(*keys: str) -> str:
        return load_config(None, ["model.pretrained=folder", *keys]).describe_trained()

    assert told() == "all"
    assert told("lora.rank=4") == "adapters of rank 4 on attention"
    assert told("model.frozen=[blocks]") == "trainable all; frozen ['blocks']"
    assert told("lora.rank=4", "model.trainable=[proj_out]") == (
        "adapters of rank 4 on attention; trainable ['proj_out']"
    )
