import subprocess
import sys

import numpy as np
import pytest

from adaptiveload.data.text import HashTextEncoder


def test_equal_words_have_equal_vectors_but_for_the_position():
    encoder = HashTextEncoder(dim=64, max_len=32)
    cat_dog, dog_cat = encoder.encode(["A cat, a DOG", "a dog a cat"])
    assert cat_dog.shape == (5, 64)
    assert cat_dog.dtype == np.float32
    # Position is added, so the difference of two words at one place is that of the words alone.
    np.testing.assert_allclose(cat_dog[1] - dog_cat[1], -(cat_dog[3] - dog_cat[3]), atol=1e-5)
    np.testing.assert_array_equal(cat_dog[4], dog_cat[4])
    assert np.abs(cat_dog[1] - dog_cat[1]).max() > 0.5


def test_captions_do_not_influence_each_other():
    encoder = HashTextEncoder()
    together = encoder.encode(["red car", "", "a blue house by the sea"])
    for one, caption in zip(together, ["red car", "", "a blue house by the sea"], strict=True):
        np.testing.assert_array_equal(one, encoder.encode([caption])[0])


def test_the_empty_caption_has_one_row_and_long_ones_are_cut():
    encoder = HashTextEncoder(dim=8, max_len=4)
    null, long = encoder.encode(["", "one two three four five six"])
    assert null.shape == (1, 8)
    assert long.shape == (4, 8)
    short = encoder.encode(["one two three"])[0]
    np.testing.assert_array_equal(long, short)  # the end mark stays


def test_variance_is_about_one():
    words = " ".join(f"word{i}" for i in range(400))
    vectors = HashTextEncoder(dim=64, max_len=512).encode([words])[0]
    assert vectors.std() == pytest.approx(1, abs=0.05)  # 25,600 numbers: 0.05 is more than ten standard errors


def test_another_process_gives_the_same_numbers():
    code = (
        "from adaptiveload.data.text import HashTextEncoder as E; print(E(16).encode(['ein Café'])[0].tobytes().hex())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert output == HashTextEncoder(16).encode(["ein Café"])[0].tobytes().hex()


@pytest.mark.parametrize(("dim", "max_len"), [(0, 4), (7, 4), (8, 0)])
def test_bad_sizes_are_refused(dim, max_len):
    with pytest.raises(ValueError, match="text"):
        HashTextEncoder(dim, max_len)
