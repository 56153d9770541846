"""Compiles the test kernels of ``tests/emulator/kernels`` to PTX, in child processes.

A kernel module has ``build(**options) -> (host function, fake arguments)``. The compiler must not live in the process
that runs JAX, and starting it costs more than a small kernel: ``compile_many`` builds several in one child.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 300


def compile_many(module: str, arch: str, options: list[dict]) -> list[str]:
    """PTX of each option set of ``module`` (a dotted name) for ``arch`` ("sm_90a", "sm_100f").

    Results are kept in the temporary folder under a hash of the module's source, the options and the compiler's
    version. Raises RuntimeError with the compiler's output when it fails.
    """
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_bytes()
    folder = Path(tempfile.gettempdir()) / f"jax_fa4_test_kernels_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)

    def place(option: dict) -> Path:
        key = json.dumps([arch, version, option], sort_keys=True).encode() + source
        return folder / (hashlib.sha256(key).hexdigest() + ".ptx")

    missing = [option for option in options if not place(option).exists()]
    if missing:
        job = {"module": module, "arch": arch, "options": missing, "files": [str(place(o)) for o in missing]}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        # The compiler leaves a copy of the PTX in its working directory.
        with tempfile.TemporaryDirectory() as scratch:
            child = subprocess.run(
                [sys.executable, "-m", "tests.emulator.kernel_compiler"],
                input=json.dumps(job),
                capture_output=True,
                text=True,
                env=environment,
                cwd=scratch,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        if child.returncode:
            raise RuntimeError(f"compiling {module} failed:\n" + "\n".join(child.stderr.splitlines()[-25:]))
    return [place(option).read_text() for option in options]


def _child() -> None:
    """Compiles the job on standard input and writes its files."""
    import cutlass.cute as cute

    job = json.load(sys.stdin)
    build = importlib.import_module(job["module"]).build
    compiler = cute.compile[(cute.KeepPTX(True), cute.GPUArch(job["arch"]))]
    for option, file in zip(job["options"], job["files"], strict=True):
        function, arguments = build(**option)
        text = compiler(function, *arguments).__ptx__.rstrip("\0")
        partial = Path(f"{file}.{os.getpid()}")
        partial.write_text(text)
        partial.replace(file)


if __name__ == "__main__":
    _child()
