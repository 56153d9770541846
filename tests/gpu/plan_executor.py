"""Runs LaunchPlans on a GPU through cuda-bindings: what the C++ handler does, without JAX.

For kernel development and for cross-checks of the handler; buffers are any objects with a CUDA ``data_ptr()`` (torch).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver

from jax_fa4.ffi.plan import Fill, Kernel, LaunchPlan, Scalars, Tensor, TensorMap

_DATA_TYPES = {
    "bfloat16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    "float16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    "float32": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    "int32": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_INT32,
}
_MAP_BYTES, _MAP_ALIGN = 128, 64


def check(result: tuple) -> Any:
    """Value of a driver call, or RuntimeError with the driver's name of the error."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {driver.cuGetErrorName(status)[1]}")
    return values[0] if len(values) == 1 else values


class PlanExecutor:
    """Loads cubins once and launches plans on a stream."""

    def __init__(self) -> None:
        self._kernels: dict[str, Any] = {}

    def kernel(self, cubin: bytes, entry: str, sha256: str, shared_bytes: int) -> Any:
        """Function handle of a cubin's entry, allowed ``shared_bytes`` of dynamic shared memory."""
        if sha256 not in self._kernels:
            library = check(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
            function = check(driver.cuKernelGetFunction(check(driver.cuLibraryGetKernel(library, entry.encode()))))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
            self._kernels[sha256] = function
        return self._kernels[sha256]

    def prepare(self, plan: LaunchPlan, cubins: Sequence[bytes], buffers: Sequence[Any]) -> Callable[[int], None]:
        """A function of a stream handle that runs the plan on these buffers."""
        steps = [
            self._prepare_fill(step, buffers)
            if isinstance(step, Fill)
            else self._prepare_kernel(step, plan, cubins, buffers)
            for step in plan.steps
        ]

        def run(stream: int) -> None:
            for step in steps:
                step(stream)

        return run

    def _prepare_fill(self, step: Fill, buffers: Sequence[Any]) -> Callable[[int], None]:
        address = buffers[step.buffer].data_ptr() + step.offset
        return lambda stream: check(driver.cuMemsetD32Async(address, step.pattern, step.size // 4, stream))

    def _prepare_kernel(
        self, step: Kernel, plan: LaunchPlan, cubins: Sequence[bytes], buffers: Sequence[Any]
    ) -> Callable[[int], None]:
        reference = plan.artefacts[step.artefact]
        function = self.kernel(cubins[step.artefact], reference.entry, reference.sha256, step.shared_bytes)
        storage = [_parameter_storage(parameter, buffers) for parameter in step.parameters]
        pointers = (ctypes.c_void_p * len(storage))(*[address for _, address in storage])

        def launch(stream: int) -> None:
            del storage[len(pointers) :]  # keeps the parameters' memory alive with this closure
            check(
                driver.cuLaunchKernel(
                    function, *step.grid, *step.block, step.shared_bytes, stream, ctypes.addressof(pointers), 0
                )
            )

        return launch


def _parameter_storage(parameter: Any, buffers: Sequence[Any]) -> tuple[Any, int]:
    """Memory that holds a parameter's bytes, and the bytes' address."""
    if isinstance(parameter, TensorMap):
        data = encode_tensor_map(parameter, buffers[parameter.buffer].data_ptr())
    elif isinstance(parameter, Tensor):
        letter = "i" if parameter.int_bits == 32 else "q"
        address = buffers[parameter.buffer].data_ptr() + parameter.offset
        data = struct.pack(f"<Q{len(parameter.ints)}{letter}", address, *parameter.ints)
    elif isinstance(parameter, Scalars):
        data = struct.pack("<" + parameter.format, *parameter.values)
    else:
        raise TypeError(f"{type(parameter).__name__} is no kernel parameter")
    memory = ctypes.create_string_buffer(len(data) + _MAP_ALIGN)
    address = -(-ctypes.addressof(memory) // _MAP_ALIGN) * _MAP_ALIGN
    ctypes.memmove(address, data, len(data))
    return memory, address


def encode_tensor_map(parameter: TensorMap, base: int) -> bytes:
    """The 128 bytes of a ``CUtensorMap``."""
    rank = len(parameter.dims)
    tensor_map = check(
        driver.cuTensorMapEncodeTiled(
            _DATA_TYPES[parameter.dtype],
            rank,
            base + parameter.offset,
            [driver.cuuint64_t(value) for value in parameter.dims],
            [driver.cuuint64_t(value) for value in parameter.strides],
            [driver.cuuint32_t(value) for value in parameter.box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(parameter.swizzle),
            driver.CUtensorMapL2promotion(parameter.l2_promotion),
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(tensor_map.getPtr(), _MAP_BYTES)
