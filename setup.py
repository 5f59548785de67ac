"""Compiles the CUDA kernels where nvcc is found; everything else is in pyproject.toml.

`ADAPTIVELOAD_BUILD_KERNELS` is 0 to leave them out, 1 to fail without them, and by default tries.
"""

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# By path: the package imports PyTorch, which a build environment does not have.
_spec = spec_from_file_location("adaptiveload_kernels_build", ROOT / "kernels" / "build.py")
kernels = module_from_spec(_spec)
_spec.loader.exec_module(kernels)

REQUEST = os.environ.get("ADAPTIVELOAD_BUILD_KERNELS", "")
HAS_KERNELS = REQUEST != "0" and (REQUEST == "1" or kernels.find_nvcc() is not None)


class BuildWithKernels(build_py):
    """Compiles into the source folder, from where a wheel takes it and an editable install loads it."""

    def run(self) -> None:
        """Kernels first; without them AdaLN runs as plain PyTorch, so a failure stops nothing unless asked."""
        if HAS_KERNELS:
            try:
                kernels.build()
            except (RuntimeError, OSError) as error:
                if REQUEST == "1":
                    raise
                self.warn(f"the CUDA kernels were not compiled: {error}")
        super().run()


class Wheel(bdist_wheel):
    """With the library a wheel is for one platform, and for every Python: it has no part of Python in it."""

    def get_tag(self) -> tuple[str, str, str]:
        """As py3-none-linux_x86_64."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class PlatformDistribution(Distribution):
    """Says that the wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        """Whether there is a library in it."""
        return HAS_KERNELS


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": Wheel},
    distclass=PlatformDistribution,
    package_data={"adaptiveload.kernels": ["*.so", "csrc/*"]},
)
