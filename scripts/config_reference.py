"""Writes docs/configuration.md from the dataclasses of the configuration: keys, types, defaults and docstrings.

python -m scripts.config_reference
"""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from adaptiveload.data.corpus import SourceConfig
from adaptiveload.models.architectures import CONFIGS
from adaptiveload.models.config import ModelConfig
from adaptiveload.training.config import RunConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_HEAD = """\
# Configuration

A run's configuration is dataclass defaults, then one YAML file, then `key=value` from the command line. Unknown keys
are refused and the nearest one is named. The resolved configuration is saved as `RUN/config.yaml`
(`RUN` is `output_dir/name`) and can be given back.

Values are YAML: write `1_000_000` or `1000000` for an integer (`1e6` is a float), `null` for no value, and quote `no`,
`on` and `off`. A list replaces the whole list.

This page is written by `python -m scripts.config_reference` from the code.
"""
# Where there is more to read.
_PAGES = {
    "data": "data.md",
    "model": "models.md",
    "lora": "finetune.md",
    "objective": "models.md",
    "schedule": "scheduling.md",
    "cost": "scheduling.md",
    "previews": "models.md",
    "tracking": "metrics.md",
    "profile": "metrics.md",
}


_NAMES: dict[Any, str] = {list: "list", tuple: "list", dict: "mapping"}
_CONSTANTS = {"None": "null", "True": "true", "False": "false"}


def render() -> str:
    """The page."""
    config = RunConfig()
    names = [field.name for field in dataclasses.fields(config)]
    groups = [name for name in names if dataclasses.is_dataclass(getattr(config, name))]
    keys = [name for name in names if name not in groups]
    parts = [_HEAD, "## The run\n", _table(config, keys, "")]
    for name in groups:
        part = getattr(config, name)
        more = f" More in [{_PAGES[name]}]({_PAGES[name]})." if name in _PAGES else ""
        if name == "model":
            shared = [field.name for field in dataclasses.fields(ModelConfig)]
            parts += [f"## {name}\n", _about(ModelConfig) + more + "\n", _table(ModelConfig(), shared, "model.")]
            for architecture, model in CONFIGS.items():
                own = [field.name for field in dataclasses.fields(model) if field.name not in shared]
                parts += [f"Of `{architecture}` alone:\n", _table(model(), own, "model.")]
            continue
        own = [field.name for field in dataclasses.fields(part)]
        parts += [f"## {name}\n", _about(type(part)) + more + "\n", _table(part, own, f"{name}.")]
        if name == "data":
            of_source = [field.name for field in dataclasses.fields(SourceConfig)]
            parts += [f"`SourceConfig`: {_about(SourceConfig)}\n", _table(SourceConfig(), of_source, "data.sources[].")]
    return "\n".join(parts)


def _table(part: Any, names: list[str], prefix: str) -> str:
    meanings, kinds = _attributes(type(part)), typing.get_type_hints(type(part))
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name in names:
        if name not in meanings:
            raise ValueError(f"{type(part).__name__}.{name} has no line under Attributes in its docstring")
        values = f"`{_yaml(getattr(part, name))}`"
        if type(part) is ModelConfig:
            others = ((other, getattr(model(), name)) for other, model in CONFIGS.items())
            values += "".join(
                f", {other} `{_yaml(value)}`"
                for other, value in others
                if value != getattr(part, name) and name != "architecture"
            )
        lines.append(f"| `{prefix}{name}` | {_kind(kinds[name])} | {values} | {meanings[name]} |")
    return "\n".join(lines) + "\n"


def _about(part: type) -> str:
    """What the docstring says before its attributes, as Markdown."""
    return _markdown(" ".join(inspect.cleandoc(part.__doc__ or "").split("\nAttributes:")[0].split()))


def _attributes(part: type) -> dict[str, str]:
    """What the docstring of `part` says of each field, and those of the classes that it inherits from."""
    meanings: dict[str, str] = {}
    for ancestor in reversed(part.__mro__):
        text = inspect.cleandoc(ancestor.__doc__ or "").partition("Attributes:\n")[2]
        for names, meaning in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE):
            meanings |= dict.fromkeys(names.split(", "), _markdown(" ".join(meaning.split())))
    return meanings


def _markdown(text: str) -> str:
    """Words in quotes as code, Python's constants as YAML's."""
    parts = re.split(r"(`[^`]*`)", text)
    for i in range(0, len(parts), 2):
        quoted = re.sub(r'"([^"\s]+)"', r"`\1`", parts[i])
        parts[i] = re.sub(r"\b(None|True|False)\b", lambda found: f"`{_CONSTANTS[found[0]]}`", quoted)
    return "".join(parts).replace("|", "\\|")


def _kind(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        return " or ".join(_kind(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is not None:
        inner = [part for part in typing.get_args(kind) if part is not Ellipsis]
        return f"{_NAMES[typing.get_origin(kind)]} of {' to '.join(dict.fromkeys(map(_kind, inner)))}"
    return "null" if kind is type(None) else str(kind.__name__)


def _yaml(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return text.strip("'") or text


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    PAGE.write_text(render())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
