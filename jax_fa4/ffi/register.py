"""Finds the native launcher and registers it with XLA.

The library is loaded with ctypes and needs neither a GPU nor the CUDA driver to load. Without it (no compiler at
installation) everything else of the package works; :func:`unavailable_reason` says what is missing.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import jax

from .wire import VERSION

TARGET_NAME = "jax_fa4_launch"
"""The custom call's target."""

LIBRARY_PATH = Path(__file__).parent / "libjax_fa4_launcher.so"

BUILD_HINT = "python -m jax_fa4.ffi.build"


class LauncherUnavailable(RuntimeError):
    """The native launcher cannot be used; the message says why and what to do."""


@functools.cache
def load() -> ctypes.CDLL:
    """The native library.

    Raises:
      LauncherUnavailable: not built, not loadable, or of another version than the Python package.
    """
    if not LIBRARY_PATH.exists():
        raise LauncherUnavailable(
            f"the native launcher {LIBRARY_PATH} was not built; `{BUILD_HINT}` makes it (needs a C++17 compiler)"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
        version = library.jax_fa4_wire_version()
    except (OSError, AttributeError) as error:
        raise LauncherUnavailable(f"the native launcher does not load: {error}; `{BUILD_HINT}` rebuilds it") from error
    if version != VERSION:
        raise LauncherUnavailable(
            f"the native launcher reads plan format {version}, not {VERSION}; `{BUILD_HINT}` rebuilds it"
        )
    library.jax_fa4_driver_status.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.jax_fa4_install_driver.argtypes = [ctypes.c_void_p]
    library.jax_fa4_install_driver.restype = None
    return library


@functools.cache
def register() -> None:
    """Registers the handler for the CUDA platform, once. Initialises no backend.

    Raises:
      LauncherUnavailable: as for :func:`load`.
    """
    library = load()
    jax.ffi.register_ffi_target(
        TARGET_NAME,
        {
            "instantiate": jax.ffi.pycapsule(library.JaxFa4Instantiate),
            "initialize": jax.ffi.pycapsule(library.JaxFa4Initialize),
            "execute": jax.ffi.pycapsule(library.JaxFa4Execute),
        },
        platform="CUDA",
    )


def unavailable_reason() -> str | None:
    """Why the launcher cannot be registered here, or None if it can."""
    try:
        register()
    except LauncherUnavailable as error:
        return str(error)
    return None


def driver_unavailable_reason() -> str | None:
    """Why the CUDA driver cannot be used from this process, or None if it can.

    Raises:
      LauncherUnavailable: as for :func:`load`.
    """
    text = ctypes.create_string_buffer(1024)
    return None if load().jax_fa4_driver_status(text, len(text)) else text.value.decode(errors="replace")
