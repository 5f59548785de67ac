"""What a preparation used, skipped and made of it: the content of `report.json`."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from adaptiveload.data.encode import ItemResult
from adaptiveload.data.tar_scan import Problem
from adaptiveload.scheduling.shapes import Shape


@dataclass
class Report:
    """Counts and qualities of a preparation; `used` and `skipped` together name every input once."""

    used: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[Problem] = field(default_factory=list)
    damaged: list[Problem] = field(default_factory=list)
    buckets: Counter[Shape] = field(default_factory=Counter)
    psnr_db: dict[Shape, list[float]] = field(default_factory=dict)
    latent_sums: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, result: ItemResult) -> None:
        """Count one item and its samples."""
        source = result.item.source
        if result.skipped:
            self.skipped.append(Problem(source, result.skipped))
            return
        self.used.append({"key": source, "num_samples": len(result.samples)})
        if result.damage:
            self.damaged.append(Problem(source, f"{result.damage}; the part before it is used"))
        for sample in result.samples:
            self.buckets[sample.cut.shape] += 1
            self.psnr_db.setdefault(sample.cut.shape, []).append(sample.psnr_db)
            for kind, latents in (("first", sample.latents[:, :1]), ("later", sample.latents[:, 1:])):
                values = latents.astype(np.float64).reshape(len(latents), -1)
                sums = np.stack([np.full(len(latents), values.shape[1]), values.sum(1), (values**2).sum(1)])
                self.latent_sums[kind] = self.latent_sums.get(kind, 0) + sums  # [3, C]

    def to_json(self) -> dict[str, Any]:
        """The content of `report.json`."""
        psnr = [value for values in self.psnr_db.values() for value in values]
        stats = {kind: sums for kind, sums in self.latent_sums.items() if sums[0, 0]}
        stats["all"] = sum(self.latent_sums.values())
        return {
            "num_inputs": len(self.used) + len(self.skipped),
            "num_samples": sum(self.buckets.values()),
            "used": self.used,
            "skipped": [asdict(problem) for problem in self.skipped],
            "damaged": [asdict(problem) for problem in self.damaged],
            "buckets": {str(shape): self.buckets[shape] for shape in sorted(self.buckets)},
            "psnr_db": {
                "mean": round(float(np.mean(psnr)), 2),
                "min": round(min(psnr), 2),
                "max": round(max(psnr), 2),
                "per_bucket": {
                    str(shape): round(float(np.mean(values)), 2) for shape, values in sorted(self.psnr_db.items())
                },
            },
            "latent_stats": {kind: _mean_and_std(sums) for kind, sums in stats.items()},
        }


def _mean_and_std(sums: np.ndarray) -> dict[str, list[float]]:
    count, total, squares = sums
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return {"mean": [round(float(x), 4) for x in mean], "std": [round(float(x), 4) for x in std]}
