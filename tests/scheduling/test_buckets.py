import numpy as np
import pytest

from adaptiveload.scheduling.buckets import bucket_batch_size


def test_batch_size_at_exact_edges():
    for seq_len in (1560, 3510, 32_760):
        for size in (1, 3, 7, 30):
            assert bucket_batch_size(seq_len, seq_len * size) == size
            assert bucket_batch_size(seq_len, seq_len * size - 1) == max(1, size - 1)
            for exponent in (1.0, 1.22, 1.45, 1.85, 2.0):
                limit = size * float(seq_len) ** exponent
                for rounded in (limit, np.nextafter(limit, 0), np.nextafter(limit, np.inf)):
                    assert bucket_batch_size(seq_len, 10**9, rounded, exponent) == size
                assert bucket_batch_size(seq_len, 10**9, limit * 0.999, exponent) == max(1, size - 1)


def test_batch_size_takes_the_tighter_limit():
    assert bucket_batch_size(1560, 48_000, 2.3e9, 2.0) == 30  # memory
    assert bucket_batch_size(12_000, 48_000, 3.5e8, 2.0) == 2  # compute
    assert bucket_batch_size(32_760, 48_000, 1.0e9, 2.0) == 1  # neither allows one


@pytest.mark.parametrize(
    "bad", [(0, 10, 1.0, 1.0), (-4, 10, 1.0, 1.0), (4, 0, 1.0, 1.0), (4, 10, 0.0, 1.0), (4, 10, 1.0, 0)]
)
def test_batch_size_refuses_what_is_not_positive(bad):
    with pytest.raises(ValueError, match="must be positive"):
        bucket_batch_size(*bad)
