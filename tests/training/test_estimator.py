"""The gradient of a step and its logged loss do not depend on who computes what (case c40)."""

from pathlib import Path

import pytest
import torch

from tests.launching import launch

# fp32 sums in another order; measured 2e-7.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def found(run_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.Tensor, float]]:
    folder = tmp_path_factory.mktemp("gradients")
    found = {}
    for ranks in (1, 2):
        path = folder / f"{ranks}.pt"
        launch(run_config, path, ranks=ranks, script="tests/training/partition_gradients.py")
        found |= {f"{ranks} ranks/{name}": value for name, value in torch.load(path).items()}
    return found


def test_partition_invariance(found: dict[str, tuple[torch.Tensor, float]]) -> None:
    assert len(found) == 2 * (5 * 2 + 1)
    reference, expected_loss = found["1 ranks/contiguous/slot"]
    reference = reference.double()
    assert reference.norm() > 0.01
    assert (reference != 0).float().mean() > 0.9, "most weights must take part, or the comparison says little"
    for name, (gradient, loss) in found.items():
        assert loss == pytest.approx(expected_loss, rel=TOLERANCE), name
        difference = (gradient.double() - reference).norm() / reference.norm()
        assert difference < TOLERANCE, f"{name}: relative L2 difference {difference:.1e}"
