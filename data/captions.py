"""Captions as they come: bytes, JSON and table cells to clean text, or the reason why not."""

import json
from typing import Any


def clean_caption(text: str) -> str:
    """One line of text without byte order mark. Raises ValueError if nothing is left or a wrong decoding shows."""
    if "\ufffd" in text or "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the caption holds characters that a wrong decoding leaves behind (U+FFFD, NUL, surrogates)")
    text = " ".join(text.replace("\ufeff", "").split())
    if not text:
        raise ValueError("the caption is empty")
    return text


def decode_caption(data: bytes) -> str:
    """UTF-8 with or without a byte order mark; nothing else is guessed. Raises ValueError."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the caption is not UTF-8: {error.reason} at byte {error.start}") from error


def captions_and_fields(parts: dict[str, bytes]) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Caption from the .txt, else from the .json; further captions and fields of the .json.

    Returns:
        The caption; `captions` of the json by name; its other numbers and texts, such as quality scores.

    Raises:
        ValueError: With the reason if there is no caption to be trusted.
    """
    if not parts:
        raise ValueError("no caption")
    fields = _json_fields(decode_caption(parts[".json"])) if ".json" in parts else {}
    first = fields.pop("caption", None)
    if ".txt" in parts:
        first = decode_caption(parts[".txt"])
    elif first is None:
        raise ValueError("`caption` in the json is null, not a text" if b'"caption"' in parts[".json"] else _NO_FIELD)
    if not isinstance(first, str):
        raise ValueError(f"`caption` in the json is {json.dumps(first)[:40]}, not a text")
    more = fields.pop("captions", {})
    if not isinstance(more, dict) or not all(isinstance(text, str) for text in more.values()):
        raise ValueError("`captions` in the json is not a mapping of names to texts")
    return clean_caption(first), {name: clean_caption(text) for name, text in more.items()}, scalars(fields)


_NO_FIELD = "the json has no field `caption`"


def scalars(fields: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts among `fields`."""
    return {key: value for key, value in fields.items() if isinstance(value, (str, int, float, bool))}


def _json_fields(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the json is broken: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(_NO_FIELD)
    return value
