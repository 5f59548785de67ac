"""What a preparation used, skipped and made of it: the content of `report.json`."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from adaptiveload.data.encode import ItemResult
from adaptiveload.data.tar_scan import Problem
from adaptiveload.scheduling.shapes import Shape

# Skipped items named in report.json; items.jsonl names all.
_MOST_NAMED = 1000


@dataclass
class Report:
    """Counts and qualities of a preparation, of one unit or of all.

    Attributes:
        num_used: Items that gave samples.
        num_skipped: Items that did not.
        skipped: The first of them, with reasons.
        damaged: Shards and items of which only a part could be used.
        items: A line for every item of a unit; not kept when units are merged.
        buckets: Samples of each shape.
        psnr: For each shape count, sum, least and largest of the measured PSNR in dB.
        latent_sums: For first and later latent frames [3, C]: count, sum and sum of squares.
    """

    num_used: int = 0
    num_skipped: int = 0
    skipped: list[Problem] = field(default_factory=list)
    damaged: list[Problem] = field(default_factory=list)
    items: list[dict[str, Any]] = field(default_factory=list)
    buckets: Counter[str] = field(default_factory=Counter)
    psnr: dict[str, tuple[int, float, float, float]] = field(default_factory=dict)
    latent_sums: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples of all shapes."""
        return sum(self.buckets.values())

    def skip(self, problem: Problem) -> None:
        """Count an item that gives no sample."""
        self.num_skipped += 1
        self.skipped.append(problem)
        self.items.append({"item": problem.key, "skipped": problem.reason})

    def add(self, result: ItemResult) -> None:
        """Count one item and its samples."""
        name = result.item.name
        if result.skipped:
            self.skip(Problem(name, result.skipped))
            return
        self.num_used += 1
        line = {"item": name, "num_samples": len(result.samples), "source_hash": result.source_hash}
        if result.damage:
            line["damage"] = result.damage
            self.damaged.append(Problem(name, f"{result.damage}; the part before it is used"))
        self.items.append(line)
        for sample in result.samples:
            shape = str(sample.cut.shape)
            self.buckets[shape] += 1
            if sample.psnr_db is not None:
                self._add_psnr(shape, (1, sample.psnr_db, sample.psnr_db, sample.psnr_db))
            for kind, latents in (("first", sample.latents[:, :1]), ("later", sample.latents[:, 1:])):
                values = latents.astype(np.float64).reshape(len(latents), -1)
                self._add_sums(
                    kind, np.stack([np.full(len(latents), values.shape[1]), values.sum(1), (values**2).sum(1)])
                )

    def state(self) -> dict[str, Any]:
        """Everything, for `merge`, as JSON."""
        return {
            "num_used": self.num_used,
            "num_skipped": self.num_skipped,
            "skipped": [asdict(problem) for problem in self.skipped],
            "damaged": [asdict(problem) for problem in self.damaged],
            "items": self.items,
            "buckets": self.buckets,
            "psnr": self.psnr,
            "latent_sums": {kind: sums.tolist() for kind, sums in self.latent_sums.items()},
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add another report's `state`."""
        self.num_used += state["num_used"]
        self.num_skipped += state["num_skipped"]
        self.skipped += [Problem(**entry) for entry in state["skipped"][: _MOST_NAMED - len(self.skipped)]]
        self.damaged += [Problem(**entry) for entry in state["damaged"][: _MOST_NAMED - len(self.damaged)]]
        self.buckets.update(state["buckets"])
        for shape, figures in state["psnr"].items():
            self._add_psnr(shape, tuple(figures))
        for kind, sums in state["latent_sums"].items():
            self._add_sums(kind, np.array(sums))

    def to_json(self) -> dict[str, Any]:
        """The content of `report.json`."""
        shapes = sorted(self.buckets, key=_parsed)
        stats = {kind: sums for kind, sums in self.latent_sums.items() if sums[0, 0]}
        stats["all"] = sum(self.latent_sums.values())
        figures = self.psnr.values()
        return {
            "num_inputs": self.num_used + self.num_skipped,
            "used": self.num_used,
            "num_skipped": self.num_skipped,
            "num_samples": self.num_samples,
            "skipped": [asdict(problem) for problem in self.skipped],
            "damaged": [asdict(problem) for problem in self.damaged],
            "buckets": {shape: self.buckets[shape] for shape in shapes},
            "psnr_db": {
                "num_measured": sum(count for count, *_ in figures),
                "mean": round(sum(total for _, total, *_ in figures) / sum(count for count, *_ in figures), 2),
                "min": round(min(least for *_, least, _ in figures), 2),
                "max": round(max(most for *_, most in figures), 2),
                "per_bucket": {
                    shape: round(self.psnr[shape][1] / self.psnr[shape][0], 2) for shape in shapes if shape in self.psnr
                },
            },
            "latent_stats": {kind: _mean_and_std(sums) for kind, sums in stats.items()},
        }

    def _add_psnr(self, shape: str, figures: tuple[int, float, float, float]) -> None:
        count, total, least, most = self.psnr.get(shape, (0, 0.0, np.inf, -np.inf))
        self.psnr[shape] = (
            count + figures[0],
            total + figures[1],
            float(min(least, figures[2])),
            float(max(most, figures[3])),
        )

    def _add_sums(self, kind: str, sums: np.ndarray) -> None:
        self.latent_sums[kind] = self.latent_sums.get(kind, 0) + sums  # [3, C]


def _parsed(shape: str) -> Shape:
    return Shape(*map(int, shape.split("x")))


def _mean_and_std(sums: np.ndarray) -> dict[str, list[float]]:
    count, total, squares = sums
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return {"mean": [round(float(x), 4) for x in mean], "std": [round(float(x), 4) for x in std]}
