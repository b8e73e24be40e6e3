"""Builds the CPU kernels with the package, where there is a C++ compiler.

Everything else about the package is in pyproject.toml. A tier that cannot be compiled is left out;
without any, the install succeeds and the engine uses torch.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = "engine/kernels/cpu"


def load_builder():
    """engine/kernels/cpu/build.py, without importing the package that is being installed."""
    spec = importlib.util.spec_from_file_location("build_kernels", f"{KERNELS}/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


builder = load_builder()


class BuildKernels(build_ext):
    """One plain shared library for each instruction set; no Python headers are involved."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext):
        tier = ext.name.rpartition("paceline_")[2]
        try:
            builder.compile_tier(tier, Path(self.get_ext_fullpath(ext.name)))
        except builder.CannotBuild as error:
            print(f"CPU kernels {tier}: not built, torch is used instead: {error}", file=sys.stderr)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            f"{KERNELS.replace('/', '.')}.paceline_{tier}",
            sources=[str(path.relative_to(Path.cwd())) for path in builder.sources()],
            depends=[str(path.relative_to(Path.cwd())) for path in builder.FOLDER.glob("*.h")],
            optional=True,
        )
        for tier in builder.tiers()
    ],
)
