"""An executor that reads the Hopper kernels' launch plans and computes what they would, in NumPy float32.

It takes everything from the plan (shapes from the tensor maps, scalars from the parameters), so that a call through it
tests the way from JAX operands to the kernels' parameters and back. The kernels themselves run in the emulator.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import numpy as np

from jax_fa4.ffi.plan import Fill, Kernel, Scalars, Tensor, TensorMap
from jax_fa4.kernels.artefact import Artefact, Parameter
from jax_fa4.kernels.sm90.backward.plan import BackwardBuffers
from jax_fa4.kernels.sm90.forward.layout import ForwardLayout
from tests.test_sm90_backward_plan import make_artefacts

INTEGERS = [
    *("seqlen_q", "seqlen_k", "query_offset", "left", "right", "group", "box_tokens"),
    *("tiles_m", "heads", "batch_heads", "section", "total"),
]


class OracleStore:
    """Stands in for the artefact store: artefacts with the kernel's parameters and no machine code."""

    def load(self, spec):
        cubin = b"cubin of " + spec.name.encode()
        if spec.kind != "forward":
            return dataclasses.replace(make_artefacts([spec])[0], cubin=cubin)
        sizes = [128] * 4 + [8] * (2 if spec.varlen else 1) + [4] * 13
        parameters = tuple(Parameter(size, size) for size in sizes)
        threads = (ForwardLayout(spec).threads, 1, 1)
        return Artefact(spec, "entry", cubin, "", parameters, threads, "s", "1")

    def missing_reason(self, spec):
        return None


def execute(plan, artefacts, buffers):
    """See :data:`jax_fa4.ffi.host.Executor`."""
    for step in plan.steps:
        if isinstance(step, Fill):
            words = buffers[step.buffer].reshape(-1).view(np.uint32)
            words[step.offset // 4 : (step.offset + step.size) // 4] = step.pattern
            continue
        artefact = artefacts[plan.artefacts[step.artefact].sha256]
        assert hashlib.sha256(artefact.cubin).hexdigest() == artefact.sha256
        if artefact.spec.kind == "forward":
            _forward(step, artefact, buffers)
        elif artefact.spec.kind in ("backward_main", "backward_key_value"):  # does the work of all three kernels here
            _backward(step, artefact, buffers)


def _visible(spec, q_len, kv_len, offset, left, right, seqlen_q, seqlen_k):
    """(B, T, S): who may attend."""
    row, column = np.arange(seqlen_q)[None, :, None], np.arange(seqlen_k)[None, None]
    position = row + offset[:, None, None]
    visible = (row < q_len[:, None, None]) & (column < kv_len[:, None, None])
    if spec.mask == "causal":
        visible &= column <= position
    elif spec.mask == "window":
        visible &= (column <= position + right) & (column >= position - left)
    return visible


def _lengths(info, batch, seqlen_q, seqlen_k, offset):
    if info is None:
        return (np.full(batch, value) for value in (seqlen_q, seqlen_k, offset))
    q_len, kv_len, offset, zero = info.T
    assert not zero.any()
    return q_len, kv_len, offset


def _forward(step: Kernel, artefact: Artefact, buffers) -> None:
    spec = artefact.spec
    maps = [p for p in step.parameters if isinstance(p, TensorMap)]
    query, key, value, out = (buffers[m.buffer] for m in maps)
    tensors = [p for p in step.parameters if isinstance(p, Tensor)]
    lse = buffers[tensors[0].buffer]
    scalars = [p.values[0] for p in step.parameters if isinstance(p, Scalars)]
    scale_log2, values = scalars[0], dict(zip(INTEGERS, scalars[1:], strict=True))
    batch, seqlen_q, heads, _ = query.shape
    seqlen_k = values["seqlen_k"]
    assert (values["seqlen_q"], values["group"]) == (seqlen_q, heads // key.shape[2])
    info = buffers[tensors[1].buffer] if spec.varlen else None
    q_len, kv_len, offset = _lengths(info, batch, seqlen_q, seqlen_k, values["query_offset"])
    visible = _visible(spec, q_len, kv_len, offset, values["left"], values["right"], seqlen_q, seqlen_k)
    wide = [np.repeat(x.astype(np.float32), values["group"], axis=2) for x in (key, value)]
    scores = np.einsum("btnh,bsnh->bnts", query.astype(np.float32), wide[0]) * scale_log2 * math.log(2)
    scores = np.where(visible[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse[:] = (np.where(np.isinf(top), 0, top) + np.log(total))[..., 0]
    out[:] = np.einsum("bnts,bsnh->btnh", weights / np.where(total == 0, 1, total), wide[1]).astype(out.dtype)


def _backward(step: Kernel, artefact: Artefact, buffers) -> None:
    spec = artefact.spec
    index = BackwardBuffers.of(spec.varlen, spec.deterministic)

    def load(number):
        return buffers[number].astype(np.float32)

    query, key, value, out, d_out = map(load, (index.query, index.key, index.value, index.out, index.dout))
    lse, d_lse = buffers[index.lse], buffers[index.dlse]
    scalars = [p.values for p in step.parameters if isinstance(p, Scalars) and len(p.values) == 1]
    query_offset, *window = [v[0] for v in scalars[: 3 if spec.mask == "window" else 1]]
    scale = next(v[0] for v in scalars if isinstance(v[0], float))
    group = query.shape[2] // key.shape[2]
    info = None if index.batch_info is None else buffers[index.batch_info]
    q_len, kv_len, offset = _lengths(info, len(query), query.shape[1], key.shape[1], query_offset)
    left, right = window or (0, 0)
    visible = _visible(spec, q_len, kv_len, offset, left, right, query.shape[1], key.shape[1])
    wide_key, wide_value = (np.repeat(x, group, axis=2) for x in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, wide_key) * scale
    finite = np.where(np.isinf(lse), 0, lse)[..., None]
    weights = np.where(visible[:, None] & ~np.isinf(lse)[..., None], np.exp(scores - finite), 0)
    delta = np.einsum("btnh,btnh->bnt", out, d_out) - d_lse
    d_scores = weights * (np.einsum("btnh,bsnh->bnts", d_out, wide_value) - delta[..., None]) * scale

    def store(number, gradient):
        if gradient.shape != buffers[number].shape:  # the query heads of a group share their key head
            gradient = gradient.reshape(*gradient.shape[:2], -1, group, gradient.shape[-1]).sum(3)
        buffers[number][:] = gradient.astype(buffers[number].dtype)

    store(index.dquery, np.einsum("bnts,bsnh->btnh", d_scores, wide_key))
    store(index.dkey, np.einsum("bnts,btnh->bsnh", d_scores, query))
    store(index.dvalue, np.einsum("bnts,btnh->bsnh", weights, d_out))
