"""train.py whose rank 1 has memory for FAULT_TOKENS tokens, from its eighth micro-batch on, and stops at its last.

The last is FAULT_STOP of a start under a lower limit: the first start is to fail of memory, the second to stand still.
"""

import os
import time

import torch

import train
from adaptiveload.models.wan import WanTransformer

run_model = WanTransformer.forward
started_again = os.environ.get("FAULT_MARK", "") and os.path.exists(os.environ["FAULT_MARK"])
num_calls = 0


def forward(self: WanTransformer, latents: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
    """Runs the model, but fails on rank 1 as CUDA's allocator does, or does not come back."""
    global num_calls
    if os.environ.get("RANK", "0") == "1" and torch.is_grad_enabled():
        num_calls += 1
        if num_calls >= 8 and len(latents) > int(os.environ["FAULT_TOKENS"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines of it")
        if started_again and num_calls == int(os.environ["FAULT_STOP"]):
            time.sleep(600)
    return run_model(self, latents, *arguments, **options)


WanTransformer.forward = forward

if __name__ == "__main__":
    train.main()
