"""The same kernels and inputs on the GPU at hand and in the emulator: how many result bits agree.

``python -m tests.gpu.emulator_agreement --folder ARTEFACTS [--save DIR]``. The artefacts come from
``python -m tests.emulator.prepare --out ARTEFACTS`` (a machine with the DSL); nothing is compiled here. The emulator
runs in one process per CPU core while the GPU works. With ``--save``, operands and results are kept as .npz files.
``--emulator-only`` needs no GPU and compares the emulator with float64 instead.

Exits with an error where fewer than 97 % of the outputs are bitwise equal, where an output differs by more than one
unit in the last place of its row's largest magnitude, or an LSE by more than 1e-5, and where a case could not run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jax_fa4.kernels.artefact import Artefact
from jax_fa4.kernels.plans import forward_plan
from jax_fa4.kernels.store import ArtefactStore
from tests.emulator.attention import ForwardCase, Result, assert_right, run_forward
from tests.emulator.cases import SM90_CASES
from tests.emulator.launch import Options

CASES = [
    *SM90_CASES,
    ForwardCase(300, 320, 64, heads=2, kv_heads=2),
    ForwardCase(300, 320, 64, heads=2, kv_heads=2, mask="causal", dtype="float16"),
    ForwardCase(256, 256, 128, heads=2, kv_heads=2),
    ForwardCase(200, 333, 128, heads=2, kv_heads=2, mask="causal", query_offset=133, ramp=0.01),
    ForwardCase(200, 300, 128, mask="window", left=60, right=20, dtype="float16"),
    ForwardCase(150, 1000, 256, heads=2),
    ForwardCase(260, 2000, 128, heads=2),
]
LEAST_EQUAL = 0.97
LSE_TOLERANCE = 1e-5
MANTISSA = {"bfloat16": 8, "float16": 11}  # bits, the hidden one included


class Agreement(NamedTuple):
    """``equal``: share of bitwise equal outputs; ``units``: largest difference in units in the last place of the
    row's largest magnitude; ``lse``: largest absolute difference."""

    equal: float
    units: float
    lse: float

    @property
    def fine(self) -> bool:
        return self.equal >= LEAST_EQUAL and self.units <= 1 and self.lse <= LSE_TOLERANCE


def load(case: ForwardCase, folder: Path) -> Artefact:
    return ArtefactStore(folder=folder, compile_missing=False).load(case.spec)


def emulate(number: int, folder: Path) -> tuple[Result, float]:
    """Runs a case in the emulator and checks it against float64; also the seconds that it took."""
    case, start = CASES[number], time.process_time()
    operands = case.operands(number)
    result = run_forward(case, operands, Options(detect_races=False, chip_products=True), kernel=load(case, folder))
    assert_right(case, operands, result)
    return Result(result.out, result.lse), time.process_time() - start


def on_gpu(number: int, folder: Path) -> Result:
    import torch

    from tests.gpu.plan_executor import PlanExecutor

    case = CASES[number]
    kernel, inputs = load(case, folder), list(case.operands(number))
    plan = forward_plan(kernel, case.problem, sm_count=case.multiprocessors)
    if case.lengths is not None:
        inputs.append(np.array([(*entry, 0) for entry in case.lengths], np.int32))
    dtype = inputs[0].dtype
    out = np.full((case.batch, case.seqlen_q, case.heads, case.head_dim_v or case.head_dim), np.nan, dtype)
    lse = np.full((case.batch, case.heads, case.seqlen_q), np.nan, np.float32)
    # Bytes in, bytes out: torch has no part in the types.
    buffers = [torch.from_numpy(x.reshape(-1).view(np.uint8)).cuda() for x in (*inputs, out, lse)]
    PlanExecutor().prepare(plan, [kernel.cubin], buffers)(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    got = [buffer.cpu().numpy() for buffer in buffers[-2:]]
    return Result(got[0].view(dtype).reshape(out.shape), got[1].view(np.float32).reshape(lse.shape))


def compare(case: ForwardCase, gpu: Result, emulated: Result) -> Agreement:
    equal = np.mean(gpu.out.view(np.uint16) == emulated.out.view(np.uint16))
    a, b = gpu.out.astype(np.float64), emulated.out.astype(np.float64)
    largest = np.maximum(np.abs(a).max(-1, keepdims=True), 1e-30)
    unit = 2.0 ** (np.floor(np.log2(largest)) + 1 - MANTISSA[case.dtype])
    units = float((np.abs(a - b) / unit).max())
    finite = np.isfinite(gpu.lse)
    if np.isnan(gpu.lse).any() or not (finite == np.isfinite(emulated.lse)).all():
        return Agreement(float(equal), units, np.inf)
    return Agreement(float(equal), units, float(np.abs(gpu.lse[finite] - emulated.lse[finite]).max(initial=0)))


def save(folder: Path, number: int, gpu: Result, emulated: Result) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    q, k, v = (x.view(np.uint16) for x in CASES[number].operands(number))
    np.savez_compressed(
        folder / f"case{number}.npz", q=q, k=k, v=v, lse_gpu=gpu.lse, lse_emulated=emulated.lse,
        out_gpu=gpu.out.view(np.uint16), out_emulated=emulated.out.view(np.uint16),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="artefacts")
    parser.add_argument("--save", type=Path, help="keep operands and results here")
    parser.add_argument("--emulator-only", action="store_true", help="no GPU: compare the emulator with float64 only")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of the emulator")
    arguments = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # of the workers: one core each
    start, bad, agreements, on_device = time.monotonic(), 0, [], {}
    print(f"{len(CASES)} cases, ml_dtypes {ml_dtypes.__version__}, numpy {np.__version__}", flush=True)
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        # The longest first, so that no process is left alone with one at the end.
        order = sorted(range(len(CASES)), key=lambda n: -CASES[n].seqlen_q * CASES[n].seqlen_k * CASES[n].heads)
        jobs = {pool.submit(emulate, number, arguments.folder): number for number in order}
        if not arguments.emulator_only:
            for number, case in enumerate(CASES):
                try:
                    on_device[number] = on_gpu(number, arguments.folder)
                except Exception as error:  # a missing kernel or a driver error: the other cases still tell something
                    print(f"{case.name}: on the GPU: {type(error).__name__}: {error}  FAILED", flush=True)
            print(f"[{time.monotonic() - start:.1f} s] the GPU has run {len(on_device)} cases", flush=True)
        for job in as_completed(jobs):
            number = jobs[job]
            name = CASES[number].name
            try:
                emulated, seconds = job.result()
            except Exception as error:
                bad += 1
                print(f"{name}: in the emulator: {type(error).__name__}: {error}  FAILED", flush=True)
                continue
            if arguments.emulator_only:
                print(f"{name}: right, {seconds:.2f} s", flush=True)
                continue
            if number not in on_device:
                bad += 1
                continue
            if arguments.save:
                save(arguments.save, number, on_device[number], emulated)
            found = compare(CASES[number], on_device[number], emulated)
            agreements.append(found)
            bad += not found.fine
            text = f"{found.equal:.4%} equal, {found.units:.2f} units, LSE {found.lse:.2e}"
            print(f"{name}: {text}{'' if found.fine else '  FAILED'}", flush=True)
    if agreements:
        worst = Agreement(
            min(a.equal for a in agreements), max(a.units for a in agreements), max(a.lse for a in agreements)
        )
        print(f"worst: {worst.equal:.4%} equal, {worst.units:.2f} units, LSE {worst.lse:.2e}")
    print(f"{len(CASES) - bad} of {len(CASES)} cases fine, {time.monotonic() - start:.1f} s", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
