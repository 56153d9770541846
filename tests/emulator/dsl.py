"""Compiles the test kernels in ``kernels/`` with the CuTe DSL, in a process of its own per architecture.

The result is PTX text, kept for the session in a temporary folder. Nothing compiled is stored in the repository.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
_FOLDER = tempfile.TemporaryDirectory(prefix="emulator-ptx-")


@functools.cache
def compile_ptx(module: str, arch: str, *arguments: str) -> str:
    """PTX of ``kernels/<module>.py`` run with string arguments (its ``build(*arguments)``) for ``arch``."""
    folder = Path(_FOLDER.name) / "-".join([module, arch, *arguments])
    folder.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ, CUTE_DSL_ARCH=arch, CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=str(folder))
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "kernels"), environment.get("PYTHONPATH", "")])
    code = f"import {module}; {module}.build(*{list(arguments)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    found = sorted(folder.glob("*.ptx"))
    if done.returncode or len(found) != 1:
        raise RuntimeError(
            f"compiling {module} {arguments} for {arch} failed ({len(found)} PTX files)\n{done.stderr[-3000:]}"
        )
    return found[0].read_text()


def entry_of(ptx: str) -> str:
    """Name of the only entry of a module."""
    names = [line.split(".entry")[1].strip().rstrip("(").strip() for line in ptx.splitlines() if ".entry" in line]
    if len(names) != 1:
        raise RuntimeError(f"entries: {names}")
    return names[0]
