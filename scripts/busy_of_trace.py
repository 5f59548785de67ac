"""Busy seconds of a profiled run by its trace, beside those that the run measured itself.

python -m scripts.busy_of_trace runs/quickstart/profile/*.trace.json.gz
"""

import argparse
import gzip
import json
import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def busy_of_trace(path: Path) -> list[dict[str, Any]]:
    """Busy seconds of each step and micro-batch as its trace tells them, beside what `StepTimer` measured.

    A `busy` span of the host launches kernels; on a GPU the span lasts from the start of the first to the end of the
    last of them, NCCL's own left out, on a CPU as long as the host is in it.

    Returns:
        Rows of `step`, `micro_batch`, `timer_s`, `trace_s`, and `kernel_s`: the part of `trace_s` in which a kernel
        ran, None on a CPU.

    Raises:
        ValueError: If the trace has no such marks, or is cut off.
    """
    try:
        with gzip.open(path, "rt") as file:
            trace = json.load(file)
    except (EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a whole trace: {error}") from error
    if "busy_s" not in trace:
        raise ValueError(f"{path}: not a trace of a run (profile.steps): it lacks `busy_s`")
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels = _kernels_by_correlation(events)
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    launches: dict[int, list[tuple[float, int]]] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["args"].get("correlation") in kernels:
            launches.setdefault(event["tid"], []).append((event["ts"], event["args"]["correlation"]))
    for of_thread in launches.values():
        of_thread.sort()
    rows = []
    for step, timer_s in trace["busy_s"].items():
        inside = _within(marks, next(mark for mark in marks if mark["name"] == f"step {step}"))
        for g, measured in enumerate(timer_s):
            micro_batch = next(mark for mark in inside if mark["name"] == f"micro_batch {g}")
            spans = [mark for mark in _within(inside, micro_batch) if mark["name"] == "busy"]
            row = {"step": int(step), "micro_batch": g, "timer_s": measured, "kernel_s": None}
            row["trace_s"] = sum(span["dur"] for span in spans) / 1e6
            if kernels:
                ran = [[kernels[number] for number in _launched_in(span, launches)] for span in spans]
                row["trace_s"] = sum(max(end for _, end in ks) - min(ks)[0] for ks in ran if ks) / 1e6
                row["kernel_s"] = sum(_union(ks) for ks in ran) / 1e6
            rows.append(row)
    return rows


def _launched_in(span: dict[str, Any], launches: dict[int, list[tuple[float, int]]]) -> list[int]:
    """Correlation numbers of what the span's thread launched in it; `launches` are by thread, in order of time."""
    here = launches.get(span["tid"], [])
    first, last = (bisect_left(here, (end, -1)) for end in (span["ts"], span["ts"] + span["dur"]))
    return [number for _, number in here[first:last]]


def _kernels_by_correlation(events: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """Start and end in microseconds of what the GPU ran, by the number that its launch has too."""
    return {
        event["args"]["correlation"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "nccl" not in event["name"].lower()
    }


def _within(marks: list[dict[str, Any]], outer: dict[str, Any]) -> list[dict[str, Any]]:
    return [mark for mark in marks if outer["ts"] <= mark["ts"] <= outer["ts"] + outer["dur"]]


def _union(intervals: list[tuple[float, float]]) -> float:
    """Length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path, help="files of RUN/profile")
    for path in parser.parse_args(arguments).traces:
        try:
            rows = busy_of_trace(path)
        except (OSError, ValueError) as error:
            sys.exit(f"busy_of_trace: {error}")
        print(f"{path.name}\n  step  micro-batch  timer s  trace s  apart  kernels run")
        for row in rows:
            _print_row(f"{row['step']:6d}  {row['micro_batch']:11d}", row["timer_s"], row["trace_s"], row["kernel_s"])
        kernel_s = None if rows[0]["kernel_s"] is None else sum(row["kernel_s"] for row in rows)
        _print_row(f"{'all':>6}  {'':11}", sum(r["timer_s"] for r in rows), sum(r["trace_s"] for r in rows), kernel_s)


def _print_row(name: str, timer_s: float, trace_s: float, kernel_s: float | None) -> None:
    apart = f"{timer_s / trace_s - 1:+.2%}" if trace_s else "-"
    share = "-" if kernel_s is None or not trace_s else f"{kernel_s / trace_s:.1%}"
    print(f"{name}  {timer_s:7.4f}  {trace_s:7.4f}  {apart:>6}  {share:>11}")


if __name__ == "__main__":
    main()
