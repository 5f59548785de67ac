"""Where a GPU's time goes: kernels of one piece of work by time, and how long none of them ran."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME_WIDTH = 110


class Span(NamedTuple):
    """One kernel's time, in microseconds."""

    name: str
    start: float
    duration: float


def profiled_spans(work: Callable[[], object], device: torch.device) -> list[Span]:
    """Kernels that `work` runs on a GPU; on a CPU its operators, of which one may hold others."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = _ON_GPU if on_gpu else ("cpu_op",)
    return [Span(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in wanted and "dur" in e]


def idle_share_of(spans: Sequence[Span]) -> float:
    """Share of the time from the first start to the last end in which nothing ran."""
    if not spans:
        return 0.0
    ordered = sorted(spans, key=lambda span: span.start)
    first, end, busy = ordered[0].start, ordered[0].start, 0.0
    for span in ordered:
        stop = span.start + span.duration
        busy += max(stop - max(end, span.start), 0.0)
        end = max(end, stop)
    return 1 - busy / (end - first) if end > first else 0.0


def kernel_table(spans: Sequence[Span], most: int = 25) -> str:
    """The kernels that take most time, and the idle share, as text."""
    if not spans:
        return "no kernels were recorded\n"
    times: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        times[span.name].append(span.duration)
    total = sum(span.duration for span in spans)
    length = max(span.start + span.duration for span in spans) - min(span.start for span in spans)
    lines = [
        f"{length / 1e3:.2f} ms from the first kernel to the last, idle share {idle_share_of(spans):.3f}",
        f"{len(spans)} kernels of {total / 1e3:.2f} ms together",
        "",
        f"{'ms':>10} {'share':>6} {'calls':>6} {'us a call':>10}  kernel",
    ]
    for name, durations in sorted(times.items(), key=lambda pair: -sum(pair[1]))[:most]:
        taken = sum(durations)
        lines.append(
            f"{taken / 1e3:10.2f} {taken / total:6.1%} {len(durations):6d} {taken / len(durations):10.1f}  "
            f"{name[:_NAME_WIDTH]}"
        )
    return "\n".join(lines) + "\n"
