"""Text encoders: captions to embeddings. Embeddings are stored trimmed to their length and padded by the model."""

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

_END = "</s>"


class TextEncoder(Protocol):
    """What preparation and sampling need of a text encoder."""

    name: str
    dim: int
    max_len: int

    def encode(self, captions: Sequence[str]) -> list[np.ndarray]:
        """One float32 [len, dim] per caption, 1 <= len <= max_len."""


class HashTextEncoder:
    """Deterministic embedder without weights: a random vector per word, plus its position.

    Words are runs of letters and digits in lower case; an end mark closes every caption, so the empty caption has one
    row. Equal words have equal vectors on every machine, which is all that a small model needs to tell captions apart.

    Args:
        dim: Length of one embedding; even.
        max_len: Rows of the longest embedding, end mark included; further words are dropped.

    Raises:
        ValueError: If `dim` is not a positive even number or `max_len` is below 1.
    """

    def __init__(self, dim: int = 64, max_len: int = 32):
        if dim < 2 or dim % 2:
            raise ValueError(f"text dim {dim} must be a positive even number")
        if max_len < 1:
            raise ValueError(f"text max_len {max_len} must be at least 1")
        self.name = f"hash-{dim}-{max_len}"
        self.dim = dim
        self.max_len = max_len

    def encode(self, captions: Sequence[str]) -> list[np.ndarray]:
        """One float32 [len, dim] per caption, 1 <= len <= max_len, variance about 1 per element."""
        return [self._encode_one(caption) for caption in captions]

    def _encode_one(self, caption: str) -> np.ndarray:
        words = [*re.findall(r"\w+", caption.lower())[: self.max_len - 1], _END]
        vectors = np.stack([_word_vector(word, self.dim) for word in words])
        # Word and position weigh 0.8 and 0.6: 0.8^2 + 0.6^2 = 1 keeps the variance.
        return (0.8 * vectors + 0.6 * _positions(len(words), self.dim)).astype(np.float32)


@lru_cache(maxsize=65536)
def _word_vector(word: str, dim: int) -> np.ndarray:
    key = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(dim)


def _positions(length: int, dim: int) -> np.ndarray:
    """Sinusoids of unit variance, [length, dim]."""
    angles = np.arange(length)[:, None] * 100.0 ** (-np.arange(dim // 2) / (dim // 2))
    return np.sqrt(2.0) * np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
