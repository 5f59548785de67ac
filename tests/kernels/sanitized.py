"""Runs the kernels on odd sizes; a program of its own, for the tools that watch memory.

`python -m tests.kernels.sanitized LIBRARY cpu` under AddressSanitizer with the emulated library, or with the compiled
one `compute-sanitizer python -m tests.kernels.sanitized LIBRARY cuda`.
"""

import itertools
import sys
from pathlib import Path

import torch

from adaptiveload.kernels import backends
from adaptiveload.kernels.extension import Extension
from tests.kernels import test_qk_norm_rope as qk
from tests.kernels.test_adaln import make_inputs
from tests.kernels.test_extension import ALL, MODULATED, run


class Where:
    device = sys.argv[2]


if __name__ == "__main__":
    extension = Extension(Path(sys.argv[1]))
    variants = [extension, extension.variant(d_tile=True)]
    num_cases = 0
    for hidden_size, lengths, names, dtype in itertools.product(
        (40, 264, 2056, 4104), ([13], [1, 0, 7, 3]), (MODULATED, ALL), (torch.float32, torch.bfloat16)
    ):
        inputs = make_inputs(lengths, hidden_size=hidden_size)
        inputs |= {"x": inputs["x"].to(dtype), "y": inputs["y"].to(dtype)}
        # Memory of exactly the tensors' size: PyTorch's own CPU allocator takes it from malloc, which is watched.
        with backends.use(variants[num_cases % 3 % 2]):
            run(Where, inputs, names)
        num_cases += 1
    for hidden_size, lengths in itertools.product((1, 7, 23, 37), ([5], [2, 0, 9])):
        with backends.use(extension):
            run(Where, make_inputs(lengths, hidden_size=hidden_size), ALL)
        num_cases += 1
    for sizes, per_head, dtype in itertools.product(
        ((2, 64), (5, 96), (33, 8), (3, 10)), (False, True), (torch.float32, torch.bfloat16)
    ):
        num_heads, head_dim = sizes
        with backends.use(extension):
            qk.run(Where, qk.make_inputs(11, None, num_heads, head_dim, per_head=per_head, dtype=dtype))
            qk.run(Where, qk.make_inputs(11, 7, num_heads, head_dim, per_head=per_head, rotary=False))
        num_cases += 2
    print(f"ran {num_cases} cases")
