"""Compiles the CUDA kernels into one shared library, beside this file; run as `python -m adaptiveload.kernels.build`.

The library has a C interface, links neither Python nor PyTorch, and the CUDA runtime statically: one file serves all
versions of them, and it loads on machines without a GPU. Needs nvcc and the standard library only, so that `setup.py`
can use it in an isolated build environment.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "libadaln.so"
# Machine code for these, and PTX of the last for what comes after it.
ARCHITECTURES = "8.0;9.0;10.0+PTX"


def find_nvcc() -> str | None:
    """Of $CUDA_HOME, the path, or /usr/local/cuda; None if there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [f"{home}/bin/nvcc"] if home else []
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def architecture_flags(architectures: str | None) -> list[str]:
    """Nvcc's flags for a list such as "8.0;9.0+PTX", the form of $TORCH_CUDA_ARCH_LIST.

    Never asks the GPU of the building machine, which need not be the one that runs the kernels.

    Raises:
        ValueError: If an entry is not a number such as 9.0, with or without +PTX.
    """
    names = re.split(r"[;, ]+", (architectures or ARCHITECTURES).strip())
    flags = []
    for name in names:
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", name)
        if match is None:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST has {name!r}; write numbers, such as 8.0;9.0+PTX")
        number = match[1] + match[2] + match[3]
        kinds = f"[sm_{number},compute_{number}]" if match[4] else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code={kinds}"]
    return flags


def build(
    output: Path = LIBRARY,
    architectures: str | None = None,
    flags: tuple[str, ...] = (),
    jobs: int = 0,
    sources: Sequence[Path] | None = None,
) -> str:
    """Compile the sources side by side and link them; what ptxas said about registers and spills.

    Args:
        output: The shared library.
        architectures: As $TORCH_CUDA_ARCH_LIST, which is taken where this is None.
        flags: Further flags of nvcc.
        jobs: Compilers at a time; as many as there are processors by default.
        sources: Of the library; all by default.

    Raises:
        RuntimeError: If there is no nvcc, or it fails.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc: install the CUDA toolkit, or set CUDA_HOME to the folder that has bin/nvcc")
    targets = architecture_flags(architectures or os.environ.get("TORCH_CUDA_ARCH_LIST"))
    command = [nvcc, "-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-Xptxas", "-v", *targets, *flags]
    sources = sources or sorted(SOURCES.glob("*.cu"))
    with tempfile.TemporaryDirectory() as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            commands = [[*command, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
            report = "".join(pool.map(_run, commands))
        partial = output.with_suffix(f".{os.getpid()}.tmp")  # never a half-written library
        _run([nvcc, "-shared", "-cudart", "static", *targets, *map(str, objects), "-o", str(partial)])
        partial.replace(output)
    return report


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stderr


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels; needs nvcc, no GPU.")
    parser.add_argument("--architectures", help=f'such as "9.0"; $TORCH_CUDA_ARCH_LIST, or {ARCHITECTURES} by default')
    parser.add_argument("--sweep", action="store_true", help="also what benchmark_kernels --sweep tries")
    parser.add_argument("--jobs", type=int, default=0, help="compilers at a time; all processors by default")
    args = parser.parse_args()
    flags = ("-DADALN_SWEEP",) if args.sweep else ()
    report = build(architectures=args.architectures, flags=flags, jobs=args.jobs)
    spills = re.findall(r"(\d+) bytes spill stores", report)
    print(f"{LIBRARY}: {len(spills)} kernels, {sum(map(int, spills))} bytes of spill stores")


if __name__ == "__main__":
    sys.exit(main())
