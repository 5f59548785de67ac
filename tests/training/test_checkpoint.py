"""Checkpoints: exact, committed whole or not at all, the newest kept, a different run refused."""

import itertools
import re
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from adaptiveload.models.wan import WanConfig, WanTransformer
from adaptiveload.training import checkpoint, resume
from adaptiveload.training.checkpoint import CheckpointConfig, Checkpointer, SaveError
from adaptiveload.training.checkpoint_files import commit, committed, latest
from adaptiveload.training.distributed import Ranks, finish_ranks, shard_model
from adaptiveload.training.ema import Ema, EmaConfig
from adaptiveload.training.optimizer import OptimizerConfig, build_optimizer
from adaptiveload.training.resume import find_to_resume
from adaptiveload.training.staging import HostCopy
from tests.launching import run_ranks
from train import saving_figures

TINY = WanConfig(
    num_attention_heads=2, attention_head_dim=12, ffn_dim=32, num_layers=1, text_dim=8, text_len=4, freq_dim=8
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_device_mesh("cpu", (1,))
    yield Ranks(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def make(folder: Path, ranks: Ranks, seed: int, keep: int = 2, keep_every: int = 0, kind: type = Checkpointer):
    torch.manual_seed(seed)
    model = WanTransformer(TINY)
    shard_model(model, ranks, "fp32")
    optimizer = build_optimizer(model, OptimizerConfig())
    config = CheckpointConfig(keep=keep, keep_every=keep_every)
    return kind(folder, config, ranks, model, optimizer, Ema(model, EmaConfig()))


def save(checkpointer: Checkpointer, step: int, state: dict) -> Path:
    """To its end."""
    path = checkpointer.save(step, state)
    checkpointer.finish()
    return path


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
    path = save(saved, 3, {"seed": 0, "position": 36})
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


class HeldDisk(Checkpointer):
    """Writes nothing until somebody has waited for it, for so long that it is worth a line."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.may_write = threading.Event()

    def _write(self, *arguments) -> None:
        assert self.may_write.wait(60)
        super()._write(*arguments)

    def finish(self) -> None:
        if self._thread is not None:
            threading.Timer(1.1, self.may_write.set).start()
        super().finish()


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture
) -> None:
    checkpointer = make(tmp_path, ranks, seed=0, kind=HeldDisk)
    expected = {}
    for step in (1, 2):
        take_step(checkpointer, step)
        expected[step] = everything(checkpointer)
        path = checkpointer.save(step, {})
        assert checkpointer.may_write.is_set() == (step == 2), "a second save waits for the first, and it alone"
        if step == 1:
            assert committed(tmp_path) == []
        take_step(checkpointer, step + 10)
    assert (tmp_path / "step-00000001").is_dir()
    printed = capsys.readouterr().out
    assert re.search(r"the checkpoint of step 2 waited \d+\.\d s for the one before", printed)
    checkpointer.finish()

    # Both are known at once: the earlier one has a line of its own, the other the next step's.
    logged, said = [], []
    tracker = SimpleNamespace(log=lambda *row: logged.append(row), message=said.append)
    figures = saving_figures(SimpleNamespace(checkpointer=checkpointer, tracker=tracker), step=5)
    ((at, first),) = logged
    assert at == 5
    assert [line.split(" is saved")[0] for line in said] == [f"step 6: {tmp_path / 'step-00000001'}", f"step 6: {path}"]
    assert first["checkpoint/background_s"] > 1, "held too"
    assert first["checkpoint/held_s"] < figures["checkpoint/held_s"]
    assert figures["checkpoint/held_s"] > 1
    assert checkpointer.take_reports() == []
    # What was written is what there was when the save began.
    for step in (1, 2):
        loaded = make(tmp_path, ranks, seed=1)
        loaded.load(tmp_path / f"step-{step:08d}", {})
        for name, tensor in everything(loaded).items():
            assert torch.equal(tensor, expected[step][name]), name


def test_a_failed_save_waits_until_all_ranks_ask(tmp_path: Path, ranks: Ranks) -> None:
    checkpointer = make(tmp_path / "file" / "checkpoints", ranks, seed=0)
    (tmp_path / "file").touch()
    checkpointer.save(1, {})
    deadline = time.monotonic() + 10
    while not checkpointer.has_failed and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(SaveError, match=r"the checkpoint of step 1 could not be saved.*Not a directory"):
        checkpointer.save(2, {})
    assert not checkpointer.has_failed
    checkpointer.finish()
    assert checkpointer.take_reports() == []


@pytest.mark.gpu
def test_a_gpu_goes_on_as_soon_as_its_copy_is_begun() -> None:
    device = torch.device("cuda")
    weights = (torch.arange(2**27) % 1000).float()
    tensors = {"weights": weights.to(device), "step": torch.ones((), device=device)}
    copy = HostCopy(tensors, device)
    assert all(tensor.is_pinned() for tensor in copy.tensors.values())
    for number in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy.take(tensors)
        begun_s = time.perf_counter() - began
        tensors["weights"].add_(1)  # as the optimizer may at once
        gpu_s = copy.wait()
        print(f"copy of 0.5 GB: begun in {begun_s * 1e3:.2f} ms, on the bus for {gpu_s * 1e3:.1f} ms")
        assert torch.equal(copy.tensors["weights"], weights + number)
        assert begun_s < gpu_s < 0.1  # 5 GB/s; pageable memory is copied at less, and before `take` returns


def test_saves_by_the_clock(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.every_minutes=-1"):
        CheckpointConfig(every_minutes=-1).check()
    checkpointer = make(tmp_path, ranks, seed=0)
    assert not checkpointer.is_overdue
    checkpointer.config = CheckpointConfig(every_steps=0, every_minutes=30)
    assert checkpointer.config.is_on
    assert not checkpointer.config.is_due(3, max_steps=4)
    assert checkpointer.config.is_due(4, max_steps=4), "the last step is always saved"
    assert not checkpointer.is_overdue
    checkpointer._last_save -= 30 * 60
    assert checkpointer.is_overdue
    save(checkpointer, 1, {})
    assert not checkpointer.is_overdue
    assert not CheckpointConfig(every_steps=0).is_due(4, max_steps=4)


def test_keeps_the_newest_and_names_the_latest(tmp_path: Path, ranks: Ranks) -> None:
    checkpointer = make(tmp_path, ranks, seed=0, keep=2)
    for step in (1, 2, 3, 10):
        save(checkpointer, step, {})
    assert [path.name for path in committed(tmp_path)] == ["step-00000003", "step-00000010"]
    assert latest(tmp_path) == tmp_path / "step-00000010"
    assert (tmp_path / "latest").read_text() == "step-00000010\n"


def test_keeps_one_of_every_so_many_for_good(tmp_path: Path, ranks: Ranks) -> None:
    checkpointer = make(tmp_path, ranks, seed=0, keep=1, keep_every=100)
    for step in (100, 150, 200, 300, 317):
        save(checkpointer, step, {})
    assert [int(path.name[5:]) for path in committed(tmp_path)] == [100, 200, 300, 317]
    with pytest.raises(ValueError, match=r"keep_every=250 must be a multiple of checkpoint.every_steps=100"):
        CheckpointConfig(keep_every=250).check()


def test_a_save_that_was_cut_is_not_a_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    checkpointer = make(tmp_path, ranks, seed=0)
    good = save(checkpointer, 1, {})
    cut = tmp_path / "step-00000002.partial"
    cut.mkdir()
    (cut / "__0_0.distcp").write_bytes(b"torn")
    assert latest(tmp_path) == good
    # A pointer torn by a crash, or to a folder that is gone, falls back to what was committed.
    for content in ("", "step-00000099\n"):
        (tmp_path / "latest").write_text(content)
        assert latest(tmp_path) == good
    save(checkpointer, 2, {})
    assert not cut.exists()


def test_another_run_is_refused_by_key(tmp_path: Path, ranks: Ranks) -> None:
    checkpointer = make(tmp_path, ranks, seed=0)
    path = save(checkpointer, 1, {"seed": 0, "data_fingerprint": "abc"})
    before = everything(checkpointer)
    with pytest.raises(ValueError, match="data_fingerprint='abc', this run has 'xyz'"):
        checkpointer.load(path, {"seed": 0, "data_fingerprint": "xyz"})
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(checkpointer).items())
    with pytest.raises(ValueError, match="not a whole checkpoint"):
        checkpointer.load(tmp_path / "nowhere", {})


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_its_file_named(
    tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture
) -> None:
    """Every file of it, cut, empty, changed or gone (case c34)."""
    good = save(make(tmp_path, ranks, seed=0), 1, {})
    names = sorted(path.name for path in good.iterdir())
    assert names == [".metadata", "__0_0.distcp", "checksums.json", "state.json"]
    damages = (halve, flip_a_byte, lambda path: path.write_bytes(b""), Path.unlink)
    for number, (name, damage) in enumerate(itertools.product(names, damages)):
        broken = tmp_path / f"step-{number + 2:08d}"
        shutil.copytree(good, broken)
        damage(broken / name)
        assert find_to_resume(tmp_path, CheckpointConfig(), ranks) == good
        assert re.search(f"{broken} is passed over, it is damaged: .*{name}", capsys.readouterr().out)
        with pytest.raises(ValueError, match=f"not a whole checkpoint: .*{name}"):
            find_to_resume(tmp_path / "another", CheckpointConfig(resume=str(broken)), ranks)
        shutil.rmtree(broken)
    (tmp_path / "step-00000099").mkdir()
    assert find_to_resume(tmp_path, CheckpointConfig(), ranks) == good
    # What was passed over never passes for the newest again.
    saved = save(make(tmp_path, ranks, seed=0, keep=1), 2, {})
    assert committed(tmp_path) == [saved]
    halve(saved / "__0_0.distcp")
    with pytest.raises(ValueError, match="all 1 checkpoints are damaged"):
        find_to_resume(tmp_path, CheckpointConfig(), ranks)


@pytest.mark.parametrize("room", [0, 10_000, 100_000])
def test_a_full_disk_leaves_what_was_committed(tmp_path: Path, ranks: Ranks, room: int) -> None:
    """Whichever file it is that finds no room (case c35)."""
    checkpointer = make(tmp_path, ranks, seed=0)
    good = save(checkpointer, 1, {})
    assert (good / "__0_0.distcp").stat().st_size > 100_000
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, unlimited[1]))
    try:
        with pytest.raises(SaveError, match=f"File too large.*free at the end; the last good checkpoint is {good}"):
            save(checkpointer, 2, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [path.name for path in tmp_path.glob("step-*")] == [good.name]
    assert find_to_resume(tmp_path, CheckpointConfig(), ranks) == good
    assert save(checkpointer, 2, {}) == latest(tmp_path)


def test_rank_0_alone_looks_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may not see a folder that has just been made, and `glob` would fail there."""

    class OtherRank:
        is_main = False

        def run_on_main(self, action):
            return []

    monkeypatch.setattr(resume, "committed", lambda folder: pytest.fail(f"rank 1 looks into {folder}"))
    assert find_to_resume(tmp_path / "nowhere", CheckpointConfig(), OtherRank()) is None


@pytest.mark.parametrize("change", [Path.unlink, halve])
def test_what_a_rank_has_written_elsewhere_is_not_committed(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, change
) -> None:
    """As where each node has an output folder of its own."""

    def commit_without(partial: Path, *arguments) -> None:
        change(partial / "__0_0.distcp")
        commit(partial, *arguments)

    checkpointer = make(tmp_path, ranks, seed=0)
    good = save(checkpointer, 1, {})
    monkeypatch.setattr(checkpoint, "commit", commit_without)
    with pytest.raises(
        SaveError, match=r"__0_0\.distcp (is not there|has \d+ bytes), a rank has written \d+: .*output_dir"
    ):
        save(checkpointer, 2, {})
    assert committed(tmp_path) == [good]


def test_room_is_looked_for_at_the_start(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """For one checkpoint or the run is refused, for all that are there at once or rank 0 says so."""
    checkpointer = make(tmp_path / "checkpoints", ranks, seed=0, keep=2)
    each = 16 * sum(parameter.numel() for parameter in checkpointer.model.parameters())

    def with_room_for(checkpoints: float) -> str:
        monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(checkpoints * each)))
        checkpointer.check_room()
        return capsys.readouterr().out

    gb = f"{each / 1e9:.3g}"
    with pytest.raises(ValueError, match=f"a checkpoint takes {gb} GB, .* GB are free: .*output_dir.*every_steps=0"):
        with_room_for(0.99)
    assert with_room_for(3) == ""
    for existing in (0, 1, 2, 3):
        missing = max(1, 3 - existing)
        if missing > 1:
            assert f"{missing * each / 1e9:.3g} GB more are needed while checkpoint.keep=2" in with_room_for(
                missing - 0.1
            )
        assert with_room_for(missing) == ""
        (tmp_path / "checkpoints" / f"step-{existing + 1:08d}").mkdir()


def test_on_two_ranks_one_rank_s_torn_file_and_full_disk_count(tmp_path: Path) -> None:
    """Cases c34 and c35 where the other rank finds nothing wrong with its own."""
    run_ranks(__file__, tmp_path, ranks=2)


def as_one_of_two(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    init_device_mesh("cpu", (2,))
    ranks = Ranks(rank, 2, torch.device("cpu"), dist.new_group(backend="gloo"))
    folder /= "checkpoints"
    checkpointer = make(folder, ranks, seed=0)
    good = save(checkpointer, 1, {})
    gb = f"{16 * sum(parameter.numel() for parameter in checkpointer.model.parameters()) / 1e9:.3g}"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, unlimited[1]))
    found = f"rank 1: .*File too large.* tensors take {gb} GB, .* GB were free at the end; the last good .* is {good}"
    with pytest.raises(SaveError, match=found):
        save(checkpointer, 2, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert find_to_resume(folder, CheckpointConfig(), ranks) == good
    torn = save(checkpointer, 2, {})
    assert find_to_resume(folder, CheckpointConfig(), ranks) == torn
    ranks.run_on_main(lambda: halve(torn / "__1_0.distcp"))
    assert find_to_resume(folder, CheckpointConfig(), ranks) == good
    finish_ranks(ranks)


def test_resume_option(tmp_path: Path, ranks: Ranks) -> None:
    assert find_to_resume(tmp_path, CheckpointConfig(), ranks) is None
    path = save(make(tmp_path, ranks, seed=0), 1, {})
    assert find_to_resume(tmp_path, CheckpointConfig(), ranks) == path
    other = save(make(tmp_path / "other", ranks, seed=0), 7, {})
    assert find_to_resume(tmp_path, CheckpointConfig(resume=str(other)), ranks) == path
    save(make(tmp_path, ranks, seed=0), 2, {})
    with pytest.raises(ValueError, match="the run has gone on to"):
        find_to_resume(tmp_path, CheckpointConfig(resume=str(path)), ranks)
    with pytest.raises(ValueError, match=r"checkpoint\.resume is never"):
        find_to_resume(tmp_path, CheckpointConfig(resume="never"), ranks)


if __name__ == "__main__":
    as_one_of_two(Path(sys.argv[1]), int(sys.argv[2]))
