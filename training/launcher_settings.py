"""What the user's accelerate config says of the model's layout: followed where the run has such a thing, else refused.

`accelerate launch` hands the keys of its config on as environment variables. The run does not take them from there, it
has keys of its own, so the two must say the same: a key that is not followed stops the run in words.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from adaptiveload.scheduling.policies import num_replicas

if TYPE_CHECKING:
    from adaptiveload.training.config import RunConfig


class _Rule(NamedTuple):
    """A key of the accelerate config, the variable that it comes as, what the run does, and the way out."""

    key: str
    variable: str
    accepted: tuple[str, ...]
    remedy: str


def follow_launcher(config: "RunConfig", environment: Mapping[str, str], world_size: int) -> "RunConfig":
    """`config` as the accelerate config wants it: `schedule.meet: auto` follows `fsdp_reshard_after_forward`.

    Raises:
        ValueError: For a key that the run does not follow, naming it, its value and what to set instead.
    """
    uses_fsdp = environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    reshard = environment.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() if uses_fsdp else ""
    if config.schedule.meet == "auto" and reshard in ("true", "false"):
        config = replace(config, schedule=replace(config.schedule, meet="slot" if reshard == "true" else "step"))
    rules = _rules(config)
    if uses_fsdp:
        rules += _fsdp_rules(config)
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        rules += _parallelism_rules(config, world_size)
    for rule in rules:
        value = environment.get(rule.variable)
        if value is not None and value.lower() not in rule.accepted:
            raise ValueError(f"the accelerate config has {rule.key}: {value}, which the run does not do: {rule.remedy}")
    return config


def _rules(config: "RunConfig") -> list[_Rule]:
    is_bf16 = config.precision == "bf16"
    own = "set distributed_type: MULTI_GPU (or FSDP), the run shards the model itself"
    return [
        _Rule(
            "mixed_precision",
            "ACCELERATE_MIXED_PRECISION",
            ("no", "bf16") if is_bf16 else ("no",),  # "no" is what accelerate says for nothing
            f"precision={config.precision} decides, module by module, and goes with {'bf16' if is_bf16 else 'no'}",
        ),
        _Rule(
            "dynamo_backend",
            "ACCELERATE_DYNAMO_BACKEND",
            ("no", "inductor") if config.compile else ("no",),
            "compile=true goes with INDUCTOR, compile=false with NO",
        ),
        _Rule("distributed_type", "ACCELERATE_USE_DEEPSPEED", ("false",), own),
        _Rule("distributed_type", "ACCELERATE_USE_MEGATRON_LM", ("false",), own),
    ]


def _fsdp_rules(config: "RunConfig") -> list[_Rule]:
    reshards, recomputes = config.schedule.meet == "slot", config.schedule.recompute != "none"
    strategies = ("full_shard", "1", *(("hybrid_shard", "4") if config.schedule.shard_ranks else ()))
    blocks = {"wan": ("wantransformerblock", "wanblock"), "mmdit": ("qwenimagetransformerblock", "mmditblock")}
    rules = {
        "version": (("2",), "it shards with FSDP2: set fsdp_version: 2"),
        "reshard_after_forward": (
            (str(reshards).lower(),),
            f"schedule.meet={config.schedule.meet} decides; true goes with slot, false with step",
        ),
        "sharding_strategy": (strategies, "FULL_SHARD, or HYBRID_SHARD with schedule.shard_ranks"),
        "offload_params": (("false",), "set false, and train on more ranks or with schedule.recompute=full"),
        "activation_checkpointing": (
            (str(recomputes).lower(),),
            f"schedule.recompute={config.schedule.recompute} decides; true goes with full or auto, false with none",
        ),
        "activation_checkpointing_offload": (("false",), "set false"),
        "auto_wrap_policy": (
            ("transformer_based_wrap",),
            "every block is a unit: set TRANSFORMER_BASED_WRAP, or leave it out",
        ),
        "transformer_cls_to_wrap": (
            blocks[config.model.architecture],
            "every block is a unit: leave fsdp_transformer_layer_cls_to_wrap out",
        ),
        "state_dict_type": (
            ("sharded_state_dict",),
            "checkpoints are sharded: set SHARDED_STATE_DICT; scripts.export writes whole weights",
        ),
        "backward_prefetch": (
            ("backward_pre",),
            "FSDP2 gathers the next block during the backward of one: leave it out",
        ),
        "forward_prefetch": (("false",), "set false: the host runs ahead of the GPU and gathers early by itself"),
        "use_orig_params": (("true",), "FSDP2 keeps the parameters as they are: set true"),
        "ignored_modules": ((), "all of the model is sharded: leave it out, and freeze by model.frozen"),
        # No rank ever holds the whole model, and all have the same weights: what these two are for is so always.
        "cpu_ram_efficient_loading": (("true", "false"), ""),
        "sync_module_states": (("true", "false"), ""),
    }
    return [_Rule(f"fsdp_{name}", f"FSDP_{name.upper()}", *rule) for name, rule in rules.items()]


def _parallelism_rules(config: "RunConfig", world_size: int) -> list[_Rule]:
    replicas = num_replicas(config.schedule.shard_ranks, world_size)
    shard = world_size // replicas
    sizes = {"dp_replicate": replicas, "dp_shard": shard, "tp": 1, "cp": 1, "sp": 1}
    remedy = f"schedule.shard_ranks={config.schedule.shard_ranks} makes {replicas} copies, each on {shard} ranks"
    return [
        _Rule(
            f"parallelism_config_{name}_size",
            f"PARALLELISM_CONFIG_{name.upper()}_SIZE",
            (str(size),),
            remedy if name.startswith("dp") else "set 1: a sample is never spread over ranks",
        )
        for name, size in sizes.items()
    ]
