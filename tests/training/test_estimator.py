"""The gradient of a step does not depend on who computes what."""

from pathlib import Path

import pytest
import torch

from tests.launching import launch

# fp32 sums in another order; measured 2e-7.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def gradients(run_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("gradients")
    found = {}
    for ranks in (1, 2):
        path = folder / f"{ranks}.pt"
        launch(run_config, path, ranks=ranks, script="tests/training/partition_gradients.py")
        found |= {f"{ranks} ranks/{name}": gradient for name, gradient in torch.load(path).items()}
    return found


def test_partition_invariance(gradients: dict[str, torch.Tensor]) -> None:
    assert len(gradients) == 2 * (3 * 2 + 1)
    reference = gradients["1 ranks/contiguous/slot"].double()
    assert reference.norm() > 0.01
    assert (reference != 0).float().mean() > 0.9, "most weights must take part, or the comparison says little"
    for name, gradient in gradients.items():
        difference = (gradient.double() - reference).norm() / reference.norm()
        assert difference < TOLERANCE, f"{name}: relative L2 difference {difference:.1e}"
