"""Checkpoints: exact, committed whole or not at all, the newest kept, a different run refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from adaptiveload.models.wan import WanConfig, WanTransformer
from adaptiveload.training.checkpoint import CheckpointConfig, Checkpointer, committed, latest
from adaptiveload.training.distributed import Ranks, shard_model
from adaptiveload.training.ema import Ema, EmaConfig
from adaptiveload.training.optimizer import OptimizerConfig, build_optimizer

TINY = WanConfig(
    num_attention_heads=2, attention_head_dim=12, ffn_dim=32, num_layers=1, text_dim=8, text_len=4, freq_dim=8
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_device_mesh("cpu", (1,))
    yield Ranks(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def make(folder: Path, ranks: Ranks, seed: int, keep: int = 2) -> Checkpointer:
    torch.manual_seed(seed)
    model = WanTransformer(TINY)
    shard_model(model, ranks, "fp32")
    optimizer = build_optimizer(model, OptimizerConfig())
    return Checkpointer(folder, CheckpointConfig(keep=keep), ranks, model, optimizer, Ema(model, EmaConfig()))


def take_step(checkpointer: Checkpointer, step: int) -> None:
    for parameter in checkpointer.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
    checkpointer.optimizer.step()
    checkpointer.ema.update(step)


def everything(checkpointer: Checkpointer) -> dict[str, torch.Tensor]:
    tensors = checkpointer._tensors()
    return {name: getattr(t, "full_tensor", lambda t=t: t)().clone() for name, t in tensors.items()}


def test_load_restores_model_optimizer_and_averages(tmp_path: Path, ranks: Ranks) -> None:
    saved = make(tmp_path, ranks, seed=0)
    for step in range(3):
        take_step(saved, step)
    path = saved.save(3, {"seed": 0, "position": 36})
    loaded = make(tmp_path, ranks, seed=1)
    state = loaded.load(path, {"seed": 0})
    assert (state["step"], state["position"]) == (3, 36)
    # The same next step from both: nothing that the optimizer needs was left behind.
    take_step(saved, 3)
    take_step(loaded, 3)
    expected, found = everything(saved), everything(loaded)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert float(found["optimizer/proj_out.weight/step"]) == 4


def test_keeps_the_newest_and_names_the_latest(tmp_path: Path, ranks: Ranks) -> None:
    checkpointer = make(tmp_path, ranks, seed=0, keep=2)
    for step in (1, 2, 3, 10):
        checkpointer.save(step, {})
    assert [path.name for path in committed(tmp_path)] == ["step-00000003", "step-00000010"]
    assert latest(tmp_path) == tmp_path / "step-00000010"


def test_a_save_that_was_cut_is_not_a_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    checkpointer = make(tmp_path, ranks, seed=0)
    good = checkpointer.save(1, {})
    cut = tmp_path / "step-00000002.partial"
    cut.mkdir()
    (cut / "__0_0.distcp").write_bytes(b"torn")
    assert latest(tmp_path) == good
    # A pointer torn by a crash, or to a folder that is gone, falls back to what was committed.
    for content in ("", "step-00000099\n"):
        (tmp_path / "latest").write_text(content)
        assert latest(tmp_path) == good
    checkpointer.save(2, {})
    assert not cut.exists()


def test_another_run_is_refused_by_key(tmp_path: Path, ranks: Ranks) -> None:
    checkpointer = make(tmp_path, ranks, seed=0)
    path = checkpointer.save(1, {"seed": 0, "data_fingerprint": "abc"})
    before = everything(checkpointer)
    with pytest.raises(ValueError, match="data_fingerprint='abc', this run has 'xyz'"):
        checkpointer.load(path, {"seed": 0, "data_fingerprint": "xyz"})
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(checkpointer).items())
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        checkpointer.load(tmp_path / "nowhere", {})


def test_resume_option(tmp_path: Path, ranks: Ranks) -> None:
    assert Checkpointer.to_resume(tmp_path, CheckpointConfig()) is None
    assert Checkpointer.to_resume(tmp_path, CheckpointConfig(resume="elsewhere")) == Path("elsewhere")
    path = make(tmp_path, ranks, seed=0).save(1, {})
    assert Checkpointer.to_resume(tmp_path, CheckpointConfig()) == path
    other = make(tmp_path / "other", ranks, seed=0).save(7, {})
    assert Checkpointer.to_resume(tmp_path, CheckpointConfig(resume=str(other))) == path
    make(tmp_path, ranks, seed=0).save(2, {})
    with pytest.raises(ValueError, match="the run has gone on to"):
        Checkpointer.to_resume(tmp_path, CheckpointConfig(resume=str(path)))
    with pytest.raises(ValueError, match=r"checkpoint\.resume is never"):
        Checkpointer.to_resume(tmp_path, CheckpointConfig(resume="never"))
