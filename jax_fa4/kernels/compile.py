"""KernelSpec to artefact, on a machine with or without a GPU.

The compiler (nvidia-cutlass-dsl) runs in a child process: it reads its settings from ``CUTE_DSL_*`` environment
variables when imported and brings its own LLVM; neither may touch the process that runs JAX.

A kernel's builder is a module with a function ``build(spec) -> (host_function, arguments)``: a ``cute.jit`` function
that launches exactly one kernel, and the fake arguments to compile it for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.spec import KernelSpec, UnsupportedSpecError

DSL_DISTRIBUTION = "nvidia-cutlass-dsl"
TIMEOUT_SECONDS = 600

BUILDERS: dict[tuple[str, str], str] = {
    ("sm_90a", "forward"): "jax_fa4.kernels.sm90.forward.kernel",
    ("sm_90a", "backward_preprocess"): "jax_fa4.kernels.support.preprocess",
    ("sm_90a", "backward_main"): "jax_fa4.kernels.sm90.backward.kernel",
    ("sm_90a", "backward_key_value"): "jax_fa4.kernels.sm90.backward_split.key_value",
    ("sm_90a", "backward_query"): "jax_fa4.kernels.sm90.backward_split.query",
    ("sm_90a", "backward_postprocess"): "jax_fa4.kernels.support.postprocess",
    ("sm_100f", "forward"): "jax_fa4.kernels.sm100.forward.kernel",
    ("sm_100f", "backward_preprocess"): "jax_fa4.kernels.support.preprocess",
    ("sm_100f", "backward_main"): "jax_fa4.kernels.sm100.backward.kernel",
    ("sm_100f", "backward_postprocess"): "jax_fa4.kernels.support.postprocess",
    ("sm_100f", "backward_key_value"): "jax_fa4.kernels.sm100.backward_split.kernel",
    ("sm_100f", "backward_query"): "jax_fa4.kernels.sm100.backward_split.kernel",
}
"""Module that builds the kernel of each (arch, kind)."""

_SOURCE_FOLDERS = {"sm_90a": ("common", "support", "sm90"), "sm_100f": ("common", "support", "sm90/backward", "sm100")}


class CompileError(RuntimeError):
    """The compiler is missing or failed; the message names the spec and quotes the compiler's last lines."""


def dsl_version() -> str | None:
    """Version of the installed DSL, None where it is not installed."""
    try:
        return importlib.metadata.version(DSL_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def source_hash(arch: str) -> str:
    """Hexadecimal SHA-256 over the sources that kernels of ``arch`` are built from (names and contents)."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for folder in _SOURCE_FOLDERS[arch]:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def compile_spec(spec: KernelSpec) -> Artefact:
    """Compiles one kernel; a few seconds. Raises :class:`CompileError` or :class:`UnsupportedSpecError`."""
    if (spec.arch, spec.kind) not in BUILDERS:
        raise UnsupportedSpecError(f"kind is {spec.kind!r}; {spec.arch} has no builder for it")
    version = dsl_version()
    if version is None:
        raise CompileError(f"cannot compile {spec.name}: {DSL_DISTRIBUTION} is not installed")
    with tempfile.TemporaryDirectory(prefix="jax_fa4_") as folder:
        job = {"spec": spec.to_json(), "builder": BUILDERS[spec.arch, spec.kind], "folder": folder}
        try:
            child = subprocess.run(
                [sys.executable, "-m", "jax_fa4.kernels.compile_worker"],
                input=json.dumps(job),
                capture_output=True,
                text=True,
                cwd=folder,
                env=_child_environment(),
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(f"compiling {spec.name} took longer than {TIMEOUT_SECONDS} s") from error
        if child.returncode != 0:
            lines = (child.stderr.strip() or child.stdout.strip()).splitlines()[-25:]
            raise CompileError(f"compiling {spec.name} failed (exit code {child.returncode}):\n" + "\n".join(lines))
        cubin = Path(folder, "kernel.cubin").read_bytes()
        ptx = Path(folder, "kernel.ptx").read_text()
    return Artefact.from_compiler(spec, cubin, ptx, source_hash=source_hash(spec.arch), dsl_version=version)


def _child_environment() -> dict[str, str]:
    """This process's environment without the compiler's settings, and with this process's import path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    # Only kernels' Python is imported there; a child that grabs the GPU would disturb the parent.
    environment["JAX_PLATFORMS"] = "cpu"
    return environment
