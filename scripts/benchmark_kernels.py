"""Measures AdaLN and the QK norm with RoPE on one GPU against their byte floor and other ways to compute them.

A measurement of ours, and of any forward, is a CUDA graph of several calls; the time is the median over replays.
Backward of other ways is no graph but autograd: each call is queued behind a wait of the GPU, which ends after the host
is done with it, so that the host's time does not count, but the gaps between kernels do, a microsecond or so each.
All calls rotate over buffers larger than the L2 cache. The floor is what the call must read and write, at the bandwidth
that a copy reaches here.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from pathlib import Path

# pytorch#193061: with it, compiled backward of modulated norms is wrong in 2.10 to 2.14.
os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from adaptiveload.kernels import backends
from adaptiveload.kernels.adaln import adaln
from adaptiveload.kernels.benchmark_cases import (
    STREAMS,
    Case,
    NormCase,
    Row,
    bf16_form,
    complex_qk,
    diffusers_form,
    diffusers_qk,
    leaves_of,
    make_case,
    native_affine,
)
from adaptiveload.kernels.build import LIBRARY
from adaptiveload.kernels.extension import Extension, Launch

SITES = ("norm", "gated", "qk")
PEERS = ("eager", "compile")
NUM_WARM_UP, NUM_REPLAYS = 12, 11  # clocks rise during the first replays
WAIT_MS = 5  # longer than autograd takes to queue a backward
WAIT_CYCLES = WAIT_MS * 2_000_000  # at 2 GHz
PAPER_GB_SAVED = 4.8  # at 64,000 tokens


def measure(call: Callable[[int], object], num_copies: int) -> float:
    """Milliseconds of one call, median over replays of a graph that rotates over the copies."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    num_calls = max(num_copies, 4)
    with torch.cuda.stream(stream):
        for i in range(min(num_copies, 3)):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(num_calls):
            call(i % num_copies)
    times = []
    for _ in range(NUM_WARM_UP + NUM_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / num_calls)
    return sorted(times[NUM_WARM_UP:])[NUM_REPLAYS // 2]


def copy_bandwidth() -> float:
    """Bytes a second of a kernel that copies, read and written: the faster of a copy and a negation.

    In a graph, PyTorch's copy of contiguous memory may go through a copy engine, at two thirds of the rate.
    """
    source = torch.randn(512 * 1024 * 1024, device="cuda")
    target = torch.empty_like(source)
    calls = (lambda _: target.copy_(source), lambda _: torch.neg(source, out=target))
    return 2 * source.nbytes / min(measure(call, 1) for call in calls) * 1e3


def peers(case: Case, part: str) -> dict[str, Callable]:
    """Other implementations of this case, by name."""
    is_qk = case.site == "qk"
    if part == "compile":
        return {"compile": torch.compile(diffusers_qk if is_qk else diffusers_form, dynamic=False)}
    if is_qk:
        return {"diffusers": diffusers_qk, "complex": complex_qk}
    functions = {"diffusers": diffusers_form, "eager_bf16": bf16_form}
    if case.site == "norm":
        functions["native_affine"] = native_affine
        try:
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Liger
        except ImportError:
            pass
        else:
            functions["liger_affine"] = lambda x, y, gate, scale, shift: (
                Liger.apply(x, scale[0].to(x.dtype), shift[0].to(x.dtype), 1e-6), x,
            )  # fmt: skip
    return functions


def measure_peer(case: Case, function: Callable, name: str, bandwidth: float) -> list[Row]:
    """Forward, and backward through autograd; what cannot run is named and left out."""
    try:
        return _measure_peer(case, function, name, bandwidth)
    except RuntimeError as error:  # torch.compile has rejected its own backward on some versions
        print(f"{name} failed on {case.site} {case.stream} D {case.hidden_size}: {error}", file=sys.stderr)
        return []


def _measure_peer(case: Case, function: Callable, name: str, bandwidth: float) -> list[Row]:
    weights = [part if part is None else part.detach() for part in leaves_of(case, 0, name)[2:]]

    def forward(i: int):
        with torch.no_grad():
            return function(*case.arguments(i)[:2], *weights)

    rows = [case.row("forward", name, measure(forward, case.num_copies), bandwidth)]
    stream = torch.cuda.Stream()
    graphs = []
    with torch.cuda.stream(stream):
        for i in range(case.num_copies):
            arguments = leaves_of(case, i, name)
            results, sent = case.sent(i, function(*arguments))
            graphs.append((results, [leaf for leaf in arguments if leaf is not None and leaf.requires_grad], sent))
    torch.cuda.synchronize()

    def backward(i: int):
        outputs, inputs, sent = graphs[i]
        return torch.autograd.grad(outputs, inputs, sent, retain_graph=True)

    rows.append(case.row("backward", name, measure_queued(backward, case.num_copies, stream), bandwidth))
    graphs.clear()
    rows[-1].saved_bytes_per_element = saved_bytes_per_element(case, function, name)
    return rows


def saved_bytes_per_element(case: Case, function: Callable, name: str = "") -> float:
    """Bytes kept for backward by the operation and by what reads its results, a linear layer or attention.

    Counted by saved-tensor hooks, each storage once; weights, modulation and turns are left out.
    """
    arguments = leaves_of(case, 0, name)
    small = {part.untyped_storage().data_ptr() for part in arguments[2:] if part is not None}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in small:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = function(*arguments)
    kept = results if case.site == "qk" else results[:1]
    for result in kept:
        keep(result)
    return sum(storages.values()) / case.num_elements


def measure_queued(call: Callable[[int], object], num_copies: int, stream: torch.cuda.Stream) -> float:
    """As `measure`, without a graph, of what autograd runs: on the stream of its forward.

    The GPU waits until the host is done; where the host takes longer than that, the line that says so tells that its
    time is in the figure.
    """
    times, host_ms = [], 0.0
    with torch.cuda.stream(stream):
        for repeat in range(NUM_WARM_UP + NUM_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT_CYCLES)
            began = time.perf_counter()
            start.record()
            call(repeat % num_copies)
            end.record()
            host_ms = max(host_ms, (time.perf_counter() - began) * 1e3) if repeat >= NUM_WARM_UP else host_ms
            end.synchronize()
            times.append(start.elapsed_time(end))
    if host_ms > WAIT_MS:
        print(f"  the host took {host_ms:.1f} ms for a backward, more than the {WAIT_MS} ms that the GPU waits")
    return sorted(times[NUM_WARM_UP:])[NUM_REPLAYS // 2]


# ---- ours ------------------------------------------------------------------------------------------------------------


def measure_ours(
    case: Case, backend: object, name: str, bandwidth: float, launch: str = "", directions=("forward", "backward")
) -> list[Row]:
    """The operators themselves, without autograd."""
    statistics = case.statistics() if "backward" in directions else []
    calls = {"forward": case.call_forward, "backward": lambda i: case.call_backward(i, *statistics[i])}
    with backends.use(backend):
        rows = [
            case.row(direction, name, measure(calls[direction], case.num_copies), bandwidth, launch)
            for direction in directions
        ]
        if name == "ours":
            rows[-1].saved_bytes_per_element = saved_bytes_per_element(case, case.ours)
    return rows


def sweep(case: Case, extension: Extension, bandwidth: float) -> list[Row]:
    """Every launch choice that was compiled; needs a build with --sweep."""
    rows = []
    for vectors, num_rows, stages, blocks, in_turn in product((1, 2), (1, 2), (2, 4), (0, 1, 2, 3), (False, True)):
        variant = extension.variant(launch=Launch(vectors, num_rows, stages, blocks, 1, in_turn))
        name = f"v{vectors}r{num_rows}s{stages}b{blocks}{'t' if in_turn else ''}"
        for direction in ("forward",) if in_turn else ("forward", "backward"):
            try:
                rows += measure_ours(case, variant, "sweep", bandwidth, name, (direction,))
            except RuntimeError as error:
                if "has no kernel" not in str(error):
                    raise
    return rows


def host_microseconds(extension: Extension) -> dict[str, float]:
    """What a forward and a forward with backward cost the host, at a size that keeps the GPU idle."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    scale, shift = (torch.randn(1, 64, device="cuda", requires_grad=True) for _ in range(2))
    offsets = torch.tensor([0, 64], dtype=torch.int32)
    results = {}
    with backends.use(extension):
        for name in ("forward", "forward_backward"):
            for _ in range(20):
                h, _ = adaln(x, scale=scale, shift=shift, segment_offsets=offsets)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(300):
                h, _ = adaln(x, scale=scale, shift=shift, segment_offsets=offsets)
                if name == "forward_backward":
                    h.sum().backward()
            results[name] = (time.perf_counter() - start) / 300 * 1e6
            torch.cuda.synchronize()
    return results


def table(rows: list[Row]) -> str:
    """One line a case and direction: microseconds, ratio to the floor, bytes kept an element; ours first."""
    lines = []
    cases = dict.fromkeys((r.site, r.stream, r.hidden_size, r.num_tokens, r.direction) for r in rows)
    for key in cases:
        mine = [r for r in rows if (r.site, r.stream, r.hidden_size, r.num_tokens, r.direction) == key]
        cells = [
            f"{r.implementation} {r.ms * 1e3:.0f}us x{r.floor_ratio:.2f}"
            + (f" {r.saved_bytes_per_element:.1f}B" if r.saved_bytes_per_element is not None else "")
            for r in mine
            if r.implementation != "sweep"
        ]
        best = sorted((r for r in mine if r.implementation == "sweep"), key=lambda r: r.ms)[:3]
        cells += [f"[{r.launch} x{r.floor_ratio:.2f}]" for r in best]
        lines.append(f"{key[0]:5} {key[1]} D{key[2]} N{key[3]} {key[4][:3]}: " + " ".join(cells))
    return "\n".join(lines)


def memory_table(rows: list[Row]) -> str:
    """GB that each site keeps less for backward than the diffusers form, at 64,000 tokens."""
    kept = {(r.site, r.stream, r.implementation): r for r in rows if r.saved_bytes_per_element is not None}
    lines = []
    for site, stream, implementation in kept:
        theirs = kept.get((site, stream, "diffusers"))
        if implementation != "ours" or theirs is None:
            continue
        ours = kept[site, stream, "ours"].saved_bytes_per_element
        num_elements = 64_000 * (2 if site == "qk" else 1)
        gigabytes = ", ".join(
            f"D{size} {(theirs.saved_bytes_per_element - ours) * num_elements * size / 1e9:.2f}"
            for size in sorted({r.hidden_size for r in rows})
        )
        lines.append(
            f"{site} {stream}: keeps {ours:.2f} bytes an element, diffusers {theirs.saved_bytes_per_element:.2f}; "
            f"GB saved at 64,000 tokens: {gigabytes} (the paper: {PAPER_GB_SAVED})"
        )
    return "\n".join(lines)


def plot_roofline(rows: list[Row], bandwidth: float, path: Path, title: str) -> None:
    """Useful GB/s against the bytes that a call must move, a panel a site and direction; the copy is the roof."""
    rows = [row for row in rows if row.implementation != "sweep"]
    sites, names = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("site", "implementation"))
    figure = Figure(figsize=(11, 1 + 3 * len(sites)), layout="constrained")
    axes = figure.subplots(len(sites), 2, sharex=True, sharey=True, squeeze=False)
    colors = dict(zip(names, colormaps["tab10"].colors, strict=False))
    for panels, site in zip(axes, sites, strict=True):
        for panel, direction in zip(panels, ("forward", "backward"), strict=True):
            panel.axhline(bandwidth / 1e9, color="black", linewidth=1, label="copy")
            for name, stream in product(names, STREAMS):
                mine = [
                    row
                    for row in rows
                    if (row.site, row.direction, row.implementation, row.stream) == (site, direction, name, stream)
                ]
                panel.scatter(
                    [row.gb_per_s * row.ms / 1e3 for row in mine],
                    [row.gb_per_s for row in mine],
                    s=22,
                    marker="o" if stream == "bf16" else "s",
                    facecolor=colors[name] if stream == "bf16" else "none",
                    edgecolor=colors[name],
                    label=name if stream == "bf16" else None,
                )
            panel.set(title=f"{site}, {direction}", xscale="log", yscale="log")
            panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.set_ylabel("useful GB/s")
    for panel in axes[-1]:
        panel.set_xlabel("GB that the call must move")
    figure.suptitle(f"{title}; filled: bfloat16 stream, hollow: float32")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=130)


def commit() -> str:
    """Of the checkout, short."""
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-sizes", type=int, nargs="+", default=[1536, 3072, 5120])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768, 65536])
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--sites", nargs="+", choices=SITES, default=list(SITES))
    parser.add_argument("--sweep", action="store_true", help="try every launch choice (build with --sweep first)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="what else to measure")
    parser.add_argument("--output", type=Path, help="write all rows as JSON, and beside it a roofline picture")
    args = parser.parse_args()

    extension = Extension(LIBRARY)
    bandwidth = copy_bandwidth()
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "copy_gb_per_s": bandwidth / 1e9,
        "host_us": host_microseconds(extension),
    }
    rows: list[Row] = []
    keys = list(product(args.sites, args.streams, args.hidden_sizes, args.tokens))
    try:
        for part in ("ours", *args.peers):
            for key in keys:
                case = make_case(*key)
                if part == "ours":
                    rows += measure_ours(case, extension, "ours", bandwidth)
                if part == "ours" and isinstance(case, NormCase):
                    rows += measure_ours(case, extension.variant(d_tile=True), "dtile", bandwidth, "", ("backward",))
                    rows += sweep(case, extension, bandwidth) if args.sweep else []
                if part != "ours":
                    for name, function in peers(case, part).items():
                        rows += measure_peer(case, function, name, bandwidth)
                    torch._dynamo.reset()
                if args.output:
                    args.output.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))
                del case
    finally:
        print(json.dumps(facts))
        print(table(rows))
        print(memory_table(rows))
        if args.output and rows:
            title = f"{facts['gpu']}, {facts['date']}, {facts['commit']}"
            plot_roofline(rows, bandwidth, args.output.with_suffix(".png"), title)


if __name__ == "__main__":
    main()
