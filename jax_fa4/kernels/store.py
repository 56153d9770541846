"""Where artefacts come from: shipped with the package, a given folder, the user's cache, or the compiler.

Files are named by content: spec, hash of the kernel sources, DSL version. A shipped or given folder may hold artefacts
of any DSL version (whoever put them there chose it); the cache holds those of the installed one. Writing goes through
a temporary file, a lock and an atomic rename, so that a reader sees a whole artefact or none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from jax_fa4.kernels import compile as compiler
from jax_fa4.kernels.artefact import FORMAT, Artefact, ArtefactError
from jax_fa4.kernels.spec import KernelSpec

BUNDLED = Path(__file__).parents[1] / "artefacts"
"""Folder of the artefacts that a wheel ships."""

SUFFIX = ".fa4.zip"
LOCK_TIMEOUT_SECONDS = 900


class ArtefactMissingError(LookupError):
    """No artefact for a spec and no compiler to make one; the message says which command makes it."""


def artefact_key(spec: KernelSpec) -> str:
    """First 20 hexadecimal digits of the SHA-256 over spec, kernel sources and file format."""
    text = f"{FORMAT}\n{spec.digest()}\n{compiler.source_hash(spec.arch)}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def artefact_filename(spec: KernelSpec, dsl_version: str) -> str:
    """File name of an artefact: readable, and unique to spec, sources and DSL version."""
    return f"{spec.name}-{artefact_key(spec)}-dsl{dsl_version}{SUFFIX}"


def default_cache() -> Path:
    """The user's cache folder for artefacts (not created here)."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("jax_fa4")) / "artefacts"


@dataclass(frozen=True)
class ArtefactStore:
    """Look-up of artefacts.

    ``folder``: a folder of artefacts that someone made with ``python -m jax_fa4 compile --out``, read before the
    cache. ``cache``: where compiled artefacts are kept, None for :func:`default_cache`. ``compile_missing``: whether
    to compile what is found nowhere.
    """

    folder: Path | None = None
    cache: Path | None = None
    compile_missing: bool = True

    def load(self, spec: KernelSpec) -> Artefact:
        """The artefact for ``spec``: bundled, then ``folder``, then the cache, then compiled now.

        Raises :class:`ArtefactError` for a damaged or wrong file in a bundled or given folder (a damaged file in the
        cache is made anew), :class:`ArtefactMissingError` where there is none, and the compiler's errors.
        """
        for folder in (BUNDLED, self.folder):
            path = None if folder is None else _find(folder, spec, None)
            if path is not None:
                return _read(path, spec)
        version = compiler.dsl_version()
        cache = self.cache if self.cache is not None else default_cache()
        path = _find(cache, spec, version)
        if path is not None:
            try:
                return _read(path, spec)
            except ArtefactError:
                if version is None or not self.compile_missing:
                    raise
        if version is None or not self.compile_missing:
            raise ArtefactMissingError(self._missing_message(spec, cache))
        return make(spec, cache)

    def missing_reason(self, spec: KernelSpec) -> str | None:
        """Why :meth:`load` would find nothing for ``spec``, or None. Compiles and reads nothing."""
        version = compiler.dsl_version()
        if version is not None and self.compile_missing:
            return None
        if any(folder is not None and _find(folder, spec, None) is not None for folder in (BUNDLED, self.folder)):
            return None
        cache = self.cache if self.cache is not None else default_cache()
        return None if _find(cache, spec, version) is not None else self._missing_message(spec, cache)

    def _missing_message(self, spec: KernelSpec, cache: Path) -> str:
        searched = ", ".join(str(folder) for folder in (BUNDLED, self.folder, cache) if folder is not None)
        return (
            f"no compiled kernel {spec.name} (searched {searched}). Make it with "
            "`pip install 'jax-fa4[compile]'` and "
            f"`python -m jax_fa4 compile --arch {spec.arch} --only {spec.kind.partition('_')[0]}`; "
            "neither needs a GPU, and --out DIR makes a folder that other machines can use"
        )


def make(spec: KernelSpec, folder: Path, *, force: bool = False) -> Artefact:
    """Compiles ``spec`` into ``folder`` unless a sound artefact is there already (or ``force``), and returns it.

    Of several processes that want the same artefact, one compiles and the others wait for it.
    """
    import filelock

    version = compiler.dsl_version()
    if version is None:
        raise compiler.CompileError(f"cannot compile {spec.name}: {compiler.DSL_DISTRIBUTION} is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / artefact_filename(spec, version)
    with filelock.FileLock(str(path) + ".lock", timeout=LOCK_TIMEOUT_SECONDS):
        if path.exists() and not force:
            try:
                return Artefact.read(path, spec)
            except ArtefactError:
                path.unlink(missing_ok=True)
        artefact = compiler.compile_spec(spec)
        write_atomically(path, artefact.to_bytes())
    return artefact


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file such that ``path`` holds all of ``data`` or is untouched."""
    descriptor, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _find(folder: Path, spec: KernelSpec, dsl_version: str | None) -> Path | None:
    """File for ``spec`` in a folder: of one DSL version, or (None) of any, the newest file first."""
    if dsl_version is not None:
        path = folder / artefact_filename(spec, dsl_version)
        return path if path.is_file() else None
    candidates = list(folder.glob(artefact_filename(spec, "*")))
    return max(candidates, key=lambda path: path.stat().st_mtime, default=None)


_loaded: dict[tuple[Path, int, int, KernelSpec], Artefact] = {}
_loaded_lock = threading.Lock()


def _read(path: Path, spec: KernelSpec) -> Artefact:
    """Reads and checks a file once per process and version of the file: the same kernel is asked for at every trace."""
    status = path.stat()
    key = (path, status.st_mtime_ns, status.st_size, spec)
    with _loaded_lock:
        if key not in _loaded:
            _loaded[key] = Artefact.read(path, spec)
        return _loaded[key]


_default = ArtefactStore()


def default_store() -> ArtefactStore:
    """The store that the primitives use."""
    return _default


def set_default_store(store: ArtefactStore) -> None:
    """Replaces the default store, e.g. ``set_default_store(ArtefactStore(folder=Path("kernels")))``."""
    global _default
    _default = store
