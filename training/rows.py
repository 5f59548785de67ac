"""JSONL files of a run, a row a step or more: what an earlier start left in them."""

import json
import math
import mmap
from collections.abc import Sequence
from pathlib import Path


def move_aside(paths: Sequence[Path]) -> str | None:
    """Give those of `paths` that exist a number behind their name, the same for all; what to say of it."""
    found = [path for path in paths if path.exists()]
    if not found:
        return None
    number = 1
    while any(path.with_name(f"{path.name}.{number}").exists() for path in paths):
        number += 1
    for path in found:
        path.rename(path.with_name(f"{path.name}.{number}"))
    names = ", ".join(path.name for path in found)
    return f"{found[0].parent}: the run begins anew, {names} of an earlier start are kept as NAME.{number}"


def drop_rows_from(path: Path, step: int) -> None:
    """Cut what an earlier try has written of `step` and later ones off the end of a JSONL file, if there is one.

    Rows are in the order of their steps. The file, which may have gigabytes, is read from its end.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as content:
            end = len(content)
            while end:
                begin = content.rfind(b"\n", 0, end - 1) + 1
                if _step_of(content[begin:end]) < step:
                    break
                end = begin
            is_torn = end > 0 and content[end - 1 : end] != b"\n"
        file.truncate(end)
        if is_torn:  # whole but for its end
            file.seek(end)
            file.write(b"\n")


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):  # a line torn by a crash
        return math.inf
