"""The import rules, the import name, and that it works from a wheel as from a checkout."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PACKAGES = ("data", "kernels", "models", "scheduling", "training")
MAY_IMPORT = {
    "scheduling": set(),
    "kernels": set(),
    "models": {"kernels"},
    "data": {"scheduling"},
    "training": {"scheduling", "kernels", "models", "data"},
    "scripts": {"scheduling", "kernels", "models", "data", "training"},
}


def python_files(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"no Python file in {folder}: this test would check nothing"
    return files


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module)
    return modules


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder}
    for path in python_files(folder):
        for module in imported_modules(path):
            top, _, rest = module.partition(".")
            assert top not in (*PACKAGES, "scripts", "tests", "train"), f"{path}: write adaptiveload.{module}"
            if top == "adaptiveload" and rest:
                assert rest.split(".")[0] in allowed, f"{path} imports {module}"


def test_one_file_each_knows_wandb_and_omegaconf() -> None:
    importers: dict[str, set[str]] = {"wandb": set(), "omegaconf": set()}
    for folder in MAY_IMPORT:
        for path in python_files(folder):
            for module in imported_modules(path):
                if (top := module.split(".")[0]) in importers:
                    importers[top].add(str(path.relative_to(ROOT)))
    assert importers == {"wandb": {"training/tracker.py"}, "omegaconf": {"training/config.py"}}


def test_scheduling_needs_no_torch() -> None:
    modules = [f"adaptiveload.scheduling.{path.stem}" for path in python_files("scheduling") if path.stem != "__init__"]
    code = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_import_name_is_relative_links_only() -> None:
    for name in PACKAGES:
        link = ROOT / "adaptiveload" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/__init__.py would shadow Hugging Face's kernels"


def test_checkout_without_links_says_what_to_do(tmp_path: Path) -> None:
    package = tmp_path / "adaptiveload"
    package.mkdir()
    (package / "__init__.py").write_text((ROOT / "adaptiveload" / "__init__.py").read_text())
    for name in PACKAGES:  # what git writes where it may not make links
        (package / name).write_text(f"../{name}")
    result = subprocess.run([sys.executable, "-c", "import adaptiveload"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    assert "git config core.symlinks true" in result.stderr


def test_wheel_holds_every_module(tmp_path: Path) -> None:
    # From a copy: setuptools puts what an earlier build left in build/ into the wheel.
    checkout = tmp_path / "checkout"
    left_out = shutil.ignore_patterns(".venv", ".git", "build", "runs", "sample_data", "*.egg-info")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_out)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = os.environ | {"ADAPTIVELOAD_BUILD_KERNELS": "0"}  # minutes of nvcc, tested elsewhere
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(checkout)], env=environment, check=True)
    (wheel,) = tmp_path.glob("adaptiveload-*.whl")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True)
    expected = sorted(
        ".".join(("adaptiveload", folder, *path.relative_to(ROOT / folder).with_suffix("").parts))
        for folder in PACKAGES
        for path in python_files(folder)
        if path.stem != "__init__"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import importlib, adaptiveload; "
        f"assert adaptiveload.__file__.startswith({str(site)!r}), adaptiveload.__file__; "
        f"[importlib.import_module(m) for m in {expected}]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_no_file_is_named_like_a_module_it_would_shadow() -> None:
    requirements = re.findall(r'^    "([a-z0-9_]+)', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    taken = set(sys.stdlib_module_names) | set(requirements)
    for folder in (*MAY_IMPORT, "."):
        for path in (ROOT / folder).glob("*.py"):
            assert path.stem not in taken - {"__init__"}, path


def test_nothing_reaches_outside_the_repository() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    files = [ROOT / name for name in tracked] or python_files("scripts")
    outside = re.compile(r"\.\./shared|[\"'](/root|/home|/work)/")
    for path in files:
        if path.is_file() and path != Path(__file__) and path.suffix in (".py", ".md", ".yaml", ".toml", ".sbatch", ""):
            assert not outside.search(path.read_text(errors="replace")), path


def test_every_run_configuration_loads() -> None:
    from adaptiveload.training.config import load_config

    files = sorted((ROOT / "configs").glob("*.yaml"))
    assert len(files) >= 2
    for path in files:
        load_config(path)
    for path in sorted((ROOT / "configs" / "accelerate").glob("*.yaml")):
        assert yaml.safe_load(path.read_text())["num_processes"] >= 1


@pytest.mark.parametrize(
    "script", sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem != "__init__")
)
def test_every_script_prints_help(script: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"scripts.{script}", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage:")
