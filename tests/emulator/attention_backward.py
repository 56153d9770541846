"""Runs the package's backward kernels in the emulator, with float64 gradients beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jax_fa4.kernels.plans import backward_plan, backward_scratch, backward_specs
from jax_fa4.kernels.spec import KernelSpec

from .attention import DTYPES, ForwardCase, artefact
from .launch import Options, Report, executor


@dataclass(frozen=True)
class BackwardInputs:
    """Operands of one backward call: out and lse are the exact ones, rounded to what the forward returns."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray


@dataclass
class BackwardResult:
    """Gradients in the operands' dtype, one report per kernel."""

    gradients: tuple[np.ndarray, np.ndarray, np.ndarray]
    reports: list[Report]


def inputs(case: ForwardCase, seed: int = 0, with_dlse: bool = True) -> BackwardInputs:
    q, k, v = case.operands(seed)
    out, lse = case.expected((q, k, v))
    random = np.random.default_rng(seed + 1000)
    dout = random.standard_normal(out.shape).astype(q.dtype)
    dlse = random.standard_normal(lse.shape) if with_dlse else np.zeros(lse.shape)
    arrays = (q, k, v, out.astype(q.dtype), lse.astype(np.float32), dout, dlse.astype(np.float32))
    return BackwardInputs(*map(np.ascontiguousarray, arrays))


def specs_of(case: ForwardCase, pair: bool | None = None) -> tuple[KernelSpec, ...]:
    """Specs of the kernels of one backward; ``pair`` as :func:`run_backward` has it."""
    return backward_specs(case.arch, case.problem, mask=case.mask, varlen=case.lengths is not None, pairs=pair)


def run_backward(case: ForwardCase, given: BackwardInputs, options: Options, deterministic: bool = True,
                 texts: dict[str, str] | None = None, pair: bool | None = None) -> BackwardResult:  # fmt: skip
    """Runs the kernels of one backward. ``texts`` replaces PTX by kernel kind (for mutants). ``pair`` says whether the
    main kernel of sm_100f runs on pairs of CTAs, by default what calls get."""
    specs = specs_of(case, pair)
    if not deterministic:  # calls get the ordered kernels even so
        specs = tuple(replace(spec, deterministic=False) for spec in specs)
    artefacts = [artefact(spec) for spec in specs]
    plan = backward_plan(artefacts, case.problem)
    operands = [given.query, given.key, given.value, given.out, given.lse, given.dout, given.dlse]
    if case.lengths is not None:
        operands.append(np.array([(*entry, 0) for entry in case.lengths], np.int32))
    gradients = tuple(np.full(x.shape, np.nan, x.dtype) for x in operands[:3])
    scratch = []
    for shape, dtype in backward_scratch(specs, case.problem).values():
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)
        scratch.append(array)
    replaced = texts or {}
    ptx = [replaced.get(a.spec.kind, a.ptx) for a in artefacts]
    reports = executor(plan, ptx, [*operands, *gradients, *scratch], operands=len(operands), options=options)
    return BackwardResult(gradients, reports)  # type: ignore[arg-type]


def expected(case: ForwardCase, given: BackwardInputs, low_precision: bool = False) -> tuple[np.ndarray, ...]:
    """dq, dk, dv in float64; with ``low_precision`` P and dS are rounded to the operands' type, as any kernel must."""

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(DTYPES[case.dtype]).astype(np.float64) if low_precision else x

    q, k, v, dout = (x.astype(np.float64) for x in (given.query, given.key, given.value, given.dout))
    group = case.heads // case.kv_heads
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = case.head_dim**-0.5
    visible = case.visible()
    scores = np.where(visible, np.einsum("btnh,bsnh->bnts", q, k) * scale, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total > 0, total, 1)
    out = np.einsum("bnts,bsnh->btnh", p, v)
    if low_precision:
        out = given.out.astype(np.float64)
    delta = np.einsum("btnh,btnh->bnt", out, dout) - given.dlse.astype(np.float64)
    dp = np.einsum("btnh,bsnh->bnts", dout, v)
    ds = rounded(p * (dp - delta[..., None]))
    dq = rounded(np.einsum("bnts,bsnh->btnh", ds, k) * scale)
    dk = np.einsum("bnts,btnh->bsnh", ds, q) * scale
    dv = np.einsum("bnts,btnh->bsnh", rounded(p), dout)
    shape = (case.batch, case.seqlen_k, case.kv_heads, group)
    dk, dv = (x.reshape(*shape, x.shape[-1]).sum(3) for x in (dk, dv))
    return dq, rounded(dk), rounded(dv)


def assert_right(case: ForwardCase, given: BackwardInputs, result: BackwardResult) -> None:
    """Twice the error that rounding alone makes, plus a small absolute term, for each gradient."""
    wanted, rough = expected(case, given), expected(case, given, low_precision=True)
    for name, got, want, low in zip(("dquery", "dkey", "dvalue"), result.gradients, wanted, rough, strict=True):
        got = got.astype(np.float64)
        assert np.isfinite(got).all(), f"{case.name}: {name} is not finite"
        allowed = 2 * np.abs(low - want).max(initial=0) + 1e-4
        error = np.abs(got - want).max(initial=0)
        assert error <= allowed, f"{case.name}: {name} error {error:.3e}, allowed {allowed:.3e}"
