"""Builds the CPU kernels with the package, where there is a C++ compiler.

Everything else about the package is in pyproject.toml. A tier that cannot be compiled is left out;
without any, the install succeeds and the engine uses torch.
"""

import importlib.util
import os
import shutil
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


def is_newer(library, files):
    """Whether `library` was built after the last change of all `files`, here and by build.py."""
    inputs = [*files, f"{KERNELS}/build.py"]
    if not library.is_file():
        return False
    return library.stat().st_mtime > max(Path(name).stat().st_mtime for name in inputs)


class BuildKernels(build_ext):
    """One plain shared library for each instruction set; no Python headers are involved."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext):
        tier = ext.name.rpartition("paceline_")[2]
        output = Path(self.get_ext_fullpath(ext.name))
        in_place = Path(KERNELS, f"paceline_{tier}.so")
        if in_place != output and is_newer(in_place, [*ext.sources, *ext.depends]):
            output.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(in_place, output)
            return
        try:
            builder.compile_tier(tier, output)
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
