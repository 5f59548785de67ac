"""What a run leaves to look at: sampled videos, the contact sheet, the report, wandb's offline files."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import av
import pytest
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from adaptiveload.scheduling.flops import WAN_1_3B
from adaptiveload.training.metrics import step_metrics
from scripts.wandb_dashboard import build_workspace
from tests.launching import launch, run_script
from tests.training.test_metrics import MEASURED, PLAN, TABLE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run_dir(run_config: Path) -> Path:
    """A run with a key for a server of wandb where nobody listens (case c52)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        patch.setenv("WANDB_API_KEY", "0" * 40)
        patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        result = launch(
            run_config,
            "name=looked-at",
            "max_steps=6",
            "tracking.trackers=[wandb,tensorboard]",
            "tracking.wandb=auto",
            "tracking.init_timeout_s=2",
            "schedule.memory_limit_tokens=64",
            ranks=2,
        )
    assert result.stdout.count("wandb could not start online") == 1, "said by rank 0 alone"
    return Path(yaml.safe_load(run_config.read_text())["output_dir"]) / "looked-at"


def test_sampled_videos_play_and_the_sheet_is_a_picture(run_dir: Path) -> None:
    run_script("sample", "--run", run_dir, "--num-samples", 2, "--steps", 3)
    videos = sorted((run_dir / "samples").glob("*.mp4"))
    assert len(videos) == 2
    with av.open(str(videos[0])) as container:
        assert float(container.streams.video[0].average_rate) == 16.0
        assert sum(1 for _ in container.decode(video=0)) == 13
    with Image.open(run_dir / "samples" / "contact_sheet.png") as sheet:
        assert sheet.width > 400


@pytest.fixture(scope="module")
def page(run_dir: Path) -> str:
    run_script("report", "--run", run_dir)
    return (run_dir / "report.html").read_text()


def test_report_is_one_file_with_all_pictures(page: str) -> None:
    assert page.count("data:image/png;base64,") >= 5
    assert "http" not in page.replace("data:image", "")
    for words in ("load CV, planned", "step-time CV, measured", "equal_token", "Shape mix"):
        assert words in page
    assert re.search(r"rank [01] took \d+\.\d% longer than the others over the last 6 steps", page)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look at the page with")
def test_report_shows_all_its_pictures_in_a_browser(page: str, tmp_path: Path) -> None:
    look = "<script>onload = () => { document.title = [...document.images].map(i => i.naturalWidth).join() + ';' + "
    look += "(document.documentElement.scrollWidth - innerWidth) }</script>"
    (tmp_path / "page.html").write_text(page.replace("<body>", f"<body>{look}"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *options, "--window-size=800,600", "--dump-dom", (tmp_path / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    widths, too_wide = re.search(r"<title>([\d,]+);(-?\d+)</title>", shown).groups()
    assert len(widths.split(",")) == page.count("<img ")
    assert all(int(width) > 400 for width in widths.split(","))
    assert int(too_wide) <= 0  # no scrolling sideways in a narrow window


def test_report_of_an_untrained_run_says_so(tmp_path: Path, run_config: Path) -> None:
    (tmp_path / "config.yaml").write_text(run_config.read_text())
    result = run_script("report", "--run", tmp_path, check=False)
    assert result.returncode != 0
    assert "train first" in result.stderr


def test_wandb_and_tensorboard_wrote_their_files(run_dir: Path) -> None:
    """Offline, and metrics.jsonl has every step (case c52)."""
    assert list((run_dir / "wandb").glob("offline-run-*"))
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert set(events.Tags()["scalars"]) == {key for row in rows for key in row} - {"step"}
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert [step for step, _ in losses] == list(range(6))
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (step, pytest.approx(loss, rel=1e-6))
        for step, loss in losses  # kept in float32
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of wandb-workspaces itself
def test_dashboard_shows_figures_that_the_run_has(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figures = {key for row in rows for key in row}
    # Only known GPUs have a peak.
    figures |= {"perf/mfu"} & step_metrics(PLAN, MEASURED, TABLE, WAN_1_3B, "NVIDIA H200").keys()
    view = build_workspace("team", "adaptiveload", "run")._to_model().model_dump(by_alias=True)
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    panels = [panel["config"] for section in sections for panel in section["panels"]]
    assert sections[0]["name"] == "Imbalance"
    assert panels[0]["metrics"][0] == "imbalance/step_time_cv"
    assert len(panels) > 15
    for panel in panels:
        assert panel["xAxis"] == "step"
        drawn = set(panel["metrics"])
        if panel.get("useMetricRegex"):
            drawn = {figure for figure in figures if re.search(panel["metricRegex"], figure)}
        assert drawn, panel
        assert drawn <= figures, panel


def test_resolved_configuration_is_saved(run_dir: Path) -> None:
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert saved["schedule"]["memory_limit_tokens"] == 64
    assert saved["schedule"]["seed"] == saved["seed"]
