r"""Measures the paper's D-tile backward of AdaLN on one GPU: its time, and how its sums over tokens read memory.

    python -m scripts.benchmark_dtile
    ncu --kernel-name regex:"column_kernel|strided" --metrics \
        l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio python -m scripts.benchmark_dtile --once

Three ways to sum the gradients of scale and shift over N tokens: down a tile of neighbouring features (the paper's
D-tile kernel), strided along N (a program a feature, as a reduction over the first dimension is first written), and in
the one pass that computes dx (the default). Beside them backward of the form that diffusers writes.
"""

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from adaptiveload.kernels import backends
from adaptiveload.kernels.benchmark_cases import NormCase, diffusers_form, leaves_of
from adaptiveload.kernels.build import LIBRARY
from adaptiveload.kernels.extension import Extension

NUM_WARM_UP, NUM_CALLS = 3, 9
SUMS, STRIDED = "column_kernel", "strided_sums"


def strided_kernel():
    """A Triton kernel: each program sums one feature, its lanes read different tokens."""
    import triton
    import triton.language as tl

    @triton.jit
    def strided_sums(dh, x, mean, rstd, dscale, dshift, num_tokens, hidden_size, block: tl.constexpr):
        feature = tl.program_id(0)
        of_scale = tl.zeros([block], tl.float32)
        of_shift = tl.zeros([block], tl.float32)
        for start in range(0, num_tokens, block):
            rows = start + tl.arange(0, block)
            is_there = rows < num_tokens
            places = rows.to(tl.int64) * hidden_size + feature
            gradient = tl.load(dh + places, is_there, 0.0).to(tl.float32)
            value = tl.load(x + places, is_there, 0.0).to(tl.float32)
            centred = value - tl.load(mean + rows, is_there, 0.0)
            of_scale += gradient * centred * tl.load(rstd + rows, is_there, 0.0)
            of_shift += gradient
        tl.store(dscale + feature, tl.sum(of_scale))
        tl.store(dshift + feature, tl.sum(of_shift))

    return strided_sums


def kernel_times(call) -> dict[str, float]:
    """Milliseconds of each kernel that `call` starts, by name, mean over calls after a warm-up."""
    for i in range(NUM_WARM_UP):
        call(i)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(NUM_CALLS):
            call(i)
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / NUM_CALLS / 1e3 for event in profiler.key_averages()}


def calls_of(case: NormCase, extension: Extension) -> dict[str, object]:
    """What is compared, by name; each call takes the number of the copy."""
    statistics = case.statistics()
    kernel, sums = strided_kernel(), torch.empty(2, case.hidden_size, device="cuda")

    def on(backend: Extension):
        def call(i: int) -> None:
            with backends.use(backend):
                case.call_backward(i % case.num_copies, *statistics[i % case.num_copies])

        return call

    def strided(i: int) -> None:
        i %= case.num_copies
        grid, size = (case.hidden_size,), (case.num_tokens, case.hidden_size)
        kernel[grid](case.dh[i], case.x[i], *statistics[i], *sums, *size, block=1024)

    arguments = leaves_of(case, 0, "diffusers")
    results, sent = case.sent(0, diffusers_form(*arguments))
    inputs = [part for part in arguments if part is not None]

    def diffusers(_: int) -> None:
        torch.autograd.grad(results, inputs, sent, retain_graph=True)

    return {"dtile": on(extension.variant(d_tile=True)), "strided": strided, "one_pass": on(extension),
            "diffusers": diffusers}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[1536, 3072, 5120])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--once", action="store_true", help="only start the kernels once each, for ncu")
    args = parser.parse_args()
    extension = Extension(LIBRARY)
    print(f"{torch.cuda.get_device_name()}, bf16, N {args.tokens}; ms of backward, in parentheses of its sums alone")
    for hidden_size in args.hidden_sizes:
        case = NormCase("norm", "bf16", hidden_size, args.tokens)
        calls = calls_of(case, extension)
        if args.once:
            for name in ("dtile", "strided"):
                calls[name](0)
            torch.cuda.synchronize()
            continue
        times = {name: kernel_times(call) for name, call in calls.items()}
        totals = {name: sum(of_kernels.values()) for name, of_kernels in times.items()}
        sums = sum(time for key, time in times["dtile"].items() if SUMS in key)
        strided = totals["strided"]
        totals["strided"] += totals["dtile"] - sums  # the same kernel for dx
        print(
            f"D {hidden_size}: strided {totals['strided']:.3f} ({strided:.3f}), D-tile {totals['dtile']:.3f} "
            f"({sums:.3f}), one pass {totals['one_pass']:.3f}, diffusers {totals['diffusers']:.3f}; D-tile is "
            f"{totals['strided'] / totals['dtile']:.2f} x the strided form's speed, "
            f"{totals['diffusers'] / totals['dtile']:.2f} x diffusers' (the paper: 1.42)",
            flush=True,
        )
        del case, calls


if __name__ == "__main__":
    main()
