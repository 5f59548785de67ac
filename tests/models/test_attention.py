"""Packed attention against a softmax written out for each sample."""

import pytest
import torch

from adaptiveload.models.attention import (
    AttentionBatch,
    JointPlans,
    VarlenBatch,
    attention_batches,
    joint_attention_calls,
    packed_attention,
)


def offsets(lengths) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def plain_attention(query, key, value, query_lens, key_lens) -> torch.Tensor:
    outputs = []
    for q, k, v in zip(query.split(query_lens), key.split(key_lens), value.split(key_lens), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
    return torch.cat(outputs)


def test_batches_are_powers_of_two_in_order():
    assert attention_batches(offsets([4] * 13 + [9])) == [
        AttentionBatch(8, 4, 4),
        AttentionBatch(4, 4, 4),
        AttentionBatch(1, 4, 4),
        AttentionBatch(1, 9, 9),
    ]
    assert attention_batches(offsets([4, 4, 4]), key_len=7) == [AttentionBatch(2, 4, 7), AttentionBatch(1, 4, 7)]


@pytest.mark.parametrize("lengths", [[5], [3, 3], [2, 2, 2, 7, 7, 1]])
@pytest.mark.parametrize("key_len", [None, 4])
def test_forward_and_gradients_equal_plain_attention(lengths, key_len):
    generator = torch.Generator().manual_seed(0)
    key_lens = lengths if key_len is None else [key_len] * len(lengths)
    sizes = (sum(lengths), sum(key_lens), sum(key_lens))
    tensors = [torch.randn(size, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]
    actual = packed_attention(*tensors, attention_batches(offsets(lengths), key_len))
    expected = plain_attention(*tensors, lengths, key_lens)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)  # float64, sums of at most 8
    weights = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(actual, tensors, weights)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, tensors, weights), strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


def test_joint_lengths_that_come_again_are_planned_while_there_is_room():
    plans, cpu = JointPlans(max_plans=2), torch.device("cpu")

    def calls(*lengths: int) -> list:
        split = plans.split(attention_batches(offsets(lengths)), cpu)
        assert sum(call.num_queries for call in split) == sum(call.num_keys for call in split) == sum(lengths)
        return [call if isinstance(call, AttentionBatch) else call.offsets.tolist() for call in split]

    assert calls(5, 5, 5, 7) == [[0, 5, 10, 15, 22]]
    # Both of 5's calls are known now; 6 is new.
    assert calls(5, 5, 5, 6, 7) == [AttentionBatch(2, 5, 5), AttentionBatch(1, 5, 5), [0, 6, 13]]
    assert calls(6, 7) == [[0, 6, 13]], "no room"
    plans.add(AttentionBatch(1, 7, 7))
    assert calls(6, 7, 8) == [[0, 6], AttentionBatch(1, 7, 7), [0, 8]]


def test_evaluation_and_previews_plan_no_joint_lengths():
    plans, cpu = JointPlans(), torch.device("cpu")
    with torch.no_grad():
        for _ in range(3):
            plans.split(attention_batches(offsets([5])), cpu)
    assert [isinstance(call, VarlenBatch) for call in plans.split(attention_batches(offsets([5])), cpu)] == [True]
    with torch.no_grad():
        assert isinstance(plans.split(attention_batches(offsets([5])), cpu)[0], VarlenBatch)
    assert plans.split(attention_batches(offsets([5])), cpu) == [AttentionBatch(1, 5, 5)]


def test_without_a_gpu_every_joint_call_is_dense():
    lengths = offsets([3, 3, 4])
    for dtype in (torch.float32, torch.bfloat16):
        assert joint_attention_calls(lengths, torch.device("cpu"), dtype) == attention_batches(lengths)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_variable_length_calls_on_cuda_equal_plain_attention():
    lengths, generator = [64] * 3 + [77, 200], torch.Generator("cuda").manual_seed(0)
    sizes = (sum(lengths), 4, 128)
    tensors = [torch.randn(sizes, device="cuda", generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    plans = JointPlans(max_plans=1)
    for _ in range(2):
        calls = joint_attention_calls(offsets(lengths), torch.device("cuda"), torch.bfloat16, plans)
    assert [isinstance(call, VarlenBatch) for call in calls] == [False, True], "the first planned, the rest in one"
    actual = packed_attention(*tensors, calls)
    expected = plain_attention(*(tensor.float() for tensor in tensors), lengths, lengths)
    # As below; gradients are sums of hundreds of such terms, of size 0.2.
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=4e-3)
    weights = torch.randn(actual.shape, device="cuda", generator=generator)
    grads = torch.autograd.grad(actual, tensors, weights.bfloat16())
    for grad, wanted in zip(grads, torch.autograd.grad(expected, tensors, weights), strict=True):
        assert ((grad.float() - wanted.float()).norm() / wanted.float().norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_bf16_on_cuda_equals_plain_attention():
    lengths, generator = [64] * 3 + [200], torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(sum(lengths), 4, 128, device="cuda", generator=generator).bfloat16() for _ in range(3)]
    actual = packed_attention(*tensors, attention_batches(offsets(lengths)))
    expected = plain_attention(*(tensor.float() for tensor in tensors), lengths, lengths)
    # Outputs are averages of size 0.2; bfloat16 rounds the softmax and the result by 2**-9 each.
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=4e-3)
