r"""One step of a run on synthetic samples of a mix, profiled: how often AdaLN is called and what it launches.

    PYTHONPATH=. accelerate launch --config_file configs/accelerate/1node.yaml --num_processes 2 \
        tests/end_to_end/profiled_launches.py configs/mixes/mixed.yaml configs/mmdit_1_4b.yaml \
        schedule.samples_per_step=32

Each rank prints a line of JSON: its micro-batches, calls and launches, and the calls that the architecture has.
"""

import json
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
from torch.profiler import ProfilerActivity, profile

from adaptiveload.kernels.backends import backend_for
from adaptiveload.models.config import ModelConfig
from adaptiveload.models.mmdit import MMDiTConfig
from adaptiveload.scheduling.cost import analytic_prior
from adaptiveload.scheduling.order import EndlessOrder
from adaptiveload.scheduling.policies import Policy, build_policy
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.updates import CostHistory
from adaptiveload.training.benchmark_trainers import OwnTrainer, run_plan
from adaptiveload.training.config import RunConfig, load_config
from adaptiveload.training.cost import Hardware, model_dims, resolve_gpu
from adaptiveload.training.distributed import Ranks, finish_ranks, start_ranks
from adaptiveload.training.schedule import model_geometry, resolve_meet


def adaln_sites(model: ModelConfig) -> tuple[int, int]:
    """Calls of AdaLN in the blocks of one forward pass, and outside of them: by the architecture, nothing counted."""
    if isinstance(model, MMDiTConfig):
        return 4 * model.num_layers - 1, 1  # two of each stream; the last block's text ends at its attention
    return 3 * model.num_layers, 1


def synthetic_policy(mix: str, config: RunConfig, ranks: Ranks) -> tuple[Policy, SampleTable]:
    """Plans steps of `mix` by `config`, priced by the prior; and the samples."""
    hardware = Hardware.of(ranks.device)
    gpu = resolve_gpu(config.cost, hardware)
    meet = resolve_meet(config, gpu, hardware)
    dims = model_dims(config.model)
    table = SampleTable.from_mix(mix, 10_000, 0, model_geometry(config.model))
    text_len = np.full(len(table), config.model.text_len, np.int32)
    table = replace(table, text_len=text_len, text_joins=dims.text_joins)
    history = CostHistory(analytic_prior(dims, gpu, config.schedule.recompute))
    order = EndlessOrder(np.arange(len(table)), 0)
    return build_policy(config.schedule, table, order, history, ranks.world_size, meet), table


def main(mix: str, *config_and_overrides: str) -> None:
    config = load_config(config_and_overrides[0], ["schedule.recompute=full", *config_and_overrides[1:]])
    ranks = start_ranks()
    (policy, table), trainer = synthetic_policy(mix, config, ranks), OwnTrainer(config, ranks)
    plan = policy.plan(0)

    def step() -> None:
        run_plan(trainer, plan, table, ranks, config.optimizer.max_grad_norm)

    step()  # libraries are loaded, memory is there
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ranks.device.type == "cuda" else [])]
    with profile(activities=activities) as trace:
        step()
    calls = Counter(event.name for event in trace.events() if event.name.startswith("adaptiveload::adaln"))
    launches = Counter(kind for event in trace.events() if (kind := kernel_of(event.name)) and is_kernel(event))
    in_blocks, outside = adaln_sites(config.model)
    again = 2 if config.schedule.recompute == "full" else 1
    count = len(plan.micro_batches(ranks.rank))
    result = {
        "rank": ranks.rank,
        "kernels": backend_for(ranks.device).name,
        "micro_batches": count,
        "sites": {"forward": count * (again * in_blocks + outside), "backward": count * (in_blocks + outside)},
        "calls": {"forward": calls["adaptiveload::adaln"], "backward": calls["adaptiveload::adaln_backward"]},
        "launches": dict(launches),
    }
    for line in ranks.gather_objects(json.dumps(result)):
        if ranks.is_main:
            print(line, flush=True)
    finish_ranks(ranks)


def is_kernel(event) -> bool:
    return "CUDA" in str(event.device_type)


def kernel_of(name: str) -> str | None:
    """Which of AdaLN's kernels a launch is, by its C++ name."""
    if "row_kernel<" in name:
        return "backward" if "Backward<" in name else "forward"
    return "finish" if "finish_kernel" in name and "qk_" not in name else None


if __name__ == "__main__":
    main(*sys.argv[1:])
