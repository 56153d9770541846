"""Builds the native launcher in place: ``python -m jax_fa4.ffi.build``.

For a source checkout, and for an installation that had no compiler when it was made. A wheel's build does the same
through CMakeLists.txt. Needs a C++17 compiler and jaxlib (whose headers it uses), no CUDA toolkit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .register import LIBRARY_PATH

SOURCE_DIR = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
COMPILE_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffunction-sections", "-fdata-sections", "-Wall", "-Wextra")
# The C++ runtime is linked in, so that the library runs beside whatever version another extension brings.
LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--gc-sections", "-ldl")


class BuildError(RuntimeError):
    """The launcher could not be built; the message says why and carries the compiler's output."""


def sources() -> list[Path]:
    """The launcher's translation units."""
    return sorted(SOURCE_DIR.glob("*.cc"))


def build(output: Path = LIBRARY_PATH, compiler: str | None = None, include_dir: str | None = None) -> Path:
    """Compiles the launcher into a shared library.

    Args:
      output: where the library goes; replaced atomically.
      compiler: C++ compiler; by default the first of ``COMPILERS`` on the PATH.
      include_dir: folder with ``xla/ffi/api/ffi.h``; by default that of the installed jaxlib.

    Returns:
      ``output``.

    Raises:
      BuildError: no compiler, or it failed.
    """
    if compiler is None:
        compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    if include_dir is None:
        import jax

        include_dir = jax.ffi.include_dir()
    exports = f"-Wl,--version-script={SOURCE_DIR / 'exports.map'}"
    output.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=output.parent, suffix=".so.tmp")
    os.close(descriptor)
    command = [compiler, *COMPILE_FLAGS, "-isystem", include_dir, *map(str, sources()), "-o", temporary, exports]
    try:
        result = subprocess.run([*command, *LINK_FLAGS], capture_output=True, text=True)
        if result.returncode != 0:
            raise BuildError(f"{compiler} failed with exit status {result.returncode}:\n{result.stderr}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, output)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return output


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(str(error))
