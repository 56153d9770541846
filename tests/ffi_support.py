"""What the launcher's tests share: the built library, the recording driver, calls through XLA's CPU client."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import filelock
import jax
import numpy as np
import pytest

from jax_fa4.ffi import build, register
from jax_fa4.ffi.plan import LaunchPlan
from jax_fa4.ffi.wire import encode

NATIVE_DIR = Path(__file__).parent / "ffi_native"
HAS_COMPILER = any(map(shutil.which, build.COMPILERS))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler on this machine")


def build_launcher_in_place() -> None:
    """Makes the library of this checkout if it is missing or older than its sources (several workers may ask)."""
    name = hashlib.sha256(str(register.LIBRARY_PATH).encode()).hexdigest()[:16]
    with filelock.FileLock(Path(tempfile.gettempdir()) / f"jax_fa4_build_{name}.lock"):
        inputs = [*build.sources(), *build.SOURCE_DIR.glob("*.h"), build.SOURCE_DIR / "exports.map"]
        newest = max(path.stat().st_mtime for path in inputs)
        if not register.LIBRARY_PATH.exists() or register.LIBRARY_PATH.stat().st_mtime < newest:
            build.build()


class RecordingDriver:
    """Handle on tests/ffi_native/stub_driver.cc, installed in place of libcuda."""

    def __init__(self, library: ctypes.CDLL, launcher: ctypes.CDLL):
        self.library = library
        self.launcher = launcher
        library.stub_driver.restype = ctypes.c_void_p
        library.stub_log.restype = ctypes.c_char_p
        library.stub_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
        library.stub_context.argtypes = [ctypes.c_void_p]
        library.stub_parameter_sizes.argtypes = [ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t]

    def install(self, parameter_info: bool = True) -> None:
        self.library.stub_reset()
        self.launcher.jax_fa4_install_driver(self.library.stub_driver(int(parameter_info)))

    def uninstall(self) -> None:
        self.launcher.jax_fa4_install_driver(None)

    def parameter_sizes(self, *sizes: int) -> None:
        """What the "compiled" kernels declare, and how many bytes of each parameter a launch records."""
        self.library.stub_parameter_sizes((ctypes.c_size_t * len(sizes))(*sizes), len(sizes))

    def fail(self, call: str, result: int) -> None:
        self.library.stub_fail(call.encode(), result)

    def calls(self, *names: str) -> list[dict]:
        """The recorded calls in order, optionally only those named."""
        log = [json.loads(line) for line in self.library.stub_log().decode().splitlines()]
        return [entry for entry in log if not names or entry["call"] in names]

    def __getattr__(self, name: str):
        return getattr(self.library, f"stub_{name}")


@functools.cache
def recording_driver() -> RecordingDriver:
    """Builds and loads launcher and stub, and registers the launcher's host variant with the CPU client."""
    build_launcher_in_place()
    launcher = register.load()
    output = Path(tempfile.mkdtemp()) / "stub_driver.so"
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)))
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", "-I", str(build.SOURCE_DIR), str(NATIVE_DIR / "stub_driver.cc")]
        + ["-o", str(output)],
        check=True,
    )
    jax.ffi.register_ffi_target(
        register.TARGET_NAME,
        {
            "instantiate": jax.ffi.pycapsule(launcher.JaxFa4Instantiate),
            "execute": jax.ffi.pycapsule(launcher.JaxFa4ExecuteOnHost),
        },
        platform="cpu",
    )
    return RecordingDriver(ctypes.CDLL(str(output)), launcher)


def call(operands, results, plan: bytes, cubins: bytes):
    """Runs the custom call on XLA's CPU client. ``results`` are ShapeDtypeStructs."""
    target = jax.ffi.ffi_call(register.TARGET_NAME, results)
    return jax.block_until_ready(jax.jit(lambda *args: target(*args, plan=plan, cubins=cubins))(*operands))


def call_plan(operands, results, plan: LaunchPlan, cubins: dict[str, bytes]):
    """Encodes a plan for these operands and results, and runs it."""
    sizes = [np.prod(array.shape, dtype=int).item() * array.dtype.itemsize for array in (*operands, *results)]
    return call(operands, results, *encode(plan, sizes, cubins))
