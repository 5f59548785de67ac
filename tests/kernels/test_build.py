"""The kernels compile without spilling, load without a GPU, and stay inside their memory."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from adaptiveload.kernels import backends
from adaptiveload.kernels.build import architecture_flags, build, find_nvcc
from adaptiveload.kernels.extension import Extension
from tests.kernels.conftest import SAME, build_emulated, only, sources_of

ROOT = Path(__file__).parent.parent.parent


def test_architectures():
    assert architecture_flags("9.0") == ["-gencode", "arch=compute_90,code=sm_90"]
    assert architecture_flags("8.0;9.0+PTX")[-1] == "arch=compute_90,code=[sm_90,compute_90]"
    assert len(architecture_flags(None)) == 6
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST has 'Hopper'"):
        architecture_flags("Hopper")


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "triples",
    [
        # What training runs, and the widest. Float16 takes the registers of bfloat16.
        [("bf16", "bf16", "bf16"), ("float", "bf16", "bf16"), ("float", "float", "float")],
        pytest.param(None, marks=pytest.mark.stress),
    ],
    ids=["some", "all"],
)
def test_kernels_do_not_spill_and_the_library_loads(tmp_path, triples):
    flags, sources = (only(triples, tmp_path), sources_of(triples)) if triples else ((), None)
    report = build(tmp_path / "libadaln.so", architectures="9.0", flags=flags, sources=sources)
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill stores", report)]
    assert len(spills) > 40
    assert not any(spills)
    extension = Extension(tmp_path / "libadaln.so")  # checks that both sides agree on the parameters
    with pytest.raises(RuntimeError, match="adaln_"):
        extension.check(99)  # no such GPU anywhere: an error in words, not a crash


def test_emulated_kernels_stay_inside_their_memory(tmp_path):
    """AddressSanitizer sees every access of the kernels: tensors, shared memory, arrays in registers."""
    library = build_emulated(
        tmp_path, "-fsanitize=address", *only(SAME, tmp_path), sources=sources_of(SAME), sweep=False
    )
    # libstdc++ too, or the sanitizer finds no exceptions to intercept.
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.kernels.sanitized", str(library), "cpu"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "ran 72 cases" in result.stdout


def test_explicit_request_never_falls_back(monkeypatch, tmp_path):
    backends._cuda_backend.cache_clear()
    monkeypatch.setattr(backends, "LIBRARY", tmp_path / "missing.so")
    with pytest.raises(ValueError, match=r"ADAPTIVELOAD_KERNELS=cuda, but the kernels cannot be used: .*missing"):
        backends._cuda_backend("cuda", 0)
    with pytest.raises(ValueError, match="ADAPTIVELOAD_KERNELS is 'triton'; it is one of cuda, cuda_dtile, reference"):
        backends._cuda_backend("triton", 0)


def test_automatic_choice_says_why_it_falls_back(monkeypatch, tmp_path, caplog):
    backends._cuda_backend.cache_clear()
    monkeypatch.setattr(backends, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.delenv("RANK", raising=False)
    for _ in range(2):
        assert backends._cuda_backend("", 0) is backends.reference
    backends._cuda_backend.cache_clear()
    (record,) = caplog.records
    assert "runs as reference (the kernels cannot be used" in record.message
