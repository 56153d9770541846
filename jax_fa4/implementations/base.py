"""What an implementation of attention provides, and the registry of implementations by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jax import Array

from jax_fa4.config import AttentionConfig, Gradients, Operands

Forward = Callable[[AttentionConfig, Operands], tuple[Array, Array]]
"""(config, operands) -> (out (B, T, N, Hv) in the query's dtype, lse (B, N, T) float32, natural logarithm).

float64 operands give a float64 lse. Rows that see no key: out 0, lse -inf (with a sink: the sink)."""

Backward = Callable[
    [AttentionConfig, Operands, Array, Array, Array, "Array | None", frozenset[str]],
    Gradients,
]
"""(config, operands, out, lse, d_out, d_lse, wanted) -> gradients.

``d_lse`` is None when lse has no cotangent. ``wanted`` names the fields of :data:`~jax_fa4.config.DIFFERENTIABLE`
whose gradient somebody uses; other fields may be left None. A gradient has its operand's shape and dtype."""


def _always(*_: object) -> list[str]:
    return []


@dataclass(frozen=True)
class Implementation:
    """Functions that compute one attention call on canonical operands (:class:`~jax_fa4.config.Operands`).

    Attributes:
      name: what a caller passes as ``implementation=``.
      forward: see :data:`Forward`.
      backward: see :data:`Backward`; None if JAX shall differentiate ``forward``.
      unsupported_reasons: (config, operands) -> one sentence for each thing about the *call* (shapes, dtypes,
        features) that the implementation cannot serve; empty if it can. Operands may be tracers.
      platform_reasons: (platform) -> one sentence for each thing about the *machine*; ``platform`` is where the call
        is expected to run ("cpu", "cuda", "rocm", "tpu").
    """

    name: str
    forward: Forward
    backward: Backward | None
    unsupported_reasons: Callable[[AttentionConfig, Operands], list[str]] = _always
    platform_reasons: Callable[[str], list[str]] = _always


_registry: dict[str, Implementation] = {}


def register(implementation: Implementation) -> None:
    """Makes an implementation available under its name (replacing one of that name).

    Internal: the package registers its own here, and a test suite may add others, for example kernels that run in an
    emulator, which ``attention(..., implementation=name)`` then finds.
    """
    _registry[implementation.name] = implementation


def unregister(name: str) -> None:
    """Takes an implementation away again."""
    del _registry[name]


def registered() -> dict[str, Implementation]:
    """The implementations by name, in order of registration."""
    return dict(_registry)
