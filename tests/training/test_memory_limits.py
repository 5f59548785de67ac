"""What a run writes into `limits.yaml` and how the next start obeys it; launches are in end_to_end."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adaptiveload.scheduling.plan import StepPlan
from adaptiveload.scheduling.policies import limit_of
from adaptiveload.training.config import load_config
from adaptiveload.training.cost import Hardware, device_memory_bytes, resolve_gpu
from adaptiveload.training.memory_limits import LIMITS_NAME, MemoryLimits, MicroBatchMemoryError, read_records
from adaptiveload.training.schedule import Schedule, build_schedule, memory_conditions
from adaptiveload.training.stop_signals import LOWER_LIMIT_EXIT_CODE
from scripts.launch import with_next_port

ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
CPU = torch.device("cpu")


def schedule_of(run_config: Path, records: list[dict], *overrides: str, ranks: int = 2) -> Schedule:
    return build_schedule(load_config(run_config, overrides), ranks, CPU, None, records)


def record(run_config: Path, folder: Path, num_samples: int, *overrides: str, rank: int = 1) -> MicroBatchMemoryError:
    """Have the first micro-batch of `rank` with so many samples, or more, run out of memory."""
    schedule = schedule_of(run_config, [], *overrides)
    conditions = memory_conditions(schedule.config, 2, Hardware.of(CPU), schedule.meet)
    is_balanced = schedule.settings.policy == "balanced"
    limits = MemoryLimits(folder / LIMITS_NAME, rank, conditions, schedule.settings, can_obey=is_balanced)

    def fits(plan: StepPlan, g: int) -> bool:
        count = len(plan.micro_batches(rank)[g])
        return count == 1 if num_samples == 1 else count >= num_samples

    plans = map(schedule.policy.plan, range(50))
    plan, g = next((plan, g) for plan in plans for g in range(len(plan.micro_batches(rank))) if fits(plan, g))
    return limits.exceeded(plan, g, schedule.table, ERROR)


def test_the_lowest_recorded_limit_holds_and_the_samples_stay(run_config: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        error = record(run_config, tmp_path, 2, rank=rank)
        assert error.exit_code == LOWER_LIMIT_EXIT_CODE
    assert "Tried to allocate 2.00 GiB" in str(error)
    assert "and more" not in str(error)
    records = read_records(tmp_path / LIMITS_NAME)
    assert [each["rank"] for each in records] == [0, 1]
    lowest = min(each["memory_limit_tokens"] for each in records)
    assert lowest == min(int(0.85 * each["num_tokens"]) for each in records) < 128

    before, after = schedule_of(run_config, []), schedule_of(run_config, records)
    assert limit_of(after.settings) == lowest
    assert f"128 -> {lowest}" in str(after.lowered)
    assert (limit_of(before.settings), before.lowered) == (128, None)
    assert after.config.schedule == before.config.schedule, "the run's configuration stays the user's"
    for step in range(10):
        plans = [schedule.policy.plan(step) for schedule in (before, after)]
        assert sorted(plans[0].sample_ids) == sorted(plans[1].sample_ids)
        assert plans[1].num_tokens.max() <= lowest


def test_samples_above_the_lower_limit_run_alone(run_config: Path) -> None:
    """Nothing is known against them; but those above the user's own limit are refused as ever."""
    conditions = memory_conditions(load_config(run_config), 2, Hardware.of(CPU), "step")
    low = {"rank": 0, "step": 3, "num_tokens": 60, "memory_limit_tokens": 51, "keys": [], "shapes": {}}
    schedule = schedule_of(run_config, [low | {"under": conditions}])
    for plan in map(schedule.policy.plan, range(10)):
        for slot, tokens in zip(plan.slots, plan.num_tokens, strict=True):
            assert all(count <= 51 or len(members) == 1 for members, count in zip(slot, tokens, strict=True))
    with pytest.raises(ValueError, match=r"above schedule\.memory_limit_tokens = 60"):
        schedule_of(run_config, [low | {"under": conditions}], "schedule.memory_limit_tokens=60")


def test_a_sample_that_does_not_fit_alone_is_named_then_and_at_the_next_start(run_config: Path, tmp_path: Path) -> None:
    alone = "schedule.memory_limit_tokens=64"
    error = record(run_config, tmp_path, 1, alone)
    assert error.exit_code == 1
    (found,) = read_records(tmp_path / LIMITS_NAME)
    (key,) = found["keys"]
    for message in (str(error), _refusal(run_config, [found], alone)):
        assert f"sample {key} (" in message
        assert "does not fit alone" in message
        assert "schedule.recompute=full" in message
    # Under other conditions it may fit.
    assert schedule_of(run_config, [found], alone, "schedule.recompute=full").lowered is None
    assert schedule_of(run_config, [found], alone, ranks=4).lowered is None


def _refusal(run_config: Path, records: list[dict], *overrides: str) -> str:
    with pytest.raises(ValueError, match="ran out of memory in step") as caught:
        schedule_of(run_config, records, *overrides)
    return str(caught.value)


def test_the_papers_policies_say_what_to_do_and_are_not_started_again(run_config: Path, tmp_path: Path) -> None:
    policy = "schedule.policy=equal_token"
    error = record(run_config, tmp_path, 2, policy)
    assert error.exit_code == 1
    (found,) = read_records(tmp_path / LIMITS_NAME)
    assert f"schedule.memory_limit_tokens 128 -> {found['memory_limit_tokens']}" in str(error)
    assert limit_of(schedule_of(run_config, [found], policy).settings) == 128


def test_where_recompute_is_by_memory_more_is_computed_again_first(run_config: Path, tmp_path: Path) -> None:
    auto = ("schedule.recompute=auto", "schedule.kept_tokens=100", "schedule.most_tokens=200")
    error = record(run_config, tmp_path, 2, *auto)
    assert error.exit_code == LOWER_LIMIT_EXIT_CODE
    (found,) = read_records(tmp_path / LIMITS_NAME)
    assert found["num_tokens"] > 100
    after = schedule_of(run_config, [found], *auto)
    settings = after.settings
    assert (settings.memory_limit_tokens, settings.kept_tokens, settings.most_tokens) == (128, 85, 170)
    assert "schedule.kept_tokens 100 -> 85, schedule.most_tokens 200 -> 170" in str(after.lowered)
    before = schedule_of(run_config, [], *auto)
    shares = [schedule.policy.assembler.recompute.permille([128])[0] for schedule in (before, after)]
    assert 0 < shares[0] < shares[1] < 1000


def test_unequal_devices_make_one_plan_and_one_record(run_config: Path, capsys: pytest.CaptureFixture) -> None:
    """Limits follow from memory, records hold for a device by name: ranks on two kinds of node would not agree."""
    kinds = [("NVIDIA H100 NVL", 94_000_000_000), ("NVIDIA H100 80GB HBM3", 80_000_000_000)]

    def agreed(rank: int, least: float = 0.0) -> Hardware:
        told = SimpleNamespace(is_main=rank == 0, device=CPU)
        told.gather_objects = lambda mine: [(name, max(size, least)) for name, size in kinds]
        return Hardware.of_all(told)

    found = [agreed(rank) for rank in (0, 1)]
    assert capsys.readouterr().out.count("ranks differ: 1 of NVIDIA H100 NVL, 94.0 GB; 1 of NVIDIA H100 80GB") == 1
    assert found[0] == found[1]
    assert (found[0].name, found[0].memory_bytes) == ("NVIDIA H100 NVL", 80_000_000_000)
    config = load_config(run_config, ["cost.gpu=a100", "schedule.memory_limit_tokens=null"])
    gpu = [replace(each, device=torch.device("cuda")) for each in (found[1], agreed(1, 94e9))]
    assert resolve_gpu(config.cost, gpu[0]) == "a100"
    assert device_memory_bytes("a100", gpu[0]) == 80_000_000_000
    assert memory_conditions(config, 2, gpu[0], "step")["device"] == "NVIDIA H100 NVL"

    # On CPU hosts it decides over the limit.
    config = load_config(run_config, ["schedule.memory_limit_tokens=null"])
    small, large = (Hardware(CPU, "cpu", size) for size in (2**30, 2**40))
    limits = [limit_of(build_schedule(config, 2, CPU, None, (), each).settings) for each in (small, large)]
    assert limits[0] < limits[1]


def test_a_file_that_was_torn_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / LIMITS_NAME
    assert read_records(path) == []
    for text in ("- {rank: 1, memory", "- {rank: 1}", "rank"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"limits\.yaml cannot be read"):
            read_records(path)


def test_a_start_after_a_failure_meets_at_another_port() -> None:
    arguments = ["--num_machines", "2", "--main_process_port", "29500", "train.py", "a=b"]
    assert with_next_port(arguments) == [*arguments[:3], "29501", *arguments[4:]]
    for same in (["--main_process_port", "0", "train.py"], ["train.py"]):
        assert with_next_port(same) == same
