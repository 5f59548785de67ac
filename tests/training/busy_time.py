"""Launched by test_step_timer.py on two ranks: rank 0 computes a long micro-batch while rank 1 computes a short one."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from adaptiveload.models.flow_matching import noisy_latents, timesteps, weighted_loss_sum
from adaptiveload.models.packing import PackedSample, pack
from adaptiveload.models.wan import WanConfig, WanTransformer
from adaptiveload.training.distributed import reshard, set_meeting, shard_model, start_ranks
from adaptiveload.training.step_timer import StepTimer

CONFIG = WanConfig(
    num_attention_heads=4, attention_head_dim=24, ffn_dim=256, num_layers=4, text_dim=16, text_len=8, freq_dim=16
)
ROWS = {0: 32, 1: 8}  # tokens: 1024 on rank 0, 256 on rank 1


def main(output: str) -> None:
    ranks = start_ranks()
    torch.manual_seed(0)
    model = WanTransformer(CONFIG)
    shard_model(model, ranks, "fp32")
    timer = StepTimer(ranks.device)
    timer.attach(model.fsdp_units()[1])
    side = ROWS[ranks.rank]
    tokens = torch.randn(side * 32, 64)
    sample = PackedSample("k", (1, side, 32), tokens, torch.randn_like(tokens), 0.5, torch.randn(4, 16))
    batch = pack([sample])
    rows = []
    for recompute in ("none", "none", "full"):  # the first is the warm-up
        ranks.barrier()
        start = time.perf_counter()
        timer.start_step()
        set_meeting(model, meet="slot", is_last=True)
        timer.start_micro_batch()
        velocity = model(noisy_latents(batch), timesteps(batch), batch, recompute=recompute)
        weighted_loss_sum(batch, velocity).backward()
        reshard(model)
        (busy,) = timer.busy_s()
        rows.append([busy, time.perf_counter() - start])
    gathered = ranks.gather_objects(rows)
    if ranks.is_main:
        Path(output).write_text(json.dumps(gathered))
    ranks.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
