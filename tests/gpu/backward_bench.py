"""Backward kernels on the GPU at hand without JAX: correctness against float64, repeatability, speed.

``python -m tests.gpu.backward_bench check|repeat|bench --folder ARTEFACTS [...]``. The artefacts come from
``python -m jax_fa4 compile``; nothing is compiled here. A spec whose artefacts are not all in the folder is left out.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

import torch

from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.plans import backward_plan, backward_scratch, backward_specs
from jax_fa4.kernels.problem import UNBOUNDED, ForwardProblem
from jax_fa4.kernels.spec import KernelSpec, UnsupportedSpecError
from tests.gpu.forward_bench import EXECUTOR, SHAPES, TORCH, load_all, make_operands, milliseconds

DTYPES = {"float32": torch.float32, "int32": torch.int32}
MAIN_KINDS = ("backward_main", "backward_query")
"""Kinds of which each backward has exactly one: their specs name the mask and the flags of the whole call."""


class Call:
    """One backward: operands with the exact out and LSE (rounded), poisoned results and scratch, prepared launches."""

    def __init__(self, artefacts, spec: KernelSpec, problem: ForwardProblem, operands, batch_info=None, seed: int = 0):
        p, dtype = problem, TORCH[problem.dtype]
        generator = torch.Generator("cuda").manual_seed(seed + 1)
        self.spec, self.problem, self.operands, self.batch_info = spec, problem, operands, batch_info
        out, self.lse = attention(p, visible(p, spec.mask, batch_info), *(x.double() for x in operands))
        self.dout = torch.randn(out.shape, generator=generator, device="cuda").to(dtype)
        self.dlse = torch.randn(self.lse.shape, generator=generator, device="cuda")
        self.results = tuple(torch.empty_like(x) for x in operands)
        shapes = backward_scratch([a.spec for a in artefacts], p).values()
        self.scratch = [torch.empty(shape, dtype=DTYPES[name], device="cuda") for shape, name in shapes]
        extra = () if batch_info is None else (batch_info,)
        given = (*operands, out.to(dtype), self.lse.float(), self.dout, self.dlse, *extra)
        self.given = [x.contiguous() for x in given]
        plan = backward_plan(artefacts, p)
        buffers = (*self.given, *self.results, *self.scratch)
        self.run = EXECUTOR.prepare(plan, [artefact.cubin for artefact in artefacts], buffers)

    def poison(self) -> None:
        """NaN in every result and scratch buffer."""
        for result in self.results:
            result.fill_(math.nan)
        for buffer in self.scratch:
            buffer.view(torch.int32).fill_(0x7FC12345)

    def __call__(self) -> None:
        self.run(torch.cuda.current_stream().cuda_stream)


def visible(problem: ForwardProblem, mask: str, batch_info) -> torch.Tensor:
    """Boolean (batch, seqlen_q, seqlen_k)."""
    p = problem
    row = torch.arange(p.seqlen_q, device="cuda")[None, :, None]
    column = torch.arange(p.seqlen_k, device="cuda")[None, None, :]
    whole = torch.tensor([[p.seqlen_q, p.seqlen_k, p.query_offset, 0]] * p.batch, device="cuda")
    q_len, kv_len, offset = (whole if batch_info is None else batch_info)[:, :3].unbind(1)
    seen = (column < kv_len[:, None, None]) & (row < q_len[:, None, None])
    position = row + offset[:, None, None]
    if mask == "causal":
        seen = seen & (column <= position)
    elif mask == "window":
        seen = seen & (column <= position + p.right) & (column >= position - p.left)
    return seen


def attention(problem: ForwardProblem, seen, query, key, value) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64 from float64 operands; rows that see nothing have out 0 and LSE -inf."""
    key, value = (x.repeat_interleave(problem.group, dim=2) for x in (key, value))
    scores = torch.einsum("btnh,bsnh->bnts", query, key) * problem.scale
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1) if problem.seqlen_k else torch.full(scores.shape[:-1], -math.inf).to(scores)
    shift = torch.where(lse.isfinite(), lse, torch.zeros_like(lse))[..., None]
    return torch.einsum("bnts,bsnh->btnh", torch.exp(scores - shift), value), lse


def gradients(call: Call, rounded: bool) -> tuple[torch.Tensor, ...]:
    """dquery, dkey, dvalue in float64. With ``rounded``, O, P, dS and the results are rounded to the operands' type, as
    in any backward that keeps O as its residual: what rounding alone may do."""
    p, dtype = call.problem, TORCH[call.problem.dtype]

    def maybe(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).double() if rounded else x

    seen = visible(p, call.spec.mask, call.batch_info)
    query, key, value = (x.double() for x in call.operands)
    out, lse = attention(p, seen, query, key, value)
    dout = call.dout.double()
    key, value = (x.repeat_interleave(p.group, dim=2) for x in (key, value))
    scores = torch.einsum("btnh,bsnh->bnts", query, key) * p.scale
    shift = torch.where(lse.isfinite(), lse, torch.zeros_like(lse))[..., None]
    weights = torch.where(seen[:, None], torch.exp(scores - shift), torch.zeros_like(scores))
    delta = torch.einsum("btnh,btnh->bnt", maybe(out), dout) - call.dlse.double()
    dscores = maybe(weights * (torch.einsum("btnh,bsnh->bnts", dout, value) - delta[..., None]))
    dquery = torch.einsum("bnts,bsnh->btnh", dscores, key) * p.scale
    dkey = torch.einsum("bnts,btnh->bsnh", dscores, query) * p.scale
    dvalue = torch.einsum("bnts,btnh->bsnh", maybe(weights), dout)
    groups = (p.batch, p.seqlen_k, p.kv_heads, p.group)
    dkey, dvalue = dkey.reshape(*groups, p.head_dim).sum(3), dvalue.reshape(*groups, p.head_dim_v).sum(3)
    return maybe(dquery), maybe(dkey), maybe(dvalue)


def compare(call: Call) -> tuple[bool, str]:
    """Criterion: error at most twice what rounding alone makes, plus a little; exact zeros stay zeros."""
    call.poison()
    call()
    torch.cuda.synchronize()
    good, texts = True, []
    want, low = gradients(call, rounded=False), gradients(call, rounded=True)
    for name, got, exact, rough in zip(("dq", "dk", "dv"), call.results, want, low, strict=True):
        if not exact.numel():
            continue
        error = (got.double() - exact).abs().max().item()
        bound = 2 * (rough.double() - exact).abs().max().item() + 1e-4 * max(1.0, exact.abs().max().item())
        zeros = bool((got[exact == 0] == 0).all())
        good = good and error <= bound and zeros
        texts.append(f"{name} {error:.2e} (bound {bound:.2e}){'' if zeros else ' NOT ZERO'}")
    return good, ", ".join(texts)


def calls(folder: Path) -> list[tuple[KernelSpec, dict]]:
    """(spec that names mask and flags, artefacts by spec) of each backward in the folder."""
    artefacts = {artefact.spec: artefact for artefact in load_all(folder)}
    return [(spec, artefacts) for spec in artefacts if spec.kind in MAIN_KINDS]


def artefacts_for(spec: KernelSpec, known: dict, problem: ForwardProblem) -> list[Artefact] | None:
    flags = {"mask": spec.mask, "varlen": spec.varlen, "deterministic": spec.deterministic}
    try:
        specs = backward_specs(spec.arch, problem, **flags)
    except UnsupportedSpecError:
        return None
    return [known[s] for s in specs] if all(s in known for s in specs) else None


def check(folder: Path, count: int, seed: int) -> int:
    """``count`` random cases over the folder's kernels; returns how many failed."""
    rng, failures, done = random.Random(seed), 0, 0
    found = calls(folder)
    rng.shuffle(found)
    low = {64: 8, 96: 72, 128: 104, 192: 136, 256: 200}
    for index in range(count):
        spec, known = found[index % len(found)]
        dims = [d if rng.random() < 0.6 else rng.randrange(low[d], d + 1, 8) for d in (spec.head_dim, spec.head_dim_v)]
        seqlen_q, seqlen_k = [*SHAPES, (0, 5), (5, 0)][(index + index // len(found)) % (len(SHAPES) + 2)]
        kv_heads, group = rng.choice([(1, 1), (3, 1), (2, 4), (1, 6), (1, 16)])
        bounds = {}
        if spec.mask == "window":
            bounds = {"left": rng.choice([0, 5, 100, UNBOUNDED]), "right": rng.choice([0, 7, 200, UNBOUNDED])}
        offset = 0 if spec.varlen else rng.choice([0, 0, seqlen_k - seqlen_q, 5, -7])
        batch = rng.choice([1, 2, 3])
        scale = rng.choice([dims[0] ** -0.5, 0.1])
        problem = ForwardProblem(
            batch, seqlen_q, seqlen_k, kv_heads * group, kv_heads, *dims, spec.dtype, scale, offset, **bounds
        )
        batch_info = None
        if spec.varlen:
            rows = [
                [rng.randint(0, seqlen_q), rng.randint(0, seqlen_k), rng.choice([0, 3, -4]), 0] for _ in range(batch)
            ]
            batch_info = torch.tensor(rows, dtype=torch.int32, device="cuda")
        artefacts = artefacts_for(spec, known, problem)
        if artefacts is None:
            continue
        operands = make_operands(problem, seed + index, rng.choice(["normal", "normal", "large"]))
        good, text = compare(Call(artefacts, spec, problem, operands, batch_info, seed + index))
        failures, done = failures + (not good), done + 1
        if not good or index < 3:
            print("ok  " if good else "FAIL", spec.name, problem, text, flush=True)
    print(f"check: {done - failures} of {done} cases hold (seed {seed})", flush=True)
    return failures or not done


def repeat(folder: Path, runs: int) -> int:
    """Bitwise equality of ``runs`` runs with another stream busy, and of equal batch entries; returns failures."""
    other, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    failures = 0
    for spec, known in calls(folder):
        problem = ForwardProblem(8, 512, 512, 8, 2, spec.head_dim, spec.head_dim_v, spec.dtype, spec.head_dim**-0.5)
        artefacts = artefacts_for(spec, known, problem)
        if artefacts is None or spec.varlen or spec.mask == "window" or not spec.deterministic:
            continue
        call = Call(artefacts, spec, problem, make_operands(problem, 0))
        for buffer in call.given:
            buffer[7].copy_(buffer[0])
        different = torch.zeros((), device="cuda", dtype=torch.int64)
        first = None
        for run in range(runs):
            if run % 8 == 0:
                with torch.cuda.stream(other):
                    torch.mm(busy, busy)
            if run % 50 == 0:
                call.poison()
            call()
            first = first or [x.clone() for x in call.results]
            for got, want in zip(call.results, first, strict=True):
                different += (got.view(torch.int16) != want.view(torch.int16)).any()
        same = all(torch.equal(x[0], x[7]) for x in call.results)
        failures += bool(different) or not same
        print(
            f"{spec.name}: {int(different)} of {runs} runs differ, equal batch entries {'agree' if same else 'DIFFER'}"
        )
    return failures


def bench(folder: Path) -> int:
    """TFLOP/s at 16k tokens and heads x head_dim = 2048 for bfloat16 kernels without lengths."""
    for spec, known in calls(folder):
        if spec.dtype != "bfloat16" or spec.varlen or spec.mask == "window":
            continue
        for batch, seqlen in ((32, 512), (8, 2048), (2, 8192), (1, 16384)):
            heads, d = 2048 // spec.head_dim, spec.head_dim
            problem = ForwardProblem(batch, seqlen, seqlen, heads, heads, d, spec.head_dim_v, spec.dtype, d**-0.5)
            artefacts = artefacts_for(spec, known, problem)
            if artefacts is None:
                continue
            call = Speed(artefacts, problem)
            # Three products are head_dim wide, two head_dim_v: 2.5 times the forward's where they are equal.
            flop = 2 * batch * heads * seqlen**2 * (3 * d + 2 * spec.head_dim_v)
            flop *= 0.5 if spec.mask == "causal" else 1
            (time,) = milliseconds([call])
            print(f"{spec.name} {batch}x{seqlen}: {flop / time / 1e9:.1f} TFLOP/s", flush=True)
    return 0


class Speed:
    """A backward on random operands, without a reference."""

    def __init__(self, artefacts, problem: ForwardProblem) -> None:
        p, dtype = problem, TORCH[problem.dtype]
        operands = make_operands(p, 0)
        out = torch.randn(p.batch, p.seqlen_q, p.heads, p.head_dim_v, device="cuda").to(dtype)
        lse = torch.full((p.batch, p.heads, p.seqlen_q), math.log(p.seqlen_k) + 0.5, device="cuda")
        shapes = backward_scratch([a.spec for a in artefacts], p).values()
        scratch = [torch.empty(shape, dtype=DTYPES[name], device="cuda") for shape, name in shapes]
        results = [torch.empty_like(x) for x in operands]
        self.buffers = (*operands, out, lse, torch.randn_like(out), torch.zeros_like(lse), *results, *scratch)
        self.run = EXECUTOR.prepare(backward_plan(artefacts, p), [a.cubin for a in artefacts], self.buffers)

    def __call__(self) -> None:
        self.run(torch.cuda.current_stream().cuda_stream)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["check", "repeat", "bench"])
    parser.add_argument("--folder", type=Path, required=True, help="artefacts from `python -m jax_fa4 compile`")
    parser.add_argument("--count", type=int, default=400, help="cases of check")
    parser.add_argument("--runs", type=int, default=1000, help="runs of repeat")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "check":
        return int(check(arguments.folder, arguments.count, arguments.seed) > 0)
    if arguments.command == "repeat":
        return int(repeat(arguments.folder, arguments.runs) > 0)
    return bench(arguments.folder)


if __name__ == "__main__":
    sys.exit(main())
