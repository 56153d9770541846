"""Programs that run once or twice: compiling them is nearly all of the time."""

from __future__ import annotations

from collections.abc import Callable

import jax


def quick_jit(function: Callable) -> jax.stages.Wrapped:
    """``jax.jit`` with LLVM's optimisations left out on CPUs; XLA's own passes, which partition and fuse, stay."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)
