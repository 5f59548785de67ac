"""AdaptiveLoad: the import name. The code lives in the folders that the symbolic links beside this file point to."""

from pathlib import Path

__version__ = "0.1.0"

for _name in ("data", "kernels", "models", "scheduling", "training"):
    if not (Path(__file__).parent / _name).is_dir():
        raise ImportError(
            f"{Path(__file__).parent / _name} is not a folder: this checkout was made without symbolic links. "
            "Run `git config core.symlinks true && git checkout -- adaptiveload` in the repository "
            "(on Windows with Developer Mode on), or install the wheel with `pip install .` from a checkout that has them."
        )
