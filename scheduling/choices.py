"""Values of the configuration that are one of a few words."""

import difflib
from collections.abc import Sequence


def check_choice(key: str, value: str, known: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `known`, naming the key, what it takes, and the nearest of them."""
    if value in known:
        return
    hint = "".join(f"; the nearest is {near}" for near in difflib.get_close_matches(value, known, n=1))
    if value in ("True", "False"):
        hint = f" (quote it: an unquoted on, off, yes or no is a bool in YAML; in a shell, '{key}=\"off\"')"
    raise ValueError(f"{key}={value!r}: use {', '.join(known[:-1])} or {known[-1]}{hint}")
