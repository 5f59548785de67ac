"""The YAML file of fitted models: both cost laws, the memory model, and what they were fitted for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from adaptiveload.scheduling.cost import PowerCost, TwoTermCost
from adaptiveload.scheduling.memory import MemoryModel

LAWS = ("two_term", "power")
# What a file was fitted with that does not say.
_UNSAID = {"trained": "all", "compile": False}
Model = TypeVar("Model", TwoTermCost, PowerCost, MemoryModel)


@dataclass(frozen=True)
class CostFile:
    """Models and their provenance.

    Attributes:
        two_term, power: Cost laws; None where the file has none.
        memory: Memory model, or None.
        gpu: Name of the GPU as torch gives it, or a part of it in lower case.
        model: Sizes of the model by name, see `ModelDims`.
        layout: How it was run: `precision`, `meet`, `recompute`, `ranks`, `trained`, `compile`, and on a GPU `kernels`.
        versions: Of torch and what else was used.
        fit: Errors of the fit and counts of rows, for a reader.
    """

    two_term: TwoTermCost | None = None
    power: PowerCost | None = None
    memory: MemoryModel | None = None
    gpu: str = ""
    model: dict[str, int] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> "CostFile":
        """The file at `path`.

        Raises:
            ValueError: If it is missing, no mapping, has neither law, or a coefficient is missing, unknown, negative
                or not a number.
        """
        try:
            document = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"cost file {path} cannot be read: {error}") from error
        if not isinstance(document, Mapping) or not any(law in document for law in LAWS):
            raise ValueError(
                f"{path} is no cost file: it has none of {', '.join(LAWS)}; scripts.fit_cost_model makes one"
            )
        unknown = set(document) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"{path}: unknown keys {', '.join(sorted(map(str, unknown)))}")
        plain = {key: document[key] for key in ("gpu", "model", "layout", "versions", "fit") if key in document}
        return cls(
            _read_model(path, document, "two_term", TwoTermCost),
            _read_model(path, document, "power", PowerCost),
            _read_model(path, document, "memory", MemoryModel),
            **plain,
        )

    def write(self, path: str | Path, comment: str) -> None:
        """Write the file, `comment` at its head."""
        document: dict[str, Any] = {
            "gpu": self.gpu,
            "model": self.model,
            "layout": self.layout,
            "versions": self.versions,
        }
        for name in (*LAWS, "memory"):
            if (model := getattr(self, name)) is not None:
                document[name] = {key: float(value) for key, value in vars(model).items()}
        document["fit"] = self.fit
        head = "".join(f"# {line}\n" for line in comment.splitlines())
        Path(path).write_text(head + yaml.safe_dump(document, sort_keys=False, width=120))

    def law(self, name: str) -> TwoTermCost | PowerCost:
        """The law `name`, "two_term" or "power".

        Raises:
            ValueError: If the name is unknown or the file lacks that law.
        """
        if name not in LAWS:
            raise ValueError(f"cost.law must be one of {', '.join(LAWS)}, got {name!r}")
        model: TwoTermCost | PowerCost | None = getattr(self, name)
        if model is None:
            raise ValueError(f"this cost file has no law {name!r}: set cost.law to the other one, or fit it again")
        return model

    def mismatches(
        self, gpu: str, model: Mapping[str, int], layout: Mapping[str, Any], versions: Mapping[str, str]
    ) -> list[str]:
        """What the file was fitted for and the run is not, a phrase each; empty if it fits.

        Busy seconds leave out waiting for other ranks, and more ranks only take less memory each, so a file also
        serves more ranks than it was fitted on. Versions are compared without their local part (`+cu130`).
        """
        found = []
        names = (self.gpu.lower(), gpu.lower())
        if not names[0] or not (names[0] in names[1] or names[1] in names[0]):
            found.append(f"GPU {self.gpu or 'not named'}, here {gpu}")
        found += [
            f"model {key}={self.model.get(key)}, here {value}"
            for key, value in model.items()
            if self.model.get(key) != value
        ]
        for key, value in layout.items():
            fitted = self.layout.get(key, _UNSAID.get(key))
            fits = fitted is not None and (value >= fitted if key == "ranks" else value == fitted)
            if not fits:
                found.append(f"{key} {fitted}, here {value}")
        for key, value in versions.items():
            fitted_version = str(self.versions.get(key, ""))
            if fitted_version.split("+")[0] != value.split("+")[0]:
                found.append(f"{key} {fitted_version or 'not named'}, here {value}")
        return found


def _read_model(path: str | Path, document: Mapping[str, Any], name: str, kind: type[Model]) -> Model | None:
    if name not in document:
        return None
    try:
        return kind(**{key: float(value) for key, value in document[name].items()})
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: {name} must give {', '.join(kind.__dataclass_fields__)}: {error}") from error
