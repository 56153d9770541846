"""Kernels compiled in forks of one process that has imported the compiler.

A test session compiles some 180 kernels. Starting Python and importing the DSL takes longer than most of them, so the
tests pay for it once a session instead of once a kernel. A fork runs the package's own worker on the package's own job;
``compile_spec`` itself, with its process per kernel, has tests of its own.
"""

from __future__ import annotations

import atexit
import functools
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jax_fa4.kernels import compile as compiler
from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.spec import KernelSpec

ROOT = Path(__file__).parents[1]
LOG = "log"
"""File in a job's folder with what the fork wrote to standard output and error."""


@functools.cache
def _server() -> subprocess.Popen:
    """This process's server; it ends with its standard input."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    folder = tempfile.TemporaryDirectory()  # the compiler leaves copies of the PTX where it was imported
    command = [sys.executable, "-m", __name__]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder.name
    )
    atexit.register(folder.cleanup)
    atexit.register(server.communicate)
    return server


def compile_spec(spec: KernelSpec) -> Artefact:
    """What ``jax_fa4.kernels.compile.compile_spec`` returns, from a fork of the server; one caller at a time."""
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        job = {"spec": spec.to_json(), "builder": compiler.BUILDERS[spec.arch, spec.kind], "folder": folder}
        print(json.dumps(job), file=server.stdin, flush=True)
        status = server.stdout.readline().strip()
        if status != "0":
            log = Path(folder, LOG)
            lines = log.read_text().splitlines()[-25:] if log.exists() else []
            raise compiler.CompileError("\n".join([f"compiling {spec.name} failed (status {status!r}):", *lines]))
        cubin, ptx = Path(folder, "kernel.cubin").read_bytes(), Path(folder, "kernel.ptx").read_text()
    version = compiler.dsl_version()
    return Artefact.from_compiler(spec, cubin, ptx, source_hash=compiler.source_hash(spec.arch), dsl_version=version)


def _run(job: str) -> None:
    """The job, in a fork: never returns."""
    status = 1
    try:
        output = os.open(Path(json.loads(job)["folder"], LOG), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdin = io.StringIO(job)

        from jax_fa4.kernels import compile_worker

        compile_worker.main()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """Runs each line of standard input as a job and answers with its exit status."""
    import cutlass.cute  # noqa: F401

    gc.freeze()
    for job in iter(sys.stdin.readline, ""):
        fork = os.fork()
        if fork == 0:
            _run(job)
        print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
