"""(DSL) Single instructions that the DSL has no side-effect-free wrapper for."""

from __future__ import annotations

from cutlass import BFloat16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def _pure(result_type, operands, text, constraints, loc, ip):
    """Inline assembly that the compiler may move, merge and drop like any arithmetic."""
    return llvm.inline_asm(
        result_type, operands, text, constraints, has_side_effects=False, is_align_stack=False, loc=loc, ip=ip
    )


@dsl_user_op
def exp2(x: Float32, *, loc=None, ip=None) -> Float32:
    """2**x to about 2 ulp; -inf gives 0."""
    return Float32(
        _pure(Float32.mlir_type, [Float32(x).ir_value(loc=loc, ip=ip)], "ex2.approx.ftz.f32 $0, $1;", "=f,f", loc, ip)
    )


@dsl_user_op
def log2(x: Float32, *, loc=None, ip=None) -> Float32:
    """log2(x); 0 gives -inf."""
    return Float32(
        _pure(Float32.mlir_type, [Float32(x).ir_value(loc=loc, ip=ip)], "lg2.approx.ftz.f32 $0, $1;", "=f,f", loc, ip)
    )


@dsl_user_op
def reciprocal(x: Float32, *, loc=None, ip=None) -> Float32:
    """1/x to about 1 ulp."""
    return Float32(
        _pure(Float32.mlir_type, [Float32(x).ir_value(loc=loc, ip=ip)], "rcp.approx.ftz.f32 $0, $1;", "=f,f", loc, ip)
    )


@dsl_user_op
def pack_pair(low: Float32, high: Float32, dtype, *, loc=None, ip=None) -> Int32:
    """Two float32 values rounded to ``dtype`` (bfloat16 or float16) in one 32-bit register, ``low`` in bits 0-15."""
    suffix = "bf16x2" if dtype is BFloat16 else "f16x2"
    operands = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Int32(_pure(Int32.mlir_type, operands, f"cvt.rn.{suffix}.f32 $0, $1, $2;", "=r,f,f", loc, ip))
