"""Columns of strings as Arrow arrays: millions of them in tens of bytes each, shared by forked processes untouched."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

_HASH_ROWS = 2**20


class StringColumn(Sequence[str]):
    """Read-only column over one Arrow array of strings, plain or dictionary-encoded."""

    def __init__(self, array: pa.Array) -> None:
        self.array = array

    @classmethod
    def of(cls, values: Any) -> "StringColumn":
        """Column of an Arrow array or any sequence of str; a column is returned as it is."""
        if isinstance(values, StringColumn):
            return values
        if isinstance(values, pa.ChunkedArray):
            if pa.types.is_dictionary(values.type):
                combined = values.unify_dictionaries().combine_chunks()
            else:  # 32-bit offsets end at 2 GB of text
                combined = values.cast(pa.large_string()).combine_chunks()
            values = combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined
        return cls(values if isinstance(values, pa.Array) else pa.array(list(values), pa.large_string()))

    @classmethod
    def concatenate(cls, columns: Sequence["StringColumn"]) -> "StringColumn":
        """All columns, one after the other."""
        if len(columns) == 1:
            return columns[0]
        return cls.of(pa.chunked_array([column._encoded for column in columns]))

    def take(self, rows: np.ndarray) -> "StringColumn":
        """Column of the given rows."""
        return StringColumn(self.array.take(pa.array(rows)))

    @property
    def names(self) -> list[str]:
        """Distinct values that `codes` point to; some may be unused."""
        return self._encoded.dictionary.to_pylist()

    @property
    def codes(self) -> np.ndarray:
        """int32 [n], index into `names`."""
        return self._encoded.indices.to_numpy()

    def update_digest(self, digest: "hashlib._Hash | hashlib.blake2b") -> None:
        """Feed lengths and bytes of all strings, however they are stored."""
        for start in range(0, len(self), _HASH_ROWS):
            part = self.array.slice(start, _HASH_ROWS).cast(pa.large_string())
            _, offsets, data = part.buffers()
            ends = np.frombuffer(offsets, np.int64)[part.offset : part.offset + len(part) + 1]
            digest.update(np.diff(ends).astype("<i4").tobytes())
            if data is not None:
                digest.update(memoryview(data)[ends[0] : ends[-1]])

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, (int, np.integer)):
            return self.array[int(i)].as_py()
        return np.asarray(self)[i]

    def __iter__(self) -> Iterator[str]:
        return iter(self.array.to_pylist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array.to_numpy(zero_copy_only=False), dtype or object)

    @cached_property
    def _encoded(self) -> pa.DictionaryArray:
        if not pa.types.is_dictionary(self.array.type):
            return self.array.dictionary_encode()
        # Reading gives dictionaries 32-bit offsets, encoding a plain column 64-bit ones; concatenation wants one kind.
        return self.array.cast(pa.dictionary(pa.int32(), pa.large_string()))
