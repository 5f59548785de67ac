"""Packed attention against a softmax written out for each sample."""

import pytest
import torch

from adaptiveload.models.attention import AttentionBatch, attention_batches, packed_attention


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_bf16_on_cuda_equals_plain_attention():
    lengths, generator = [64] * 3 + [200], torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(sum(lengths), 4, 128, device="cuda", generator=generator).bfloat16() for _ in range(3)]
    actual = packed_attention(*tensors, attention_batches(offsets(lengths)))
    expected = plain_attention(*(tensor.float() for tensor in tensors), lengths, lengths)
    # Outputs are averages of size 0.2; bfloat16 rounds the softmax and the result by 2**-9 each.
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=4e-3)
