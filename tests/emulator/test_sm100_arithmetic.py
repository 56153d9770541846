"""Packed and three-input float arithmetic of sm_100 from PTX text, against correctly rounded results (rounding.py)."""

import struct

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.launch import Options, run_foreign
from tests.emulator.memory import GlobalMemory
from tests.emulator.sm100 import rounding

LANES = 32
HEADER = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 in)
{
 .reg .pred %p<4>; .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .f32 %f<40>;
 ld.param.u64 %rd0, [out]; ld.param.u64 %rd1, [in];
 mov.u32 %r0, %tid.x;
 mul.wide.u32 %rd2, %r0, 24;
 add.s64 %rd1, %rd1, %rd2;
 mul.wide.u32 %rd2, %r0, 8;
 add.s64 %rd0, %rd0, %rd2;
 ld.global.f32 %f0, [%rd1]; ld.global.f32 %f1, [%rd1+4]; ld.global.f32 %f2, [%rd1+8];
 ld.global.f32 %f3, [%rd1+12]; ld.global.f32 %f4, [%rd1+16]; ld.global.f32 %f5, [%rd1+20];
"""


def run(body: str, operands: np.ndarray) -> np.ndarray:
    """``operands``: (32, 6) float32 in %f0..%f5; returns the two output words of each lane, (32, 2) uint32."""
    out = np.zeros((LANES, 2), np.uint32)
    memory = GlobalMemory()
    operands = np.ascontiguousarray(operands, np.float32)
    bases = [
        memory.add("out", out.reshape(-1).view(np.uint8)).base,
        memory.add("in", operands.reshape(-1).view(np.uint8)).base,
    ]
    parameters = [struct.pack("<Q", base) for base in bases]
    one = (1, 1, 1)
    run_foreign(HEADER + body + " ret;\n}\n", "k", one, (LANES, 1, 1), one, 0, parameters, memory, Options())
    return out


def samples(seed: int) -> np.ndarray:
    """Values of many magnitudes with infinities, NaN, zeros of both signs and subnormals in some lanes."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((LANES, 6)) * 2.0 ** rng.integers(-12, 12, (LANES, 6))).astype(np.float32)
    values[0] = [np.inf, 1, -np.inf, 2, 0.5, -1]
    values[1] = [np.nan, 1, 2, 3, 4, 5]
    values[2] = [0.0, -0.0, -0.0, 0.0, 0.0, -0.0]
    values[3] = [2.0**-130, -(2.0**-140), 1, 2.0**-126, 2.0**-127, -(2.0**-126)]
    values[4] = [1.5, -1.5, 1.5, 1, 1, -1.5]
    return values


def pairs(values: np.ndarray) -> list[np.ndarray]:
    """The three packed operands as (32, 2) arrays."""
    return [values[:, 0:2], values[:, 2:4], values[:, 4:6]]


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bit patterns; any NaN equals any NaN."""
    got, want = got.view(np.float32), np.asarray(want, np.float32)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(np.where(nan, 0, got.view(np.uint32)), np.where(nan, 0, want.view(np.uint32)))


PACKED = """
 mov.b64 %rd3, {%f0, %f1}; mov.b64 %rd4, {%f2, %f3}; mov.b64 %rd5, {%f4, %f5};
"""


@pytest.mark.parametrize("mode", rounding.MODES)
@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("name", ["add", "mul", "fma", "sub"])
def test_packed(name, mode, ftz):
    values = samples(1)
    a, b, c = pairs(values)
    flags = f".{mode}{'.ftz' if ftz else ''}.f32x2"
    operands = {"fma": "%rd3, %rd4, %rd5"}.get(name, "%rd3, %rd4")
    out = run(PACKED + f" {name}{flags} %rd6, {operands}; st.global.b64 [%rd0], %rd6;", values)
    want = {
        "add": lambda: rounding.add(a, b, mode, ftz),
        "sub": lambda: rounding.add(a, -b, mode, ftz),
        "mul": lambda: rounding.multiply(a, b, mode, ftz),
        "fma": lambda: rounding.fma(a, b, c, mode, ftz),
    }[name]()
    assert_same(out, want)


def test_packed_with_uniform_operands():
    """The same scale in all lanes and both halves, as softmax uses it."""
    values = samples(2)
    body = " mov.b32 %f9, 0f40490FDB; mov.b64 %rd4, {%f9, %f9};" + PACKED.replace("mov.b64 %rd4, {%f2, %f3};", "")
    out = run(body + " fma.rn.f32x2 %rd6, %rd3, %rd4, %rd5; st.global.b64 [%rd0], %rd6;", values)
    scale = np.uint32(0x40490FDB).view(np.float32)
    assert_same(out, rounding.fma(values[:, 0:2], scale, values[:, 4:6]))


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_extrema(name, nan, count):
    values = samples(3)
    operands = [values[:, i] for i in range(count)]
    registers = ", ".join(f"%f{i}" for i in range(count))
    out = run(f" {name}{'.NaN' if nan else ''}.f32 %f9, {registers}; st.global.f32 [%rd0], %f9;", values)
    assert_same(out[:, 0].copy(), rounding.extremum(operands, name == "max", nan))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_packed_exponential(kind):
    rng = np.random.default_rng(4)
    values = rng.uniform(-20, 8, (LANES, 6)).astype(np.float32)
    ftz = ".ftz" if kind == "bf16" else ""
    body = (
        f" cvt.rn.{kind}x2.f32 %r1, %f1, %f0; ex2.approx{ftz}.{kind}x2 %r2, %r1; st.global.v2.b32 [%rd0], {{%r1, %r2}};"
    )
    out = run(body, values)
    number = ml_dtypes.bfloat16 if kind == "bf16" else np.float16
    packed = values[:, 0:2].astype(number).view(np.uint32)[:, 0]
    np.testing.assert_array_equal(out[:, 0], packed)
    np.testing.assert_array_equal(out[:, 1], rounding.exp2_packed(packed, kind))


@pytest.mark.parametrize("name,function", [("max", np.fmax), ("min", np.fmin)])
def test_warp_reduction(name, function):
    values = samples(5)
    out = run(f" redux.sync.{name}.f32 %f9, %f0, -1; st.global.f32 [%rd0], %f9;", values)
    want = function.reduce(values[:, 0])
    assert_same(out[:, 0].copy(), np.full(LANES, want))


def test_absolute_reduction_with_nan():
    values = samples(5)
    out = run(" redux.sync.max.abs.NaN.f32 %f9, %f0, -1; st.global.f32 [%rd0], %f9;", values)
    assert np.isnan(out[:, 0].copy().view(np.float32)).all()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
def test_mixed_precision(name, kind):
    """16-bit operands with a float32 one: the last operand and the result are float32, rounded once."""
    values = samples(6)
    narrow = values[:, 0:2].astype(ml_dtypes.bfloat16 if kind == "bf16" else np.float16).astype(np.float32)
    convert = f" .reg .b16 %h<2>; cvt.rn.{kind}.f32 %h0, %f0; cvt.rn.{kind}.f32 %h1, %f1;"
    operands = "%h0, %h1, %f2" if name == "fma" else "%h0, %f2"
    out = run(f"{convert} {name}.rn.f32.{kind} %f9, {operands}; st.global.f32 [%rd0], %f9;", values)
    a, b, c = narrow[:, 0], narrow[:, 1], values[:, 2]
    want = {"add": lambda: rounding.add(a, c), "sub": lambda: rounding.add(a, -c), "fma": lambda: rounding.fma(a, b, c)}
    assert_same(out[:, 0].copy(), want[name]())
