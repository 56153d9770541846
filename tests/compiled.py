"""Where the tests' compiled kernels come from: the compiler (kept between runs), or a folder named by ``--artefacts``.

With the folder, the tests that execute kernels run on machines without nvidia-cutlass-dsl.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import tempfile
from pathlib import Path

import filelock
import pytest

from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.compile import dsl_version
from jax_fa4.kernels.spec import KernelSpec
from jax_fa4.kernels.store import ArtefactStore, artefact_filename, set_default_store, write_atomically
from tests.compile_server import compile_spec

_folder: Path | None = None


def set_folder(folder: Path | None) -> None:
    """Makes the tests, and calls through the package, look for kernels in ``folder`` first."""
    global _folder
    _folder = folder
    if folder is not None:
        set_default_store(ArtefactStore(folder=folder))


class KeptStore(ArtefactStore):
    """A store that has missing kernels made by the session's compile server."""

    def load(self, spec: KernelSpec) -> Artefact:
        version = dsl_version()
        if version is not None and dataclasses.replace(self, compile_missing=False).missing_reason(spec) is not None:
            path = self.cache / artefact_filename(spec, version)
            with filelock.FileLock(f"{path}.lock"):  # of several workers, one compiles
                if not path.exists():
                    write_atomically(path, compile_spec(spec).to_bytes())
        return super().load(spec)


@functools.cache
def own_store() -> ArtefactStore:
    """Kernels in the given folder, and those that the tests compile, kept in the temporary folder under their sources'
    hash."""
    cache = Path(tempfile.gettempdir()) / f"jax_fa4_test_artefacts_{os.getuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    return KeptStore(folder=_folder, cache=cache)


def require_kernels() -> None:
    """Skips the module that calls it where kernels can neither be compiled nor come from a folder."""
    if _folder is None and importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl to compile kernels, or --artefacts", allow_module_level=True)
