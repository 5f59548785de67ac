"""Docs name every configuration key and every figure, and README's links and commands lead somewhere."""

import dataclasses
import re
from pathlib import Path

from adaptiveload.models.architectures import CONFIGS
from adaptiveload.training.config import RunConfig
from scripts import config_reference
from tests.training.test_metrics import MEASURED, PLAN, TABLE

ROOT = Path(__file__).parent.parent


def keys_of(config: object, prefix: str = "") -> list[str]:
    keys = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        keys += keys_of(value, name + ".") if dataclasses.is_dataclass(value) else [name]
    return keys


def test_configuration_page_has_every_key_and_no_other() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    documented = re.findall(r"^\| `([a-z0-9_.]+)` \|", page, flags=re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == {key for model in CONFIGS.values() for key in keys_of(RunConfig(model=model()))}


def test_configuration_page_is_what_the_code_says() -> None:
    assert config_reference.PAGE.read_text() == config_reference.render(), "run python -m scripts.config_reference"


def test_metrics_page_has_every_figure() -> None:
    from adaptiveload.scheduling.flops import WAN_1_3B
    from adaptiveload.training.metrics import step_metrics

    page = (ROOT / "docs" / "metrics.md").read_text()
    for key in step_metrics(PLAN, MEASURED, TABLE, WAN_1_3B, "NVIDIA H200"):
        assert f"`{re.sub(r'rank/[0-9]+', 'rank/NNN', key)}`" in page, key


def test_links_and_named_files_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert len(pages) > 5
    for page in pages:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
        for name in re.findall(r"\b(?:configs|scripts)/[\w/]+\.\w+", text):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"
        for name in re.findall(r"-m scripts\.(\w+)", text):
            assert (ROOT / "scripts" / f"{name}.py").is_file(), f"{page.name}: scripts.{name}"


def test_first_command_of_the_readme_comes_early() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("make train")) < 30


def test_metrics_page_has_the_figures_that_train_py_adds() -> None:
    added = set(re.findall(r'"((?:train|data)/\w+)"', (ROOT / "train.py").read_text()))
    assert len(added) >= 5
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{key}`" in page for key in added), added


def test_metrics_page_explains_every_panel_of_the_dashboard() -> None:
    from scripts.wandb_dashboard import SECTIONS

    rows = re.findall(r"^\| ([^`|]+) \| .+ \|$", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)
    explained = ", ".join(rows)
    titles = [panel.title for panels in SECTIONS.values() for panel in panels]
    assert len(titles) > 15
    assert [title for title in titles if title not in explained] == []
