"""Launch plans from artefacts and problems: the one door between attention calls and kernels. Pure Python."""

from __future__ import annotations

import struct

from jax_fa4.ffi.plan import ArtefactRef, Fill, Kernel, LaunchPlan, Parameter, Scalars, Tensor, TensorMap
from jax_fa4.kernels.artefact import Artefact, ArtefactError
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.sm90.forward import plan as sm90_forward
from jax_fa4.kernels.sm100.forward import plan as sm100_forward
from jax_fa4.kernels.spec import UnsupportedSpecError, padded_head_dim

DEFAULT_SM_COUNT = {"sm_90a": 132, "sm_100f": 148}
"""Multiprocessors assumed where the device is not known (H100 and H200 SXM; B200); any value gives right results."""

MINUS_INFINITY_BITS = 0xFF800000

_FORWARD_KERNELS = {"sm_90a": sm90_forward.forward_kernel, "sm_100f": sm100_forward.forward_kernel}


def forward_plan(artefact: Artefact, problem: ForwardProblem, *, sm_count: int | None = None) -> LaunchPlan:
    """Plan that computes out and lse; buffers as :meth:`ForwardProblem.buffers` numbers them.

    Raises ValueError where the artefact's spec does not serve the problem.
    """
    spec = artefact.spec
    builder = _FORWARD_KERNELS.get(spec.arch)
    if builder is None or spec.kind != "forward":
        raise UnsupportedSpecError(f"{spec.name}: no forward launch plan for {spec.arch}")
    padded = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    if padded != (spec.head_dim, spec.head_dim_v) or problem.dtype != spec.dtype:
        raise ValueError(
            f"kernel {spec.name} does not serve {problem.dtype} with head_dim {problem.head_dim} and head_dim_v "
            f"{problem.head_dim_v}"
        )
    if problem.out_bytes == 0:
        return LaunchPlan(steps=(_clear_lse(problem, spec.varlen),) if problem.lse_bytes else ())
    if problem.seqlen_k == 0:
        buffers = problem.buffers(spec.varlen)
        return LaunchPlan(steps=(Fill(buffers.out, problem.out_bytes), _clear_lse(problem, spec.varlen)))
    kernel = builder(artefact, problem, sm_count or DEFAULT_SM_COUNT[spec.arch])
    check_parameters(kernel, artefact)
    return LaunchPlan(steps=(kernel,), artefacts=(ArtefactRef(artefact.sha256, artefact.entry),))


def check_parameters(kernel: Kernel, artefact: Artefact) -> None:
    """Raises :class:`ArtefactError` unless the launch fits the entry: block size, and each parameter's size."""
    if kernel.block != artefact.threads:
        raise ArtefactError(f"{artefact.spec.name}: plan has block {kernel.block}, kernel needs {artefact.threads}")
    planned = [parameter_bytes(parameter) for parameter in kernel.parameters]
    declared = [parameter.size for parameter in artefact.parameters]
    if planned != declared:
        raise ArtefactError(f"{artefact.spec.name}: plan has parameters of {planned} bytes, kernel needs {declared}")


def parameter_bytes(parameter: Parameter) -> int:
    """Bytes of one kernel parameter."""
    if isinstance(parameter, TensorMap):
        return 128
    if isinstance(parameter, Tensor):
        return 8 + len(parameter.ints) * parameter.int_bits // 8
    if isinstance(parameter, Scalars):
        return struct.calcsize("<" + parameter.format)
    raise TypeError(f"{type(parameter).__name__} is no kernel parameter")


def _clear_lse(problem: ForwardProblem, varlen: bool) -> Fill:
    return Fill(problem.buffers(varlen).lse, problem.lse_bytes, pattern=MINUS_INFINITY_BITS)
