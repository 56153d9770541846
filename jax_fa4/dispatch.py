"""Which implementation serves a call, and why the others do not."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax import Array, core, lax

from jax_fa4.config import AttentionConfig, Gradients, Operands, dims_of
from jax_fa4.implementations import base, registered

KERNELS = "fa4"
"""Name of the implementation that runs the package's own GPU kernels."""
CUDNN = "cudnn"
"""Handed over to ``jax.nn.dot_product_attention``; not in the registry."""

PLAIN_SCORES = 2**20
"""``implementation=None`` without kernels: at most so many scores (B * N * T * S) run as plain XLA, more blockwise."""


class FallbackWarning(UserWarning):
    """A call runs through XLA on a GPU whose kernels could have run, had the call been different."""


@dataclass(frozen=True)
class Support:
    """What would serve a call.

    Attributes:
      implementation: the one that would run; None if the requested one cannot.
      reasons: for every implementation that cannot or does not run, one sentence for each reason; empty for those that
        could run the call too.
    """

    implementation: str | None
    reasons: MappingProxyType[str, tuple[str, ...]]

    def __str__(self) -> str:
        lines = [f"{self.implementation or 'no implementation'} serves this call"]
        lines += [f"  {name}: {reason}" for name, why in self.reasons.items() for reason in why]
        return "\n".join(lines)


@dataclass(frozen=True)
class OnPlatform:
    """Kernels where the program is lowered for CUDA, ``default`` anywhere else; one set of residuals for both.

    The platform is known only when a traced call is lowered, so the choice is made there (``lax.platform_dependent``),
    inside the differentiation rule: forward and backward choose alike.
    """

    kernels: base.Implementation
    default: base.Implementation

    def implementation(self) -> base.Implementation:
        """The pair as one implementation."""
        return _pair(self)

    def forward(self, config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
        return lax.platform_dependent(
            operands,
            cuda=functools.partial(self.kernels.forward, config),
            default=functools.partial(self.default.forward, config),
        )

    def backward(
        self,
        config: AttentionConfig,
        operands: Operands,
        out: Array,
        lse: Array,
        d_out: Array,
        d_lse: Array | None,
        wanted: frozenset[str],
    ) -> Gradients:
        def run(backward: base.Backward | None) -> functools.partial[Gradients]:
            assert backward is not None
            return functools.partial(_call_backward, backward, config, wanted)

        return lax.platform_dependent(
            operands,
            out,
            lse,
            d_out,
            d_lse,
            cuda=run(self.kernels.backward),
            default=run(self.default.backward),
        )


def _call_backward(
    backward: base.Backward,
    config: AttentionConfig,
    wanted: frozenset[str],
    operands: Operands,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None,
) -> Gradients:
    return backward(config, operands, out, lse, d_out, d_lse, wanted)


@functools.lru_cache
def _pair(choice: OnPlatform) -> base.Implementation:
    # Cached, because jit caches by the identity of the implementation's functions.
    name = f"{choice.kernels.name} or {choice.default.name}"
    return base.Implementation(name, choice.forward, choice.backward)


@functools.lru_cache
def _has_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def expected_platform(operands: Operands) -> str:
    """Where a call will probably run: the operands' device if it is known, else the default device."""
    for x in jax.tree.leaves(operands):
        if isinstance(x, Array) and not isinstance(x, core.Tracer):
            return _canonical(next(iter(x.devices())).platform)
    device: Any = getattr(jax.config, "jax_default_device")  # noqa: B009
    if device is None:
        return _canonical(jax.default_backend())
    return _canonical(device if isinstance(device, str) else device.platform)


def _canonical(platform: str) -> str:
    return "cuda" if platform == "gpu" else platform


@dataclass(frozen=True)
class Decision:
    """The implementation to run, what to call it, and why the kernels were passed over on a GPU that has them."""

    implementation: base.Implementation
    name: str
    fallback_reasons: tuple[str, ...] = ()


def _kernel_reasons(config: AttentionConfig, operands: Operands) -> tuple[list[str], list[str]]:
    """(about the call, about the machine) for the kernels, the machine being this process's CUDA devices."""
    kernels = registered().get(KERNELS)
    if kernels is None:
        return [], ["the kernels are not part of this build of jax_fa4"]
    call = kernels.unsupported_reasons(config, operands)
    if not _has_cuda():
        return call, ["JAX sees no CUDA device in this process"]
    return call, kernels.platform_reasons("cuda")


def _without_kernels(operands: Operands) -> base.Implementation:
    return registered()["xla" if dims_of(operands).scores <= PLAIN_SCORES else "blockwise"]


def decide(config: AttentionConfig, operands: Operands, requested: str | None) -> Decision:
    """Picks the implementation.

    ``None``: the kernels where this process has a CUDA device that can run them and they serve the call (lowered for
    another platform, the same traced call runs blockwise); otherwise plain XLA up to :data:`PLAIN_SCORES` scores and
    blockwise beyond.

    Raises:
      ValueError: ``requested`` is unknown, or cannot serve the call; lists every reason.
    """
    known = registered()
    if requested is None:
        default = _without_kernels(operands)
        if dims_of(operands).empty:
            return Decision(default, default.name)
        call, machine = _kernel_reasons(config, operands)
        on_gpu = expected_platform(operands) == "cuda"
        if machine or call:
            return Decision(default, default.name, tuple(call) if on_gpu and not machine else ())
        pair = OnPlatform(known[KERNELS], known["blockwise"]).implementation()
        return Decision(pair, KERNELS if on_gpu else "blockwise")
    if requested not in known:
        allowed = [*known, CUDNN] if KERNELS in known else [*known, KERNELS, CUDNN]
        reason = _kernel_reasons(config, operands)[1] if requested == KERNELS else []
        if reason:
            raise ValueError(f"implementation='{requested}' cannot serve this call: {'; '.join(reason)}")
        raise ValueError(f"implementation must be None or one of {allowed}, but got {requested!r}")
    implementation = known[requested]
    if dims_of(operands).empty:
        return Decision(known["xla"], requested)
    reasons = list(implementation.unsupported_reasons(config, operands))
    if not any(isinstance(x, core.Tracer) for x in jax.tree.leaves(operands)):
        # A traced call may be lowered for any platform (for example by jax.export); lowering checks that.
        reasons += implementation.platform_reasons(expected_platform(operands))
    if reasons:
        listed = "".join(f"\n  - {reason}" for reason in reasons)
        raise ValueError(f"implementation='{requested}' cannot serve this call:{listed}")
    return Decision(implementation, requested)


def support(config: AttentionConfig, operands: Operands, requested: str | None, cudnn: list[str]) -> Support:
    """What :func:`decide` would pick, with the reasons of every implementation; never raises for a known name."""
    platform = expected_platform(operands)
    reasons: dict[str, tuple[str, ...]] = {}
    for name, implementation in registered().items():
        if name != KERNELS:
            found = implementation.unsupported_reasons(config, operands)
            reasons[name] = tuple(found + implementation.platform_reasons(platform))
    call, machine = _kernel_reasons(config, operands)
    reasons[KERNELS] = tuple(call + machine)
    reasons[CUDNN] = tuple(cudnn + ([] if platform == "cuda" else [f"cuDNN needs a CUDA device, not {platform!r}"]))
    if requested is None:
        chosen: str | None = decide(config, operands, None).name
    elif requested in reasons:
        chosen = None if reasons[requested] else requested
    else:
        chosen = decide(config, operands, requested).name  # raises: unknown
    return Support(chosen, MappingProxyType({name: why for name, why in reasons.items() if name != chosen}))


def warn_of_fallback(decision: Decision, stacklevel: int) -> None:
    """One :class:`FallbackWarning` for each call site and set of reasons (Python's default filter shows each once)."""
    if decision.fallback_reasons:
        warnings.warn(
            f"jax_fa4 runs this call through XLA ({decision.name}), not its kernels: "
            f"{'; '.join(decision.fallback_reasons)}. Pass implementation={decision.name!r} to accept that.",
            FallbackWarning,
            stacklevel=stacklevel + 1,
        )
