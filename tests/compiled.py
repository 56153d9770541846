"""Where the tests' compiled kernels come from: the compiler (kept between runs), or a folder named by ``--artefacts``.

With the folder, the tests that execute kernels run on machines without nvidia-cutlass-dsl.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

from jax_fa4.kernels.store import ArtefactStore, set_default_store

_folder: Path | None = None


def set_folder(folder: Path | None) -> None:
    """Makes the tests, and calls through the package, look for kernels in ``folder`` first."""
    global _folder
    _folder = folder
    if folder is not None:
        set_default_store(ArtefactStore(folder=folder))


def own_store() -> ArtefactStore:
    """Kernels in the given folder, and those that the tests compile, kept in the temporary folder under their sources'
    hash."""
    cache = Path(tempfile.gettempdir()) / f"jax_fa4_test_artefacts_{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    return ArtefactStore(folder=_folder, cache=cache)


def require_kernels() -> None:
    """Skips the module that calls it where kernels can neither be compiled nor come from a folder."""
    if _folder is None and importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl to compile kernels, or --artefacts", allow_module_level=True)
