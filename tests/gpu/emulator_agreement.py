"""The same kernels and inputs on the GPU at hand and in the emulator: how many result bits agree.

``python -m tests.gpu.emulator_agreement --folder ARTEFACTS [--save DIR]``. The artefacts come from
``python -m jax_fa4 compile``; nothing is compiled here. With ``--save``, operands and results are kept as .npz files.
Exits with an error where fewer than 97 % of the outputs are bitwise equal, where an output differs by more than one
unit in the last place of its row's largest magnitude, or an LSE by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from jax_fa4.kernels.plans import forward_plan
from jax_fa4.kernels.store import ArtefactStore
from tests.emulator.attention import ForwardCase, Result, run_forward
from tests.emulator.launch import Options
from tests.gpu.plan_executor import PlanExecutor

CASES = [
    ForwardCase(300, 320, 64, heads=2, kv_heads=2),
    ForwardCase(300, 320, 64, heads=2, kv_heads=2, mask="causal"),
    ForwardCase(256, 256, 128, heads=2, kv_heads=2),
    ForwardCase(200, 333, 128, heads=2, kv_heads=2, mask="causal", query_offset=133, ramp=0.01),
    ForwardCase(200, 300, 128, mask="window", left=60, right=20, dtype="float16"),
    ForwardCase(150, 200, 256, mask="causal"),
    ForwardCase(150, 200, 256),
]
LEAST_EQUAL = 0.97
LSE_TOLERANCE = 1e-5
MANTISSA = {"bfloat16": 8, "float16": 11}  # bits, the hidden one included


def to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


def on_gpu(case: ForwardCase, kernel, operands) -> Result:
    plan = forward_plan(kernel, case.problem, sm_count=case.multiprocessors)
    arrays = [to_torch(x) for x in operands]
    shape = (case.batch, case.seqlen_q, case.heads, case.head_dim_v or case.head_dim)
    out = torch.zeros(shape, dtype=arrays[0].dtype, device="cuda")
    lse = torch.zeros((case.batch, case.heads, case.seqlen_q), device="cuda")
    PlanExecutor().prepare(plan, [kernel.cubin], (*arrays, out, lse))(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return Result(to_numpy(out), to_numpy(lse))


def compare(case: ForwardCase, gpu: Result, emulated: Result) -> tuple[float, float, float]:
    """(share of equal outputs, largest difference in units of the row's last place, largest LSE difference)."""
    equal = np.mean(gpu.out.view(np.uint16) == emulated.out.view(np.uint16))
    a, b = gpu.out.astype(np.float64), emulated.out.astype(np.float64)
    largest = np.maximum(np.abs(a).max(-1, keepdims=True), 1e-30)
    unit = 2.0 ** (np.floor(np.log2(largest)) + 1 - MANTISSA[case.dtype])
    finite = np.isfinite(gpu.lse)
    if not (finite == np.isfinite(emulated.lse)).all():
        return float(equal), float((np.abs(a - b) / unit).max()), np.inf
    lse = np.abs(gpu.lse[finite] - emulated.lse[finite]).max(initial=0)
    return float(equal), float((np.abs(a - b) / unit).max()), float(lse)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="artefacts")
    parser.add_argument("--save", type=Path, help="keep operands and results here")
    arguments = parser.parse_args()
    store = ArtefactStore(folder=arguments.folder, compile_missing=False)
    bad = 0
    for number, case in enumerate(CASES):
        kernel, operands = store.load(case.spec), case.operands(number)
        gpu = on_gpu(case, kernel, operands)
        emulated = run_forward(case, operands, Options(detect_races=False), kernel=kernel)
        equal, units, lse = compare(case, gpu, emulated)
        fine = equal >= LEAST_EQUAL and units <= 1 and lse <= LSE_TOLERANCE
        bad += not fine
        print(
            f"{case.name}: {equal:.4%} equal, {units:.2f} units, LSE {lse:.2e}{'' if fine else '  FAILED'}", flush=True
        )
        if arguments.save:
            arguments.save.mkdir(parents=True, exist_ok=True)
            q, k, v = (x.view(np.uint16) for x in operands)
            np.savez_compressed(
                arguments.save / f"case{number}.npz", q=q, k=k, v=v, lse_gpu=gpu.lse, lse_emulated=emulated.lse,
                out_gpu=gpu.out.view(np.uint16), out_emulated=emulated.out.view(np.uint16),
            )  # fmt: skip
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
