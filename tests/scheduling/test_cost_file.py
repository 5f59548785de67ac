from dataclasses import replace

import pytest

from adaptiveload.scheduling.cost import PowerCost, TwoTermCost
from adaptiveload.scheduling.cost_file import CostFile
from adaptiveload.scheduling.memory import MemoryModel

FILE = CostFile(
    TwoTermCost(1, 2, 3, 4, 5e-4),
    PowerCost(1, 2, 1.45),
    MemoryModel(6e9, 190e3, 9e6),
    gpu="NVIDIA H200",
    model={"hidden_size": 1536, "num_layers": 30},
    layout={"precision": "bf16", "meet": "step", "ranks": 2, "recompute": "full"},
    versions={"torch": "2.11.0+cu130"},
    fit={"worst_error": 0.05},
)
HERE = {
    "gpu": "NVIDIA H200",
    "model": {"hidden_size": 1536, "num_layers": 30},
    "layout": {"precision": "bf16", "meet": "step", "ranks": 8, "recompute": "full"},
    "versions": {"torch": "2.11.0"},
}


def test_file_comes_back_as_it_was_written(tmp_path):
    FILE.write(tmp_path / "cost.yaml", "Fitted here.\nTwo lines.")
    assert CostFile.read(tmp_path / "cost.yaml") == FILE
    assert (tmp_path / "cost.yaml").read_text().startswith("# Fitted here.\n# Two lines.\n")


def test_shipped_files_are_read():
    small = CostFile.read("configs/costs/wan_1_3b.yaml")
    assert small.law("two_term") == TwoTermCost(60_000, 60_000, 0, 23.07, 0.001659)
    assert small.law("power").exponent == 1.45
    assert CostFile.read("configs/costs/wan_14b.yaml").law("two_term").a_us == 300_000


def test_file_for_something_else_says_what_differs():
    assert FILE.mismatches(**HERE) == []  # more ranks than it was fitted on, and torch without its local part
    for change, words in (
        ({"gpu": "NVIDIA A100"}, "GPU NVIDIA H200, here NVIDIA A100"),
        ({"model": {"hidden_size": 5120, "num_layers": 30}}, "model hidden_size=1536, here 5120"),
        ({"layout": {**HERE["layout"], "recompute": "none"}}, "recompute full, here none"),
        ({"layout": {**HERE["layout"], "ranks": 1}}, "ranks 2, here 1"),
        ({"layout": {**HERE["layout"], "trained": "adapters of rank 4"}}, "trained all, here adapters of rank 4"),
        ({"layout": {**HERE["layout"], "compile": True}}, "compile False, here True"),
        ({"versions": {"torch": "2.13.0"}}, "torch 2.11.0.cu130, here 2.13.0"),
    ):
        (found,) = FILE.mismatches(**{**HERE, **change})
        assert found.replace("+", ".") == words
    unknown = replace(FILE, gpu="", versions={})
    assert len(unknown.mismatches(**HERE)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fit: {}", "no cost file"),
        ("[1, 2]", "no cost file"),
        ("two_term: {a_us: 1}", "two_term must give"),
        ("two_term: {a_us: -1, launch_floor_us: 0, c0_us: 0, b1_us: 1, b2_us: 0}", "a_us must be"),
        ("power: {a_us: x, b_us: 1, exponent: 1}", "power must give"),
        ("power: {a_us: 1, b_us: 1, exponent: 1}\nforn: 1", "unknown keys forn"),
        ("a: [", "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, message):
    (tmp_path / "cost.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        CostFile.read(tmp_path / "cost.yaml")


def test_missing_law_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        CostFile.read(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="no law 'power'"):
        replace(FILE, power=None).law("power")
    with pytest.raises(ValueError, match=r"cost\.law"):
        FILE.law("cubic")
