"""The forward kernels run from their PTX in the emulator: problems of ``tests.cases`` in, arrays and counts out."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jax_fa4.ffi.plan import LaunchPlan
from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.plans import forward_plan
from jax_fa4.kernels.problem import UNBOUNDED, ForwardProblem
from jax_fa4.kernels.spec import KernelSpec, Tile
from tests.cases import Case, assert_close, visible
from tests.compiled import own_store
from tests.emulator.launch import Options, Report, executor


@dataclass
class Launch:
    """One emulated forward: the kernel, its plan, and the operands (batch_info last, where there is one)."""

    artefact: Artefact
    plan: LaunchPlan
    operands: list[np.ndarray]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]

    def run(
        self, options: Options | None = None, ptx: str | None = None
    ) -> tuple[np.ndarray, np.ndarray, list[Report]]:
        """out, lse and the kernel's report; ``ptx`` replaces the artefact's (mutation tests). Results start as NaN."""
        out = np.full(self.out_shape, np.nan, self.operands[0].dtype)
        lse = np.full(self.lse_shape, np.nan, np.float32)
        text = self.artefact.ptx if ptx is None else ptx
        reports = executor(self.plan, [text], [*self.operands, out, lse], len(self.operands), options)
        return out, lse, reports[0] if reports else Report()


def mask_kind(arguments: dict) -> tuple[str, int, int]:
    """(mask, left, right) of the kernels for a case's mask arguments."""
    causal, window = arguments.get("is_causal", False), arguments.get("local_window_size")
    if window is None:
        return ("causal" if causal else "none"), UNBOUNDED, UNBOUNDED
    left, right = window
    return "window", left, min(right, 0) if causal else right


def prepare(case: Case, arch: str, arrays: dict, *, pack_gqa=False, sm_count=None, tile: Tile | None = None) -> Launch:
    """The launch for a case; ``arrays`` has query, key, value. A small ``sm_count`` gives CTAs several tiles each."""
    arguments = case.mask_arguments()
    mask, left, right = mask_kind(arguments)
    varlen = "query_seq_lengths" in arguments
    (t, s), (d, d_v), (n, k) = case.lengths, case.head_dims, case.heads
    spec = KernelSpec.create(
        arch=arch,
        kind="forward",
        dtype=case.dtype,
        head_dim=d,
        head_dim_v=d_v,
        mask=mask,
        varlen=varlen,
        pack_gqa=pack_gqa,
        tile=tile,
    )
    problem = ForwardProblem(
        batch=case.batch,
        seqlen_q=t,
        seqlen_k=s,
        heads=n,
        kv_heads=k,
        head_dim=d,
        head_dim_v=d_v,
        dtype=case.dtype,
        scale=d**-0.5,
        query_offset=arguments.get("query_offset", 0),
        left=left,
        right=right,
    )
    artefact = own_store().load(spec)
    operands = [np.array(arrays[name]) for name in ("query", "key", "value")]
    if varlen:
        offsets = np.full(case.batch, problem.query_offset)
        info = [arguments["query_seq_lengths"], arguments["key_value_seq_lengths"], offsets, np.zeros_like(offsets)]
        operands.append(np.stack(info, 1).astype(np.int32))
    plan = forward_plan(artefact, problem, sm_count=sm_count)
    return Launch(artefact, plan, operands, (case.batch, t, n, d_v), (case.batch, n, t))


def definition(arrays: dict, mask: np.ndarray, probability_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """``tests.cases.plain_attention`` in NumPy, also in float32, without a program to compile for every new shape.

    ``arrays``: query (B, T, N, D), key and value (B, S, K, D or D_v); ``mask`` (B, T, S). Returns out (B, T, N, D_v)
    and lse (B, N, T).
    """
    query, key, value = (np.asarray(arrays[name]).astype(np.float32) for name in ("query", "key", "value"))
    group = query.shape[2] // key.shape[2]
    # (B, heads, tokens, D): a product of matrices for every head.
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (query, np.repeat(key, group, 2), np.repeat(value, group, 2)))
    logits = np.where(mask[:, None], q @ k.swapaxes(2, 3) / np.float32(query.shape[-1] ** 0.5), np.float32(-np.inf))
    peak = logits.max(-1, keepdims=True, initial=-1e30)
    weights = np.exp(logits - peak)
    total = weights.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + peak[..., 0]
    out = weights.astype(probability_dtype).astype(np.float32) @ v / np.where(total == 0, 1, total)[..., None]
    return out.transpose(0, 2, 1, 3), lse


def check(
    case: Case, arrays: dict, out: np.ndarray, lse: np.ndarray, *, absolute: float = 2e-3, lse_absolute: float = 2e-4
):
    """Holds a result to the criterion of ``tests.cases`` (scale 1 / sqrt(head_dim))."""
    mask, dtype = visible(case), jnp.dtype(case.dtype)
    exact, exact_lse = definition(arrays, mask, np.dtype(np.float32))
    rounded, rounded_lse = definition(arrays, mask, dtype)
    rounded = rounded.astype(dtype).astype(np.float32)
    assert_close("out", out.astype(np.float32), exact, rounded, absolute=absolute, case=case.name)
    assert_close("lse", lse, exact_lse, rounded_lse, absolute=lse_absolute, case=case.name)


def ramped(arrays: dict, growth: float) -> dict:
    """The same operands with scores that grow from the last key block to the first: every block moves the maximum."""
    key = np.asarray(arrays["key"], np.float32)
    ramp = 1 + growth * np.arange(key.shape[1], 0, -1)[None, :, None, None] / 128
    return {**arrays, "key": jnp.asarray(key * ramp, arrays["key"].dtype)}
