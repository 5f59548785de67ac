"""Whether wandb is online, offline or off, by the configuration, WANDB_MODE and the keys that there are (case c52)."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from adaptiveload.training.tracker import TrackingConfig, _has_wandb_key
from tests.training.test_tracker import KEY, log_steps, steps_in


@pytest.mark.parametrize(
    ("asked", "environ", "begun"),
    [
        ("auto", {}, ["offline"]),
        ("auto", {"WANDB_API_KEY": KEY}, ["online"]),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, ["offline"]),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "dryrun"}, ["offline"]),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, []),
        ("auto", {"WANDB_MODE": "online"}, ["offline"]),
        ("online", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, ["online"]),
        ("disabled", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, []),
    ],
)
def test_mode_of_wandb_is_the_environments_where_the_run_leaves_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, environ: dict[str, str], begun: list[str]
) -> None:
    """Switched off there, it once tried its server (case c52)."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    modes: list[str] = []
    monkeypatch.setattr(
        "adaptiveload.training.tracker._Wandb._begin", lambda _, mode: modes.append(mode) or MagicMock()
    )
    log_steps(tmp_path / "run", range(3), TrackingConfig(wandb=asked))
    assert modes == begun
    assert steps_in(tmp_path / "run" / "metrics.jsonl") == [0, 1, 2]


@pytest.mark.parametrize(
    ("machine", "base_url", "is_found"),
    [
        ("api.wandb.ai", None, True),
        ("api.forge.coreweave.com", "https://api.wandb.ai", True),
        ("wandb.company.com:8080", "https://wandb.company.com:8080/", True),
        ("api.wandb.ai", "https://wandb.company.com", False),
    ],
)
def test_key_for_wandb_is_looked_up_by_its_servers_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, base_url: str | None, is_found: bool
) -> None:
    settings = SimpleNamespace(base_url="https://api.forge.coreweave.com", api_key=None)
    monkeypatch.setattr("wandb.setup", lambda: SimpleNamespace(settings=settings))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    if base_url:
        monkeypatch.setenv("WANDB_BASE_URL", base_url)
    (tmp_path / "netrc").write_text(f"machine {machine}\n  login user\n  password {KEY}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert _has_wandb_key() == is_found
