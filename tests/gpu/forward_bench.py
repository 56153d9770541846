"""Forward kernels on the GPU at hand without JAX: correctness against float32 and speed next to torch's cuDNN.

``python -m tests.gpu.forward_bench check|bench --folder ARTEFACTS [...]``. The artefacts come from
``python -m jax_fa4 compile``; nothing is compiled here.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import torch

from jax_fa4.ffi.call import arch_of
from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.plans import forward_plan
from jax_fa4.kernels.problem import UNBOUNDED, ForwardProblem
from tests.gpu.plan_executor import PlanExecutor

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
EXECUTOR = PlanExecutor()


class Call:
    """One attention call: operands, poisoned results, prepared launch."""

    def __init__(self, artefact: Artefact, problem: ForwardProblem, operands, batch_info=None, sm_count: int = 132):
        dtype = TORCH[problem.dtype]
        p = problem
        self.artefact, self.problem, self.operands, self.batch_info = artefact, problem, operands, batch_info
        self.out = torch.full((p.batch, p.seqlen_q, p.heads, p.head_dim_v), math.nan, dtype=dtype, device="cuda")
        self.lse = torch.full((p.batch, p.heads, p.seqlen_q), math.nan, device="cuda")
        plan = forward_plan(artefact, problem, sm_count=sm_count)
        extra = () if batch_info is None else (batch_info,)
        self.run = EXECUTOR.prepare(plan, [artefact.cubin], (*operands, *extra, self.out, self.lse))

    def __call__(self) -> None:
        self.run(torch.cuda.current_stream().cuda_stream)


def make_operands(problem: ForwardProblem, seed: int, kind: str = "normal") -> tuple:
    generator = torch.Generator("cuda").manual_seed(seed)
    p, dtype = problem, TORCH[problem.dtype]
    shapes = (
        (p.batch, p.seqlen_q, p.heads, p.head_dim),
        (p.batch, p.seqlen_k, p.kv_heads, p.head_dim),
        (p.batch, p.seqlen_k, p.kv_heads, p.head_dim_v),
    )
    query, key, value = (torch.randn(s, generator=generator, device="cuda") for s in shapes)
    if kind == "ramp":
        # Scores grow towards the first keys, which are visited last: the maximum moves in every block.
        query[..., 0] = 4 * math.sqrt(p.head_dim)
        key[..., 0] = torch.linspace(30, 0, p.seqlen_k, device="cuda")[None, :, None] if p.seqlen_k else key[..., 0]
    elif kind == "large":
        query, key = query * 8, key * 8
    return query.to(dtype), key.to(dtype), value.to(dtype)


def reference(problem: ForwardProblem, mask: str, operands, batch_info, precision) -> tuple:
    """(out, lse) in ``precision``, which also rounds the scores and probabilities (a low-precision yardstick)."""
    p = problem
    query, key, value = (x.to(precision) for x in operands)
    key, value = (x.repeat_interleave(p.group, dim=2) for x in (key, value))
    scores = torch.einsum("btnh,bsnh->bnts", query, key).float() * p.scale
    row = torch.arange(p.seqlen_q, device="cuda")[None, :, None]
    column = torch.arange(p.seqlen_k, device="cuda")[None, None, :]
    q_len = torch.tensor([[p.seqlen_q]], device="cuda") if batch_info is None else batch_info[:, :1]
    kv_len = torch.tensor([[p.seqlen_k]], device="cuda") if batch_info is None else batch_info[:, 1:2]
    offset = torch.tensor([[p.query_offset]], device="cuda") if batch_info is None else batch_info[:, 2:3]
    visible = (column < kv_len[..., None]) & (row < q_len[..., None])
    position = row + offset[..., None]
    if mask == "causal":
        visible = visible & (column <= position)
    elif mask == "window":
        visible = visible & (column <= position + p.right) & (column >= position - p.left)
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    lse = torch.logsumexp(scores, dim=-1) if p.seqlen_k else torch.full_like(scores.sum(-1), -math.inf)
    weights = torch.exp(scores - torch.where(lse.isinf(), torch.zeros_like(lse), lse)[..., None])
    out = torch.einsum("bnts,bsnh->btnh", weights.to(precision), value)
    return out.float(), lse


def compare(call: Call, mask: str) -> tuple[bool, str]:
    """Criterion: error at most twice that of the 16-bit reference, plus a little."""
    call()
    torch.cuda.synchronize()
    args = (call.problem, mask, call.operands, call.batch_info)
    out, lse = reference(*args, torch.float32)
    low, _ = reference(*args, TORCH[call.problem.dtype])
    got = call.out.float()
    finite = lse.isfinite()
    error = (got - out).abs().max().item() if out.numel() else 0.0
    bound = 2 * (low - out).abs().max().item() + 1e-4 if out.numel() else 0.0
    lse_error = (call.lse - lse)[finite].abs().max().item() if finite.any() else 0.0
    lse_bound = 1e-3 + 2e-5 * (lse[finite].abs().max().item() if finite.any() else 0.0)
    empty = bool((call.lse[~finite] == -math.inf).all()) and not bool(got.isnan().any() or call.lse.isnan().any())
    good = error <= bound and lse_error <= lse_bound and empty
    return good, f"out {error:.2e} (bound {bound:.2e}) lse {lse_error:.1e} rows-without-keys {'ok' if empty else 'BAD'}"


def load_all(folder: Path) -> list[Artefact]:
    """The folder's artefacts, forward and backward, for the GPU at hand."""
    arch = arch_of(".".join(map(str, torch.cuda.get_device_capability())))
    return [a for a in map(Artefact.read, sorted(folder.glob("*.fa4.zip"))) if a.spec.arch == arch]


SHAPES = [
    (1, 1),
    (3, 3),
    (64, 1),
    (239, 1),
    (113, 203),
    (108, 256),
    (640, 128),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
]


def check(artefacts: list[Artefact], count: int, seed: int) -> int:
    """``count`` random cases over the artefacts; returns how many failed."""
    rng = random.Random(seed)
    artefacts = rng.sample(artefacts, len(artefacts))
    failures = 0
    for index in range(count):
        artefact = artefacts[index % len(artefacts)]
        spec = artefact.spec
        low = {64: 8, 96: 72, 128: 104, 192: 136, 256: 200}
        dims = [d if rng.random() < 0.6 else rng.randrange(low[d], d + 1, 8) for d in (spec.head_dim, spec.head_dim_v)]
        seqlen_q, seqlen_k = SHAPES[(index + index // len(artefacts)) % len(SHAPES)]
        kv_heads, group = rng.choice([(1, 1), (3, 1), (2, 4), (1, 6), (1, 8)])
        offset = 0 if spec.varlen else rng.choice([0, 0, seqlen_k - seqlen_q, 5, -7])
        bounds = {}
        if spec.mask == "window":
            bounds = {"left": rng.choice([0, 5, 100, UNBOUNDED]), "right": rng.choice([0, 7, 200, UNBOUNDED])}
        problem = ForwardProblem(
            rng.choice([1, 2, 3]),
            seqlen_q,
            seqlen_k,
            kv_heads * group,
            kv_heads,
            *dims,
            spec.dtype,
            rng.choice([dims[0] ** -0.5, 0.1]),
            offset,
            **bounds,
        )
        batch_info = None
        if spec.varlen:
            rows = [
                [
                    rng.choice([seqlen_q, rng.randint(0, seqlen_q)]),
                    rng.choice([seqlen_k, rng.randint(0, seqlen_k)]),
                    rng.choice([0, 3, -4]),
                    0,
                ]
                for _ in range(problem.batch)
            ]
            batch_info = torch.tensor(rows, dtype=torch.int32, device="cuda")
        kind = rng.choice(["normal", "normal", "ramp", "large"])
        call = Call(
            artefact, problem, make_operands(problem, seed + index, kind), batch_info, sm_count=rng.choice([132, 7])
        )
        good, text = compare(call, spec.mask)
        failures += not good
        if not good or index < 3:
            print("ok  " if good else "FAIL", spec.name, problem, kind, text, flush=True)
    print(f"check: {count - failures} of {count} cases hold (seed {seed})", flush=True)
    return failures


def milliseconds(runs: list, rounds: int = 5, target: float = 12.0) -> list[float]:
    """Milliseconds per launch of each run: medians over rounds that take turns, so that clocks drift for all alike."""
    times: list[list[float]] = [[] for _ in runs]
    repeats = []
    for run in runs:
        run()
        repeats.append(max(3, int(target / max(_timed(run, 3), 1e-3))))
    for _ in range(rounds):
        for index, run in enumerate(runs):
            times[index].append(_timed(run, repeats[index]))
    return [sorted(each)[rounds // 2] for each in times]


def _timed(run, repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def cudnn_call(operands, causal: bool):
    """cuDNN through torch on the same operands."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key, value = (x.transpose(1, 2) for x in operands)
    grouped = query.shape[1] != key.shape[1]

    def run() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)

    return run


def bench(
    artefacts: list[Artefact], cells: list[tuple[int, int]], sm_counts: list[int], heads_fixed: int, group: int
) -> None:
    """TFLOP/s on (batch, seqlen) cells next to cuDNN through torch in the same rounds.

    ``heads_fixed`` query heads, 0 for 2048 / head_dim; ``group`` of them to a key/value head.
    """
    groups: dict[tuple, list[Artefact]] = {}
    for artefact in artefacts:
        spec = artefact.spec
        groups.setdefault((spec.head_dim, spec.head_dim_v, spec.mask, spec.dtype), []).append(artefact)
    for (head_dim, head_dim_v, mask, dtype), variants in groups.items():
        for batch, seqlen in cells:
            heads = heads_fixed or 2048 // head_dim
            problem = ForwardProblem(
                batch, seqlen, seqlen, heads, heads // group, head_dim, head_dim_v, dtype, head_dim**-0.5
            )
            operands = make_operands(problem, 0)
            causal = mask == "causal"
            flop = 2 * batch * heads * seqlen**2 * (head_dim + head_dim_v) * (0.5 if causal else 1)
            names, runs = ["cudnn"], [cudnn_call(operands, causal)]
            for artefact in variants:
                for sm_count in sm_counts:
                    names.append(f"{artefact.spec.tile.name}{'' if sm_count < 1000 else '/grid'}")
                    runs.append(Call(artefact, problem, operands, sm_count=sm_count))
            speeds = [flop / time * 1e-9 for time in milliseconds(runs)]
            best = max(speeds[1:])
            texts = [f"{name} {speed:.0f}" for name, speed in zip(names, speeds, strict=True)]
            print(
                f"d{head_dim}x{head_dim_v} {mask} {batch}x{seqlen}: {best / speeds[0]:.2f}  " + "  ".join(texts),
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "bench"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--match", default="")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cells", default="32x512,8x2048,2x8192,1x16384")
    parser.add_argument("--sm-counts", default="132")
    parser.add_argument("--heads", type=int, default=0)
    parser.add_argument("--group", type=int, default=1)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    artefacts = [a for a in load_all(arguments.folder) if a.spec.kind == "forward" and arguments.match in a.spec.name]
    if arguments.what == "check":
        raise SystemExit(1 if check(artefacts, arguments.count, arguments.seed) else 0)
    cells = [tuple(map(int, cell.split("x"))) for cell in arguments.cells.split(",")]
    sm_counts = [int(count) for count in arguments.sm_counts.split(",")]
    bench(artefacts, cells, sm_counts, arguments.heads, arguments.group)


if __name__ == "__main__":
    main()
