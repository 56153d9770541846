"""Launch plans from artefacts and problems: the one door between attention calls and kernels. Pure Python."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import ModuleType

from jax_fa4.ffi.plan import ArtefactRef, Fill, Kernel, LaunchPlan, Parameter, Scalars, Tensor, TensorMap
from jax_fa4.kernels.artefact import Artefact, ArtefactError
from jax_fa4.kernels.problem import ForwardProblem
from jax_fa4.kernels.select import backward_on_pairs
from jax_fa4.kernels.sm90.backward import plan as sm90_backward
from jax_fa4.kernels.sm90.backward_split import plan as sm90_backward_split
from jax_fa4.kernels.sm90.forward import plan as sm90_forward
from jax_fa4.kernels.sm100.backward import plan as sm100_backward
from jax_fa4.kernels.sm100.backward_split import plan as sm100_backward_split
from jax_fa4.kernels.sm100.forward import plan as sm100_forward
from jax_fa4.kernels.spec import (
    COUNTS_TURNS,
    KernelSpec,
    UnsupportedSpecError,
    padded_head_dims,
    sm100_pair_backward_tile,
    splits_backward,
)

DEFAULT_SM_COUNT = {"sm_90a": 132, "sm_100f": 148}
"""Multiprocessors assumed where the device is not known (H100 and H200 SXM; B200); any value gives right results."""

MINUS_INFINITY_BITS = 0xFF800000

UNORDERED_BACKWARD = ("sm_100f",)
"""Architectures with kernels of their own for calls that allow any order of additions. On Hopper they would double a
release's artefacts for the few percent that early versions gained (docs/measurements)."""

_BACKWARD_PLANS = {"sm_90a": (sm90_backward, sm90_backward_split), "sm_100f": (sm100_backward, sm100_backward_split)}
"""Plan modules of each architecture: the one kernel's, the split one's."""
_FORWARD_KERNELS = {"sm_90a": sm90_forward.forward_kernel, "sm_100f": sm100_forward.forward_kernel}


def forward_plan(artefact: Artefact, problem: ForwardProblem, *, sm_count: int | None = None) -> LaunchPlan:
    """Plan that computes out and lse; buffers as :meth:`ForwardProblem.buffers` numbers them.

    Raises ValueError where the artefact's spec does not serve the problem.
    """
    spec = artefact.spec
    builder = _FORWARD_KERNELS.get(spec.arch)
    if builder is None or spec.kind != "forward":
        raise UnsupportedSpecError(f"{spec.name}: no forward launch plan for {spec.arch}")
    padded = padded_head_dims(problem.head_dim, problem.head_dim_v)
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


def backward_specs(
    arch: str,
    problem: ForwardProblem,
    *,
    mask: str = "none",
    varlen: bool = False,
    deterministic: bool = True,
    pairs: bool | None = None,
) -> tuple[KernelSpec, ...]:
    """Specs of the kernels of one backward call, in the order in which :func:`backward_plan` takes their artefacts.

    ``deterministic=False`` allows kernels that add in any order (:data:`UNORDERED_BACKWARD`). ``pairs``: whether the
    main kernel runs on pairs of CTAs; None leaves that to :func:`jax_fa4.kernels.select.backward_on_pairs`. Raises
    :class:`UnsupportedSpecError` where the architecture has no such backward for the problem.
    """
    if pairs is None:
        pairs = backward_on_pairs(problem, arch)
    return _backward_specs(arch, problem, mask, varlen, deterministic or arch not in UNORDERED_BACKWARD, pairs)


def _backward_specs(
    arch: str, problem: ForwardProblem, mask: str, varlen: bool, deterministic: bool, pairs: bool
) -> tuple[KernelSpec, ...]:
    """As :func:`backward_specs`; ``pairs``: with the main kernel on pairs of CTAs."""
    if arch not in _BACKWARD_PLANS:
        raise UnsupportedSpecError(f"arch is {arch!r}; backward kernels exist for {', '.join(_BACKWARD_PLANS)}")
    padded = padded_head_dims(problem.head_dim, problem.head_dim_v)
    split = splits_backward(*padded) and not pairs
    tiles = {}
    if pairs:
        main = sm100_pair_backward_tile(*padded)
        if arch != "sm_100f" or main is None:
            raise UnsupportedSpecError(f"no backward on pairs of CTAs for {arch} and padded head dims {padded}")
        tiles = {"backward_main": main, "backward_preprocess": COUNTS_TURNS}
    return tuple(
        KernelSpec.create(
            arch=arch,
            kind=kind,
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            mask=mask,
            varlen=varlen,
            deterministic=deterministic,
            tile=tiles.get(kind),
        )
        for kind in _BACKWARD_PLANS[arch][split].kinds(problem)
    )


def _backward_module(specs: Sequence[KernelSpec]) -> ModuleType:
    return _BACKWARD_PLANS[specs[0].arch][all(spec.kind != "backward_main" for spec in specs)]


def backward_scratch(specs: Sequence[KernelSpec], problem: ForwardProblem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Scratch results of a backward call, after dquery, dkey, dvalue: name to (shape, dtype), in order.

    XLA owns them; their contents before and after the call are of no interest.
    """
    return _backward_module(specs).scratch_shapes(specs, problem)


def backward_plan(artefacts: Sequence[Artefact], problem: ForwardProblem) -> LaunchPlan:
    """Plan that computes dquery, dkey and dvalue from artefacts of :func:`backward_specs`.

    Operands: query, key, value, out, lse, dout, dlse (float32 like lse) and, for ``varlen``, batch_info. Results:
    dquery, dkey, dvalue, then those of :func:`backward_scratch`. Raises ValueError where the artefacts do not serve
    the problem.
    """
    specs = tuple(artefact.spec for artefact in artefacts)
    main = specs[-1]
    wanted = _backward_specs(
        main.arch,
        problem,
        mask=next((spec.mask for spec in specs if spec.mask != "none"), "none"),
        varlen=any(spec.varlen for spec in specs),
        deterministic=main.deterministic,
        pairs=any(spec.tile.option("ctas", 1) == 2 for spec in specs),
    )
    if [spec.with_tile(want.tile) for spec, want in zip(specs, wanted, strict=True)] != list(wanted):
        raise ValueError(
            f"kernels {', '.join(spec.name for spec in specs)} do not serve {problem.dtype} with head_dim "
            f"{problem.head_dim} and head_dim_v {problem.head_dim_v}"
        )
    steps = _backward_module(specs).backward_steps(specs, problem)
    kernels = [step for step in steps if isinstance(step, Kernel)]
    for kernel in kernels:
        check_parameters(kernel, artefacts[kernel.artefact])
    refs = tuple(ArtefactRef(artefact.sha256, artefact.entry) for artefact in artefacts) if kernels else ()
    return LaunchPlan(steps=steps, artefacts=refs)


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
