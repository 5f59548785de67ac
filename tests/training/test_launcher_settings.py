"""Keys of the user's accelerate config, as accelerate itself hands them on: followed, or refused in words."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from adaptiveload.training.config import RunConfig
from adaptiveload.training.distributed import LaunchError, check_launch
from adaptiveload.training.launcher_settings import follow_launcher
from tests.launching import ROOT

FSDP = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "WanTransformerBlock",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_offload_params": False,
}


def environment_of(path: Path, *options: str) -> dict[str, str]:
    """What `accelerate launch` gives its processes."""
    args = launch_command_parser().parse_args(["--config_file", str(path), *options, "train.py"])
    args, _, _ = _validate_launch_command(args)
    if args.use_fsdp or args.multi_gpu:
        return prepare_multi_gpu_env(args)
    return prepare_simple_launcher_cmd_env(args)[1]


def fsdp_environment(tmp_path: Path, changed: dict, **top: object) -> dict[str, str]:
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": 8,
        "main_process_port": 0,
        "mixed_precision": "bf16",
        "fsdp_config": FSDP | changed,
    }
    path = tmp_path / "fsdp.yaml"
    path.write_text(yaml.safe_dump(content | top))
    return environment_of(path)


def run_with(**schedule: object) -> RunConfig:
    config = RunConfig()
    return replace(config, schedule=replace(config.schedule, **schedule))


def test_our_own_launch_files_contradict_no_run() -> None:
    paths = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
    assert {path.stem for path in paths} == {"1gpu", "1node", "cpu", "nodes"}
    for path in paths:
        environment = environment_of(path)
        for config in (RunConfig(), RunConfig(precision="fp32", compile=True), run_with(recompute="full")):
            assert follow_launcher(config, environment, 8) == config
    assert follow_launcher(RunConfig(), {}, 1) == RunConfig(), "without a launcher"


def test_meet_follows_reshard_after_forward(tmp_path: Path) -> None:
    for reshard, meet in ((True, "slot"), (False, "step")):
        environment = fsdp_environment(tmp_path, {"fsdp_reshard_after_forward": reshard})
        assert follow_launcher(RunConfig(), environment, 8).schedule.meet == meet
        assert follow_launcher(run_with(meet=meet), environment, 8) == run_with(meet=meet)


@pytest.mark.parametrize(
    ("changed", "schedule", "message"),
    [
        ({"fsdp_version": 1}, {}, "fsdp_version: 1, which the run does not do: it shards with FSDP2"),
        ({"fsdp_reshard_after_forward": False}, {"meet": "slot"}, "false.*schedule.meet=slot decides"),
        ({}, {"meet": "step"}, "fsdp_reshard_after_forward: true.*schedule.meet=step decides"),
        ({"fsdp_offload_params": True}, {}, "fsdp_offload_params: true.*set false"),
        ({"fsdp_activation_checkpointing": True}, {}, "fsdp_activation_checkpointing: true.*schedule.recompute=none"),
        ({}, {"recompute": "full"}, "fsdp_activation_checkpointing: false.*schedule.recompute=full"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, {}, "SIZE_BASED_WRAP.*every block is a unit"),
        ({"fsdp_transformer_layer_cls_to_wrap": "T5Block"}, {}, "transformer_cls_to_wrap: T5Block"),
        ({"fsdp_state_dict_type": "FULL_STATE_DICT"}, {}, "FULL_STATE_DICT.*set SHARDED_STATE_DICT"),
        ({"fsdp_forward_prefetch": True}, {}, "fsdp_forward_prefetch: true"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {}, "HYBRID_SHARD.*schedule.shard_ranks"),
        ({"fsdp_cpu_ram_efficient_loading": False}, {}, None),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, {"shard_ranks": 4}, None),
        ({"fsdp_activation_checkpointing": True}, {"recompute": "full"}, None),
    ],
)
def test_fsdp_keys_are_followed_or_refused(tmp_path: Path, changed: dict, schedule: dict, message: str | None) -> None:
    environment, config = fsdp_environment(tmp_path, changed), run_with(**schedule)
    if message is None:
        assert follow_launcher(config, environment, 8).schedule.meet == "slot"
        return
    with pytest.raises(ValueError, match=f"the accelerate config has .*{message}"):
        follow_launcher(config, environment, 8)


def test_precision_compile_and_parallelism(tmp_path: Path) -> None:
    environment = fsdp_environment(tmp_path, {})
    with pytest.raises(ValueError, match=r"mixed_precision: bf16.*precision=fp32 decides"):
        follow_launcher(RunConfig(precision="fp32"), environment, 8)
    with pytest.raises(ValueError, match=r"mixed_precision: fp16.*precision=bf16 decides"):
        follow_launcher(RunConfig(), fsdp_environment(tmp_path, {}, mixed_precision="fp16"), 8)
    compiled = fsdp_environment(tmp_path, {}, dynamo_config={"dynamo_backend": "INDUCTOR"})
    assert follow_launcher(RunConfig(compile=True), compiled, 8).schedule.meet == "slot"
    with pytest.raises(ValueError, match=r"dynamo_backend: INDUCTOR.*compile=true goes with INDUCTOR"):
        follow_launcher(RunConfig(), compiled, 8)
    with pytest.raises(ValueError, match="distributed_type: true"):
        follow_launcher(RunConfig(), {"ACCELERATE_USE_DEEPSPEED": "true"}, 8)
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 4}
    parallel = fsdp_environment(tmp_path, {}, parallelism_config=sizes)
    assert follow_launcher(run_with(shard_ranks=4), parallel, 8).schedule.shard_ranks == 4
    with pytest.raises(ValueError, match=r"dp_replicate_size: 2.*schedule.shard_ranks=0 makes 1 copies, each on 8"):
        follow_launcher(RunConfig(), parallel, 8)
    context = fsdp_environment(tmp_path, {}, parallelism_config={**sizes, "parallelism_config_cp_size": 2})
    with pytest.raises(ValueError, match=r"cp_size: 2.*a sample is never spread"):
        follow_launcher(run_with(shard_ranks=4), context, 8)


def test_processes_that_know_nothing_of_each_other_are_refused() -> None:
    """`srun -n 8 python train.py` was eight runs of one rank in one folder."""
    for key in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        for parent in (["slurmstepd: [7.0]"], ["python", "-m", "scripts.launch", "train.py"]):
            with pytest.raises(LaunchError, match=f"8 processes were started \\({key}=8\\).*launch.sh.*unset {key}"):
                check_launch({key: "8"}, parent)
            # The ranks of a launcher on each of eight nodes, as scripts/slurm/launch.sh starts them.
            check_launch({key: "8", "WORLD_SIZE": "64"}, parent)
        check_launch({key: "1"}, ["bash"])
