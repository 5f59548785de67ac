"""The kernels for tests: emulated on the CPU, and on a GPU where there is one."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from adaptiveload.kernels import backends
from adaptiveload.kernels.build import LIBRARY, SOURCES
from adaptiveload.kernels.extension import Extension

EMULATION = Path(__file__).parent / "emulation"


Triple = tuple[str, str, str]  # dtypes of x, y and h, as csrc/instances.cuh names them
SAME: list[Triple] = [("float", "float", "float"), ("bf16", "bf16", "bf16")]


def sources_of(triples: list[Triple]) -> list[Path]:
    names = ["library", "qk_norm_rope", *(f"rows_{'_'.join(triple)}" for triple in triples)]
    return [SOURCES / f"{name}.cu" for name in names]


def only(triples: list[Triple], folder: Path) -> tuple[str, str]:
    """Flags for a library that has fast AdaLN kernels for these dtypes only."""
    calls = " ".join(f"macro({', '.join(triple)})" for triple in triples)
    header = folder / "triples.h"
    header.write_text(f"#define FOR_EACH_TRIPLE(macro) {calls}\n")
    return "-include", str(header)


def build_emulated(folder: Path, *flags: str, sources: list[Path] | None = None, sweep: bool = True) -> Path:
    """The kernels' own sources, compiled by g++ for the CPU: a library with the interface of the CUDA one.

    With `sweep` a few dtypes have also the layouts that are not kept.
    """
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-w", "-DADALN_EMULATE", *flags]
    command += [f"-I{EMULATION}", f"-I{SOURCES}"]
    swept = sources_of(SAME) if sweep else []
    sources = sources or sorted(SOURCES.glob("*.cu"))
    assert set(sources) >= set(swept)
    objects = [folder / f"{source.stem}.o" for source in sources]

    def compile_one(source: Path, target: Path) -> None:
        more = ["-DADALN_SWEEP"] if source in swept else []
        subprocess.run([*command, *more, "-x", "c++", "-c", str(source), "-o", str(target)], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources, objects))
    library = folder / "libadaln_emulated.so"
    subprocess.run(["g++", "-shared", *flags, *map(str, objects), "-o", str(library)], check=True)
    return library


@dataclass(frozen=True)
class Kernels:
    extension: Extension
    device: str

    def to(self, inputs: dict) -> dict:
        return {name: t if name == "segment_offsets" else t.to(self.device) for name, t in inputs.items()}


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Extension:
    """Built once, also for several workers of pytest-xdist: their folders lie side by side."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "emulated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = shared / "emulated"
        if not folder.exists():
            folder.mkdir()
            build_emulated(folder)
    return Extension(folder / "libadaln_emulated.so")


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The kernels on one device; they compute every AdaLN call of the test."""
    if request.param == "emulated":
        kernels = Kernels(request.getfixturevalue("emulated"), "cpu")
    else:
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        kernels = Kernels(Extension(LIBRARY), "cuda")  # python -m adaptiveload.kernels.build
        kernels.extension.check(0)
    with backends.use(kernels.extension):
        yield kernels
