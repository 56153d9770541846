"""The kernels as an implementation of attention: what they serve, and how a call becomes theirs."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings

import jax.numpy as jnp
from jax import Array

from jax_fa4.config import AttentionConfig, Gradients, Operands, dims_of
from jax_fa4.ffi.call import Target, detect_target
from jax_fa4.ffi.host import Executor
from jax_fa4.ffi.register import unavailable_reason
from jax_fa4.implementations import blockwise
from jax_fa4.implementations.base import Implementation
from jax_fa4.kernels.spec import ARCHITECTURES, DTYPES, UnsupportedSpecError
from jax_fa4.primitives import BATCH_INFO_COLUMNS, AttentionCall, BackwardOperation, ForwardOperation
from jax_fa4.primitives import backward as run_backward
from jax_fa4.primitives import forward as run_forward

NAME = "fa4"


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The implementation for one way of running the kernels.

    Attributes:
      arch: architecture to compile for, or None for that of the CUDA device at hand.
      executor: what carries out plans on platforms other than CUDA; None on none.
    """

    arch: str | None = None
    executor: Executor | None = None

    def implementation(self, name: str) -> Implementation:
        """This as an entry of the registry."""
        return Implementation(name, self.forward, self.backward, self.unsupported_reasons, self.platform_reasons)

    def call(self, config: AttentionConfig, operands: Operands) -> AttentionCall:
        """The call's static parameters. ``config.scale`` must be a number; see :func:`_signed` for
        negative ones."""
        assert config.scale is not None
        varlen = any(x is not None for x in (operands.query_lengths, operands.key_value_lengths, operands.query_offset))
        return AttentionCall(
            scale=abs(config.scale),
            mask=config.mask_kind,
            left=config.window_left,
            right=config.window_right,
            query_offset=0 if varlen else config.query_offset,
            varlen=varlen,
            arch=self.arch,
            executor=self.executor,
        )

    def forward(self, config: AttentionConfig, operands: Operands) -> tuple[Array, Array]:
        """See :data:`jax_fa4.implementations.base.Forward`."""
        call = self.call(config, operands)
        query = _signed(config, operands.query)
        return run_forward(call, query, operands.key, operands.value, _info(call, config, operands))

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
        """See :data:`jax_fa4.implementations.base.Backward`. Blockwise XLA, with a warning, where the kernels have no
        backward for the call: the residuals are the same."""
        call = self.call(config, operands)
        reason = self.backward_reason(config, operands)
        if reason is not None:
            from jax_fa4.dispatch import FallbackWarning  # which imports the implementations

            warnings.warn(
                f"jax_fa4 computes the gradients of this call through XLA (blockwise), not by its kernels: {reason}",
                FallbackWarning,
                stacklevel=2,
            )
            return blockwise.backward(config, operands, out, lse, d_out, d_lse, wanted)
        d_query, d_key, d_value = run_backward(
            call,
            _signed(config, operands.query),
            operands.key,
            operands.value,
            out,
            lse,
            d_out,
            d_lse,
            _info(call, config, operands),
            deterministic=config.deterministic,
        )
        gradients = {"query": _signed(config, d_query), "key": d_key, "value": d_value}
        return Gradients(**{name: x for name, x in gradients.items() if name in wanted})

    def backward_reason(self, config: AttentionConfig, operands: Operands) -> str | None:
        """Why the kernels cannot compute the gradients of a call whose forward they serve, or None."""
        target = _target(self.arch)
        if target is None:
            return "the architecture is unknown: JAX sees no CUDA device in this process"
        operation = BackwardOperation(self.call(config, operands), config.deterministic)
        try:
            return operation.missing_reason(operands[:3], target)
        except UnsupportedSpecError as error:
            return str(error)

    def unsupported_reasons(self, config: AttentionConfig, operands: Operands) -> list[str]:
        """One sentence for each thing about the call that the kernels cannot serve."""
        reasons = []
        dtype = operands.query.dtype.name
        if dtype not in DTYPES:
            reasons.append(f"the operands are {dtype}, the kernels take {' and '.join(DTYPES)}")
        absent = {
            "bias": operands.bias,
            "mask (only causal, windows, lengths and offsets are computed in the kernels)": operands.mask,
            "sinks": operands.sinks,
            "query_segment_ids and key_value_segment_ids": operands.query_segment_ids,
            "logits_soft_cap": config.logits_soft_cap,
        }
        reasons += [f"the kernels cannot take {name}" for name, given in absent.items() if given is not None]
        if config.scale is None:
            reasons.append("scale is an array or traced; the kernels need a Python number")
        elif not math.isfinite(config.scale):
            reasons.append(f"scale is {config.scale}, the kernels need a finite number")
        return reasons or self._artefact_reasons(config, operands)

    def _artefact_reasons(self, config: AttentionConfig, operands: Operands) -> list[str]:
        """Why no compiled kernel can be had for a call that is legal otherwise."""
        operation = ForwardOperation(self.call(config, operands))
        target = _target(self.arch)
        try:
            # Without a device the architecture is unknown; the checks of head dims are the same for all.
            operation.specs(operands[:3], target or Target(ARCHITECTURES[0]))
        except UnsupportedSpecError as error:
            return [str(error)]
        if target is None or dims_of(operands).empty:
            return []
        missing = operation.missing_reason(operands[:3], target)
        return [] if missing is None else [missing]

    def platform_reasons(self, platform: str) -> list[str]:
        """One sentence for each thing about the machine that keeps the kernels from running there."""
        if self.executor is not None:
            return []
        if platform != "cuda":
            return [f"the kernels run on CUDA devices, not on {platform!r}"]
        reasons = [unavailable_reason()]
        if self.arch is None:
            try:
                detect_target()
            except ValueError as error:
                reasons.append(str(error))
        return [reason for reason in reasons if reason is not None]


def _target(arch: str | None) -> Target | None:
    """The target of a call, or None where it is not known yet."""
    if arch is not None:
        return Target(arch)
    try:
        return detect_target()
    except ValueError:
        return None


def _signed(config: AttentionConfig, x: Array) -> Array:
    """The kernels take scales from 0 up: a negative one is its magnitude on the negated query (which is exact)."""
    assert config.scale is not None
    return -x if config.scale < 0 else x


def _info(call: AttentionCall, config: AttentionConfig, operands: Operands) -> Array | None:
    return batch_info(config, operands) if call.varlen else None


def batch_info(config: AttentionConfig, operands: Operands) -> Array:
    """The kernels' operand for lengths and offsets that are arrays: int32 (B, 4), see BATCH_INFO_COLUMNS."""
    dims = dims_of(operands)

    def column(given: Array | None, default: int, limit: int | None = None) -> Array:
        values = jnp.full((dims.batch,), default, jnp.int32) if given is None else given.astype(jnp.int32)
        values = jnp.broadcast_to(values, (dims.batch,))
        return values if limit is None else jnp.clip(values, 0, limit)

    columns = [
        column(operands.query_lengths, dims.query_length, dims.query_length),
        column(operands.key_value_lengths, dims.key_length, dims.key_length),
        column(operands.query_offset, config.query_offset),
    ]
    columns += [jnp.zeros_like(columns[0])] * (BATCH_INFO_COLUMNS - len(columns))
    return jnp.stack(columns, axis=1)


@functools.cache
def emulated(executor: Executor, arch: str, name: str) -> Implementation:
    """The kernels of one architecture, carried out on the host by ``executor``; for tests.

    Register it with :func:`jax_fa4.implementations.base.register` under ``name``.
    """
    return Kernels(arch, executor).implementation(name)


IMPLEMENTATION = Kernels().implementation(NAME)

FOR_ARCHITECTURE = tuple(Kernels(arch).implementation(f"{NAME}:{arch}") for arch in ARCHITECTURES)
"""The kernels for a named architecture, ``implementation="fa4:sm_90a"``: to lower or export a call on a machine without
such a GPU."""
