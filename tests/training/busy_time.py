"""Launched by test_step_timer.py on two ranks: rank 0 is slow inside its blocks, rank 1 waits for it."""

import json
import sys
import time
from pathlib import Path

import torch

from adaptiveload.models.flow_matching import noisy_latents, timesteps, weighted_losses
from adaptiveload.models.frozen import freeze
from adaptiveload.models.packing import PackedSample, pack
from adaptiveload.models.wan import WanConfig, WanTransformer
from adaptiveload.training.distributed import finish_ranks, reshard, set_meeting, shard_model, start_ranks
from adaptiveload.training.step_timer import StepTimer

CONFIG = WanConfig(
    num_attention_heads=2, attention_head_dim=12, ffn_dim=32, num_layers=2, text_dim=8, text_len=4, freq_dim=8
)
SLEEP_S = 0.7  # in each block's forward, on rank 0


def main(output: str) -> None:
    ranks = start_ranks()
    tokens = torch.randn(16, 64)
    batch = pack([PackedSample("k", (1, 4, 4), tokens, torch.randn(16, 64), 0.5, torch.randn(2, 8))])
    rows = []
    for recompute, frozen in (("none", []), ("full", []), ("full", ["*embed*", "*table", "blocks.*.attn*"])):
        torch.manual_seed(0)
        model = WanTransformer(CONFIG)
        freeze(model, None, frozen)
        shard_model(model, ranks, "fp32")
        blocks = model.fsdp_units()[1]
        timer = StepTimer(ranks.device)
        timer.attach(blocks)
        if ranks.is_main:
            for block in blocks:
                block.ffn.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))
        ranks.barrier()
        start = time.perf_counter()
        timer.start_step()
        set_meeting(model, meet="slot", is_last=True)
        timer.start_micro_batch()
        velocity = model(noisy_latents(batch), timesteps(batch), batch, recompute=recompute)
        weighted_losses(batch, velocity).sum().backward()
        reshard(model)
        (busy_s,) = timer.busy_s()
        rows.append({"busy_s": busy_s, "wall_s": time.perf_counter() - start})
    gathered = ranks.gather_objects(rows)
    if ranks.is_main:
        Path(output).write_text(json.dumps(gathered))
    finish_ranks(ranks)


if __name__ == "__main__":
    main(sys.argv[1])
