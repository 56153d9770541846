"""Runs the package's attention kernels in the emulator on NumPy arrays, with the float64 result beside them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.plans import forward_plan
from jax_fa4.kernels.problem import UNBOUNDED, ForwardProblem
from jax_fa4.kernels.spec import KernelSpec, Tile
from tests.compiled import own_store

from .launch import Options, Report, executor

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@functools.cache
def artefact(spec: KernelSpec) -> Artefact:
    return own_store().load(spec)


@dataclass(frozen=True)
class ForwardCase:
    """One forward call: query (batch, seqlen_q, heads, head_dim), key and value (batch, seqlen_k, kv_heads, ...).

    ``lengths``: per batch entry (q_len, kv_len, query_offset), which makes the call varlen. ``left``/``right`` count
    with mask "window". ``ramp`` makes the scores of later keys larger (of earlier ones if it is negative), so that
    running maxima keep moving.
    """

    seqlen_q: int
    seqlen_k: int
    head_dim: int = 64
    head_dim_v: int | None = None
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    mask: str = "none"
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    query_offset: int = 0
    lengths: tuple[tuple[int, int, int], ...] | None = None
    pack_gqa: bool = False
    dtype: str = "bfloat16"
    arch: str = "sm_90a"
    ramp: float = 0.0
    multiprocessors: int | None = None
    tile: tuple[int, int] | None = None  # rows, keys: in place of the table's

    @property
    def name(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(type(self), k, None)]
        return ",".join(changed).replace(" ", "")

    @property
    def spec(self) -> KernelSpec:
        return KernelSpec.create(
            arch=self.arch, kind="forward", dtype=self.dtype, head_dim=self.head_dim,
            head_dim_v=self.head_dim_v or self.head_dim, mask=self.mask, varlen=self.lengths is not None,
            pack_gqa=self.pack_gqa, tile=self.tile and Tile(*self.tile),
        )  # fmt: skip

    @property
    def problem(self) -> ForwardProblem:
        return ForwardProblem(
            batch=self.batch, seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k, heads=self.heads, kv_heads=self.kv_heads,
            head_dim=self.head_dim, head_dim_v=self.head_dim_v or self.head_dim, dtype=self.dtype,
            scale=self.head_dim**-0.5, query_offset=0 if self.lengths else self.query_offset, left=self.left,
            right=self.right,
        )  # fmt: skip

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        dtype = DTYPES[self.dtype]
        q = random.standard_normal((self.batch, self.seqlen_q, self.heads, self.head_dim))
        k = random.standard_normal((self.batch, self.seqlen_k, self.kv_heads, self.head_dim))
        steps = np.arange(self.seqlen_k) if self.ramp >= 0 else np.arange(self.seqlen_k)[::-1]
        k *= (1 + abs(self.ramp) * steps)[None, :, None, None]
        v = random.standard_normal((self.batch, self.seqlen_k, self.kv_heads, self.head_dim_v or self.head_dim))
        return q.astype(dtype), k.astype(dtype), v.astype(dtype)

    def visible(self) -> np.ndarray:
        """Boolean (batch, 1, seqlen_q, seqlen_k)."""
        i, j = np.arange(self.seqlen_q)[:, None], np.arange(self.seqlen_k)[None, :]
        masks = []
        for b in range(self.batch):
            rows, keys, offset = self.lengths[b] if self.lengths else (self.seqlen_q, self.seqlen_k, self.query_offset)
            mask = (i < rows) & (j < keys)
            if self.mask == "causal":
                mask &= j <= i + offset
            elif self.mask == "window":
                mask &= (j <= i + offset + self.right) & (j >= i + offset - self.left)
            masks.append(mask)
        return np.stack(masks)[:, None]

    def expected(self, operands) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) in float64 from the definition."""
        q, k, v = (x.astype(np.float64) for x in operands)
        group = self.heads // self.kv_heads
        k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
        scores = np.einsum("btnh,bsnh->bnts", q, k) * self.head_dim**-0.5
        scores = np.where(self.visible(), scores, -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        shift = np.where(np.isinf(top), 0, top)
        p = np.exp(scores - shift)
        total = p.sum(-1, keepdims=True)
        out = np.einsum("bnts,bsnh->btnh", p / np.where(total > 0, total, 1), v)
        with np.errstate(divide="ignore"):
            return out, (shift + np.log(total))[..., 0]


@dataclass
class Result:
    """out in the operands' dtype, lse float32, one report per kernel."""

    out: np.ndarray
    lse: np.ndarray
    reports: list[Report] = field(default_factory=list)


def run_forward(
    case: ForwardCase, operands, options: Options, ptx: str | None = None, kernel: Artefact | None = None
) -> Result:
    """Runs a forward in the emulator. ``ptx`` replaces the artefact's text (for mutants of it); ``kernel`` is the
    artefact, by default the one that the tests compile."""
    kernel = kernel or artefact(case.spec)
    plan = forward_plan(kernel, case.problem, sm_count=case.multiprocessors)
    out = np.full((*operands[0].shape[:3], operands[2].shape[3]), np.nan, operands[0].dtype)
    lse = np.full((case.batch, case.heads, case.seqlen_q), np.nan, np.float32)
    inputs = list(operands)
    if case.lengths is not None:
        inputs.append(np.array([(*entry, 0) for entry in case.lengths], np.int32))
    texts = {kernel.sha256: kernel.ptx if ptx is None else ptx}
    reports = executor(plan, texts, [*inputs, out, lse], operands=len(inputs), options=options)
    return Result(out, lse, reports)


def low_precision(case: ForwardCase, operands) -> np.ndarray:
    """The result with probabilities and output rounded to the operands' type: what rounding alone may do."""
    q, k, v = (x.astype(np.float64) for x in operands)
    group = case.heads // case.kv_heads
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = np.where(case.visible(), np.einsum("btnh,bsnh->bnts", q, k) * case.head_dim**-0.5, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    rounded = p.astype(DTYPES[case.dtype]).astype(np.float64)
    out = np.einsum("bnts,bsnh->btnh", rounded / np.where(total > 0, total, 1), v)
    return out.astype(DTYPES[case.dtype]).astype(np.float64)


def assert_right(case: ForwardCase, operands, result: Result) -> None:
    """The tests' criterion: twice the error that rounding alone makes, plus a small absolute term."""
    out, lse = case.expected(operands)
    allowed = 2 * np.abs(low_precision(case, operands) - out).max(initial=0) + 1e-5
    got = result.out.astype(np.float64)
    assert np.isfinite(got).all(), f"{case.name}: not finite"
    error = np.abs(got - out).max(initial=0)
    assert error <= allowed, f"{case.name}: error {error:.3e}, allowed {allowed:.3e}"
    empty = np.isinf(lse)
    assert (result.lse[empty] == -np.inf).all(), f"{case.name}: LSE of empty rows"
    error = np.abs(result.lse[~empty] - lse[~empty]).max(initial=0)
    assert error <= 2e-5 * max(1.0, np.abs(lse[~empty]).max(initial=0)), f"{case.name}: LSE error {error:.3e}"
