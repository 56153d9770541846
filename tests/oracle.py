"""An executor that reads the Hopper forward's launch plan and computes what its kernel would, in NumPy float32.

It takes everything from the plan (shapes from the tensor maps, scalars from the parameters), so that a call through it
tests the way from JAX operands to the kernels' parameters and back. The kernels themselves run in the emulator.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from jax_fa4.ffi.plan import Fill, Kernel, Scalars, Tensor, TensorMap
from jax_fa4.kernels.artefact import Artefact, Parameter
from jax_fa4.kernels.sm90.forward.layout import ForwardLayout

INTEGERS = [
    *("seqlen_q", "seqlen_k", "query_offset", "left", "right", "group", "box_tokens"),
    *("tiles_m", "heads", "batch_heads", "section", "total"),
]


class OracleStore:
    """Stands in for the artefact store: artefacts with the kernel's parameters and no machine code."""

    def load(self, spec):
        sizes = [128] * 4 + [8] * (2 if spec.varlen else 1) + [4] * 13
        parameters = tuple(Parameter(size, size) for size in sizes)
        threads = (ForwardLayout(spec).threads, 1, 1)
        return Artefact(spec, "entry", b"cubin of " + spec.name.encode(), "", parameters, threads, "s", "1")

    def missing_reason(self, spec):
        return None


def execute(plan, artefacts, buffers):
    """See :data:`jax_fa4.ffi.host.Executor`."""
    for step in plan.steps:
        if isinstance(step, Fill):
            words = buffers[step.buffer].reshape(-1).view(np.uint32)
            words[step.offset // 4 : (step.offset + step.size) // 4] = step.pattern
        else:
            _forward(step, artefacts[plan.artefacts[step.artefact].sha256], buffers)


def _forward(step: Kernel, artefact: Artefact, buffers) -> None:
    assert hashlib.sha256(artefact.cubin).hexdigest() == artefact.sha256
    maps = [p for p in step.parameters if isinstance(p, TensorMap)]
    query, key, value, out = (buffers[m.buffer] for m in maps)
    tensors = [p for p in step.parameters if isinstance(p, Tensor)]
    lse = buffers[tensors[0].buffer]
    scalars = [p.values[0] for p in step.parameters if isinstance(p, Scalars)]
    scale_log2, values = scalars[0], dict(zip(INTEGERS, scalars[1:], strict=True))
    batch, seqlen_q, heads, _ = query.shape
    seqlen_k = values["seqlen_k"]
    assert (values["seqlen_q"], values["group"]) == (seqlen_q, heads // key.shape[2])
    if artefact.spec.varlen:
        q_len, kv_len, offset, zero = buffers[tensors[1].buffer].T
        assert not zero.any()
    else:
        q_len, kv_len, offset = (np.full(batch, values[n]) for n in ("seqlen_q", "seqlen_k", "query_offset"))
    row, column = np.arange(seqlen_q)[None, :, None], np.arange(seqlen_k)[None, None]
    position = row + offset[:, None, None]
    visible = (row < q_len[:, None, None]) & (column < kv_len[:, None, None])
    if artefact.spec.mask == "causal":
        visible &= column <= position
    elif artefact.spec.mask == "window":
        visible &= (column <= position + values["right"]) & (column >= position - values["left"])
    wide = [np.repeat(x.astype(np.float32), values["group"], axis=2) for x in (key, value)]
    scores = np.einsum("btnh,bsnh->bnts", query.astype(np.float32), wide[0]) * scale_log2 * math.log(2)
    scores = np.where(visible[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse[:] = (np.where(np.isinf(top), 0, top) + np.log(total))[..., 0]
    out[:] = np.einsum("bnts,bsnh->btnh", weights / np.where(total == 0, 1, total), wide[1]).astype(out.dtype)
