"""The benchmark compares implementations of the same operation, and counts what they keep."""

from contextlib import nullcontext

import pytest
import torch

from adaptiveload.kernels.benchmark_cases import QkCase, Row, leaves_of, make_case
from scripts.benchmark_kernels import (
    NUM_REPLAYS,
    NUM_WARM_UP,
    measure_queued,
    memory_table,
    peers,
    plot_roofline,
    saved_bytes_per_element,
    table,
)


@pytest.mark.parametrize("site", ["norm", "gated", "qk"])
@pytest.mark.parametrize("stream", ["bf16", "fp32"])
def test_peers_compute_the_same_and_keep_more(site, stream):
    case = make_case(site, stream, 256, 64, device="cpu")
    wanted, _ = case.sent(0, case.ours(*case.arguments(0)))
    ours = saved_bytes_per_element(case, case.ours)
    functions = peers(case, "eager")
    assert len(functions) >= 2
    for name, function in functions.items():
        arguments = leaves_of(case, 0, name)
        results, sent = case.sent(0, function(*arguments))
        torch.autograd.grad(results, [leaf for leaf in arguments if leaf is not None and leaf.requires_grad], sent)
        if name.endswith("_affine"):  # another operation: a norm without modulation
            continue
        for result, want in zip(results, wanted, strict=True):
            assert result.dtype == want.dtype
            # Up to three roundings to bfloat16 in the forms that round more often; of numbers up to 16.
            torch.testing.assert_close(result.float(), want.float(), rtol=0.02, atol=0.06)
        assert saved_bytes_per_element(case, function) > 1.3 * ours


@pytest.mark.parametrize(("site", "kept"), [("norm", 4.0), ("gated", 6.0), ("qk", 4.0)])
def test_bytes_kept_by_ours(site, kept):
    """bfloat16: the stream and the result; y too where there is a gate; queries and keys before and after."""
    case = make_case(site, "bf16", 256, 64, device="cpu")
    assert kept <= saved_bytes_per_element(case, case.ours) <= kept + 0.1


@pytest.mark.parametrize("site", ["norm", "gated", "qk"])
def test_the_operators_are_called_as_autograd_calls_them(site):
    case = make_case(site, "bf16", 256, 64, device="cpu")
    leaves = leaves_of(case, 0, "ours")
    results, sent = case.sent(0, case.ours(*leaves))
    grads = torch.autograd.grad(results, [leaves[0], leaves[1] if site == "qk" else leaves[3]], sent)
    called = case.call_backward(0, *case.statistics()[0])
    if site != "gated":  # which takes x for what was normalised
        torch.testing.assert_close(called[0], grads[0], rtol=0.01, atol=1e-3)
    assert called[0].shape == grads[0].shape
    (first, *_) = case.call_forward(0)
    assert torch.equal(first, results[0])


def test_backward_of_others_is_queued_whole_before_the_gpu_begins_and_rotates(monkeypatch):
    """Or small sizes would be charged the host's time, and would find their inputs in the cache."""
    did = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            did.append("record")

        def synchronize(self):
            did.append("synchronize")

        def elapsed_time(self, _end):
            return float(did.count("synchronize"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: did.append("wait"))
    median = measure_queued(did.append, 3, None)
    count = NUM_WARM_UP + NUM_REPLAYS
    assert did == [word for i in range(count) for word in ("wait", "record", i % 3, "record", "synchronize")]
    assert median == NUM_WARM_UP + NUM_REPLAYS // 2 + 1


def test_tables_and_picture(tmp_path):
    rows = []
    for site in ("norm", "qk"):
        for direction in ("forward", "backward"):
            for name, ms, kept in (("ours", 0.1, 4.0), ("diffusers", 1.1, 10.0)):
                rows.append(Row(site, "bf16", 5120, 65536, direction, name, ms, ms * 10, 4000 * 0.1 / ms))
                rows[-1].saved_bytes_per_element = kept if direction == "backward" else None
    assert "norm  bf16 D5120 N65536 bac: ours 100us x1.00 4.0B diffusers 1100us x11.00 10.0B" in table(rows)
    text = memory_table(rows)
    assert "norm bf16: keeps 4.00 bytes an element, diffusers 10.00" in text
    assert "D5120 1.97 (the paper: 4.8)" in text
    assert "D5120 3.93" in text  # of queries and keys
    plot_roofline(rows, 4.3e12, tmp_path / "roofline.png", "test")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000


def test_bytes_of_the_qk_case_are_those_of_its_tensors():
    case = QkCase("qk", "bf16", 256, 64, device="cpu")
    tensors = [case.q[0], case.k[0], *case.call_forward(0)[:2]]
    assert case.forward_bytes == sum(tensor.nbytes for tensor in tensors)
