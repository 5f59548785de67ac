"""Measures AdaLN on one GPU against its byte floor and against other ways to compute it.

Each measurement is a CUDA graph of several calls that rotate over buffers larger than the L2 cache; the time is the
median over replays. The floor is what the call must read and write, at the bandwidth that a copy reaches here.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

# pytorch#193061: with it, compiled backward of modulated norms is wrong in 2.10 to 2.14.
os.environ.setdefault("TORCHINDUCTOR_MIX_ORDER_REDUCTION", "0")

import torch
from torch.nn import functional as F  # noqa: N812 (the name that PyTorch's own documentation uses)

from adaptiveload.kernels import backends
from adaptiveload.kernels.adaln import adaln
from adaptiveload.kernels.build import LIBRARY
from adaptiveload.kernels.extension import Extension, Launch

STREAMS = {"bf16": torch.bfloat16, "fp32": torch.float32}
SITES = ("norm", "gated")
PEERS = ("eager", "compile")
NUM_REPLAYS = 7


@dataclass
class Row:
    """One measurement."""

    site: str
    stream: str
    hidden_size: int
    num_tokens: int
    direction: str
    implementation: str
    ms: float
    floor_ratio: float
    gb_per_s: float
    launch: str = ""


class Case:
    """Inputs of one site in enough copies that none is in the L2 cache when it is read."""

    def __init__(self, site: str, stream: str, hidden_size: int, num_tokens: int):
        self.site, self.stream, self.hidden_size, self.num_tokens = site, stream, hidden_size, num_tokens
        self.dtype = STREAMS[stream]
        num_elements, width = num_tokens * hidden_size, self.dtype.itemsize
        is_gated = site == "gated"
        # x and h; with the gate y and x_out too. Backward: x, dh, dx; with the gate y, dx_out, dy too.
        self.forward_bytes = num_elements * (width + 2 + is_gated * (2 + width))
        self.backward_bytes = num_elements * (2 * width + 2 + is_gated * (2 + width + 2))
        self.num_copies = max(2, -(-400_000_000 // self.forward_bytes))
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        tokens = (num_tokens, hidden_size)
        self.x = [random(*tokens, dtype=self.dtype) for _ in range(self.num_copies)]
        self.y = [random(*tokens, dtype=torch.bfloat16) if is_gated else None for _ in range(self.num_copies)]
        self.dh = [random(*tokens, dtype=torch.bfloat16) for _ in range(self.num_copies)]
        self.dx_out = [random(*tokens, dtype=self.dtype) if is_gated else None for _ in range(self.num_copies)]
        self.gate = random(1, hidden_size) if is_gated else None
        self.scale, self.shift = random(1, hidden_size), random(1, hidden_size)
        self.offsets = torch.tensor([0, num_tokens], dtype=torch.int32)

    def row(self, direction: str, implementation: str, ms: float, bandwidth: float, launch: str = "") -> Row:
        """A measurement of this case."""
        num_bytes = self.forward_bytes if direction == "forward" else self.backward_bytes
        ratio, rate = ms / 1e3 * bandwidth / num_bytes, num_bytes / ms / 1e6
        where = (self.site, self.stream, self.hidden_size, self.num_tokens)
        return Row(*where, direction, implementation, ms, ratio, rate, launch)

    # The kernels themselves, without autograd.

    def call_forward(self, i: int) -> tuple[torch.Tensor, ...]:
        """Forward on copy i."""
        return torch.ops.adaptiveload.adaln(
            self.x[i], self.y[i], self.gate, self.scale, self.shift, None, None, self.offsets, 1e-6, torch.bfloat16
        )

    def call_backward(self, i: int, mean: torch.Tensor, rstd: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Backward on copy i, of which x is taken as what was normalised."""
        wanted = [self.gate is not None, self.gate is not None, True, True, False, False]
        return torch.ops.adaptiveload.adaln_backward(
            self.dh[i], self.dx_out[i], self.x[i], self.y[i], self.gate, self.scale, self.shift, None, None,
            mean, rstd, self.offsets, wanted, torch.bfloat16,
        )  # fmt: skip

    def statistics(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Mean and reciprocal deviation of every copy."""
        with torch.no_grad():
            results = []
            for i in range(self.num_copies):
                wide = self.x[i].float()
                results.append((wide.mean(1), (wide.var(1, correction=0) + 1e-6).rsqrt()))
            return results


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
    for _ in range(NUM_REPLAYS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / num_calls)
    return sorted(times[1:])[NUM_REPLAYS // 2]


def copy_bandwidth() -> float:
    """Bytes a second of a kernel that copies, read and written: the faster of a copy and a negation.

    In a graph, PyTorch's copy of contiguous memory may go through a copy engine, at two thirds of the rate.
    """
    source = torch.randn(512 * 1024 * 1024, device="cuda")
    target = torch.empty_like(source)
    calls = (lambda _: target.copy_(source), lambda _: torch.neg(source, out=target))
    return 2 * source.nbytes / min(measure(call, 1) for call in calls) * 1e3


# ---- other ways ------------------------------------------------------------------------------------------------------


def diffusers_form(x, y, gate, scale, shift):
    """As `WanTransformerBlock` writes it."""
    if y is not None:
        x = (x.float() + y * gate).type_as(x)
    h = F.layer_norm(x.float(), x.shape[-1:], eps=1e-6)
    return (h * (1 + scale) + shift).to(torch.bfloat16), x


def bf16_form(x, y, gate, scale, shift):
    """Norm and modulation in the dtype of x."""
    if y is not None:
        x = x + (y * gate.to(y.dtype)).to(x.dtype)
    h = F.layer_norm(x, x.shape[-1:], eps=1e-6)
    return (h * (1 + scale.to(x.dtype)) + shift.to(x.dtype)).to(torch.bfloat16), x


def native_affine(x, y, gate, scale, shift):
    """One affine LayerNorm, which is not the same operation: what PyTorch's own kernel reaches."""
    return F.layer_norm(x, x.shape[-1:], scale[0], shift[0], 1e-6), x


def peers(case: Case, part: str) -> dict[str, Callable]:
    """Other implementations of this case, by name."""
    functions = {"diffusers": diffusers_form, "eager_bf16": bf16_form}
    if part == "compile":
        functions = {"compile": torch.compile(diffusers_form, dynamic=False)}
    elif case.site == "norm":
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
    parts = {"gate": case.gate, "scale": case.scale, "shift": case.shift}
    if name == "native_affine":
        parts = {key: part if part is None else part.to(case.dtype) for key, part in parts.items()}
    parts = {key: part if part is None else part.clone().requires_grad_() for key, part in parts.items()}

    def forward(i: int):
        with torch.no_grad():
            return function(case.x[i], case.y[i], **parts)

    rows = [case.row("forward", name, measure(forward, case.num_copies), bandwidth)]
    stream = torch.cuda.Stream()
    graphs = []
    num_copies = min(case.num_copies, 2)  # what eager forms keep for backward is large
    with torch.cuda.stream(stream):
        for i in range(num_copies):
            leaves = [case.x[i].detach().requires_grad_(), *(part for part in parts.values() if part is not None)]
            y = None if case.y[i] is None else case.y[i].detach().requires_grad_()
            h, x_out = function(leaves[0], y, **parts)
            dh = case.dh[i].to(h.dtype)
            if y is None:
                graphs.append(([h], leaves, [dh]))
            else:
                graphs.append(([h, x_out], [*leaves, y], [dh, case.dx_out[i]]))
    torch.cuda.synchronize()

    def backward(i: int):
        outputs, inputs, sent = graphs[i]
        return torch.autograd.grad(outputs, inputs, sent, retain_graph=True)

    rows.append(case.row("backward", name, _measure_on(backward, num_copies, stream), bandwidth))
    return rows


def _measure_on(call: Callable[[int], object], num_copies: int, stream: torch.cuda.Stream) -> float:
    """As `measure`, without a graph: autograd runs on the stream of its forward."""
    times = []
    with torch.cuda.stream(stream):
        for repeat in range(NUM_REPLAYS + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call(repeat % num_copies)
            start.record()
            call((repeat + 1) % num_copies)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times[2:])[NUM_REPLAYS // 2]


# ---- ours ------------------------------------------------------------------------------------------------------------


def measure_ours(
    case: Case, backend: object, name: str, bandwidth: float, launch: str = "", directions=("forward", "backward")
) -> list[Row]:
    """The operators themselves, without autograd."""
    statistics = case.statistics() if "backward" in directions else []
    calls = {"forward": case.call_forward, "backward": lambda i: case.call_backward(i, *statistics[i])}
    with backends.use(backend):
        return [
            case.row(direction, name, measure(calls[direction], case.num_copies), bandwidth, launch)
            for direction in directions
        ]


def sweep(case: Case, extension: Extension, bandwidth: float) -> list[Row]:
    """Every launch choice that was compiled; needs a build with --sweep."""
    rows = []
    for vectors, num_rows, stages, blocks in product((1, 2), (1, 2), (2, 4), (0, 1, 2)):
        launch = Launch(vectors, num_rows, stages, blocks, 1)
        for direction in ("forward", "backward"):
            try:
                variant = extension.variant(launch=launch)
                rows += measure_ours(
                    case, variant, "sweep", bandwidth, f"v{vectors}r{num_rows}s{stages}b{blocks}", (direction,)
                )
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
    """One line a case and direction: microseconds and ratio to the floor, ours first."""
    lines = []
    cases = dict.fromkeys((r.site, r.stream, r.hidden_size, r.num_tokens, r.direction) for r in rows)
    for key in cases:
        mine = [r for r in rows if (r.site, r.stream, r.hidden_size, r.num_tokens, r.direction) == key]
        cells = [
            f"{r.implementation} {r.ms * 1e3:.0f}us x{r.floor_ratio:.2f}" for r in mine if r.implementation != "sweep"
        ]
        best = sorted((r for r in mine if r.implementation == "sweep"), key=lambda r: r.ms)[:3]
        cells += [f"[{r.launch} x{r.floor_ratio:.2f}]" for r in best]
        lines.append(f"{key[0]:5} {key[1]} D{key[2]} N{key[3]} {key[4][:3]}: " + " ".join(cells))
    return "\n".join(lines)


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
    parser.add_argument("--output", type=Path, help="write all rows as JSON")
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
                case = Case(*key)
                if part == "ours":
                    rows += measure_ours(case, extension, "ours", bandwidth)
                    rows += measure_ours(case, extension.variant(d_tile=True), "dtile", bandwidth, "", ("backward",))
                    rows += sweep(case, extension, bandwidth) if args.sweep else []
                else:
                    for name, function in peers(case, part).items():
                        rows += measure_peer(case, function, name, bandwidth)
                    torch._dynamo.reset()
                if args.output:
                    args.output.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))
                del case
    finally:
        print(json.dumps(facts))
        print(table(rows))


if __name__ == "__main__":
    main()
