"""How the tensor core of the GPU at hand adds: single ``wgmma`` instructions on chosen operands, and which rule fits.

``python -m tests.gpu.tensor_core_probe [--save FILE.npz]``, on a Hopper GPU. Prints answers to direct questions (bits
kept, truncation, grouping along k), then the rules of tests/emulator/accumulation.py that reproduce random products
best, and how far the approximate functions (ex2, lg2, rcp, ...) are from correct rounding. The kernels are PTX text,
so that the emulator runs them too: ``--emulator`` asks it instead of a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.emulator.accumulation import CANDIDATES, Rule, accumulate

ROWS, COLUMNS, DEPTH, THREADS = 64, 8, 16, 128  # of one wgmma.m64n8k16 and its warpgroup
TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
Launcher = Callable[[str, str, int, list[np.ndarray]], None]
"""(PTX, entry, blocks, arrays): runs a kernel whose parameters are pointers to the arrays, in place."""

FUNCTIONS = {
    "ex2": ("ex2.approx.ftz.f32", np.exp2, (-30.0, 1.0)),
    "lg2": ("lg2.approx.f32", np.log2, (1e-3, 1e3)),
    "rcp": ("rcp.approx.ftz.f32", np.reciprocal, (1e-3, 1e3)),
    "rsqrt": ("rsqrt.approx.ftz.f32", lambda x: 1 / np.sqrt(x), (1e-3, 1e3)),
    "tanh": ("tanh.approx.f32", np.tanh, (-4.0, 4.0)),
}
"""name -> (instruction, float64 function, range of arguments)."""


def product_ptx(dtype: str, from_registers: bool, steps: int) -> str:
    """PTX of ``probe(a, b, c, d)``: d = c + sum over steps of a b^T, one wgmma.m64n8k16 a step, all in one group.

    Per block a is (steps, 64, 16), b (steps, 8, 16) of ``dtype`` ("bf16" or "f16"), c and d (64, 8) float32. Operands
    in shared memory are K-major without swizzle: core matrices of 8 rows x 16 bytes, those of a row group adjacent.
    """
    lines = [
        ".version 8.0", ".target sm_90a", ".address_size 64",
        ".visible .entry probe(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) {",
        f".shared .align 128 .b8 tile_a[{2048 * steps}];", f".shared .align 128 .b8 tile_b[{256 * steps}];",
        ".reg .pred %p; .reg .f32 %f<4>; .reg .b64 %rd<16>;",
        f".reg .b32 %t, %block, %lane, %warp, %row, %x, %y, %place, %w<{4 * steps}>, %q<4>;",
        "mov.u32 %t, %tid.x; mov.u32 %block, %ctaid.x;",
        "ld.param.u64 %rd0, [a]; ld.param.u64 %rd1, [b]; ld.param.u64 %rd2, [c]; ld.param.u64 %rd3, [d];",
        f"mul.wide.u32 %rd4, %block, {2048 * steps}; add.u64 %rd0, %rd0, %rd4;",
        f"mul.wide.u32 %rd4, %block, {256 * steps}; add.u64 %rd1, %rd1, %rd4;",
        "mul.wide.u32 %rd4, %block, 2048; add.u64 %rd2, %rd2, %rd4; add.u64 %rd3, %rd3, %rd4;",
        # This thread's 16-byte chunk: row t / 2, half t % 2 of a tile in global memory.
        "mul.wide.u32 %rd4, %t, 16; add.u64 %rd5, %rd0, %rd4; add.u64 %rd6, %rd1, %rd4;",
        "and.b32 %x, %t, 1; shl.b32 %x, %x, 7; shr.u32 %row, %t, 1; and.b32 %y, %row, 7; shl.b32 %y, %y, 4;",
        "add.u32 %place, %x, %y; shr.u32 %y, %row, 3; shl.b32 %y, %y, 8; add.u32 %place, %place, %y;",
        "mov.u32 %x, tile_a; add.u32 %x, %x, %place; mov.u32 %y, tile_b; add.u32 %y, %y, %place;",
    ]  # fmt: skip
    for step in range(steps):
        lines += [
            f"ld.global.v4.b32 {{%q0, %q1, %q2, %q3}}, [%rd5+{2048 * step}];",
            f"st.shared.v4.b32 [%x+{2048 * step}], {{%q0, %q1, %q2, %q3}};",
        ]
    lines.append("setp.ge.u32 %p, %t, 16; @%p bra LOADED;")
    for step in range(steps):
        lines += [
            f"ld.global.v4.b32 {{%q0, %q1, %q2, %q3}}, [%rd6+{256 * step}];",
            f"st.shared.v4.b32 [%y+{256 * step}], {{%q0, %q1, %q2, %q3}};",
        ]
    lines += [
        "LOADED:", "fence.proxy.async.shared::cta;", "bar.sync 0;",
        # Fragments: rows 16 warp + lane / 4 (and 8 more), columns 2 (lane % 4) (and 8 more).
        "and.b32 %lane, %t, 31; shr.u32 %warp, %t, 5; shl.b32 %row, %warp, 4; shr.u32 %x, %lane, 2;",
        "add.u32 %row, %row, %x; and.b32 %y, %lane, 3; shl.b32 %place, %row, 5; shl.b32 %x, %y, 2;",
        "add.u32 %place, %place, %x; cvt.u64.u32 %rd4, %place; add.u64 %rd5, %rd0, %rd4;",
        "shl.b32 %place, %row, 5; shl.b32 %x, %y, 3; add.u32 %place, %place, %x; cvt.u64.u32 %rd4, %place;",
        "add.u64 %rd2, %rd2, %rd4; add.u64 %rd3, %rd3, %rd4;",
        "ld.global.v2.f32 {%f0, %f1}, [%rd2]; ld.global.v2.f32 {%f2, %f3}, [%rd2+256];",
    ]  # fmt: skip
    for step in range(steps):
        for register, offset in enumerate((0, 256, 16, 272)):
            lines.append(f"ld.global.b32 %w{4 * step + register}, [%rd5+{2048 * step + offset}];")
    for name, register in (("tile_a", "%rd8"), ("tile_b", "%rd9")):
        lines += [
            f"mov.u32 %x, {name}; shr.u32 %x, %x, 4; cvt.u64.u32 {register}, %x;",
            f"or.b64 {register}, {register}, {16 << 32 | 8 << 16};",  # 128 bytes along k, 256 along rows
        ]
    lines += ["setp.eq.u32 %p, 0, 0;", "wgmma.fence.sync.aligned;"]
    opcode = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.{dtype}.{dtype}"
    for step in range(steps):
        if from_registers:
            a, transposes = "{" + ", ".join(f"%w{4 * step + i}" for i in range(4)) + "}", "0"
        else:
            lines.append(f"add.u64 %rd10, %rd8, {128 * step};")
            a, transposes = "%rd10", "0, 0"
        lines.append(f"add.u64 %rd11, %rd9, {16 * step};")
        lines.append(f"{opcode} {{%f0, %f1, %f2, %f3}}, {a}, %rd11, %p, 1, 1, {transposes};")
    lines += [
        "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;",
        "st.global.v2.f32 [%rd3], {%f0, %f1}; st.global.v2.f32 [%rd3+256], {%f2, %f3};", "ret; }",
    ]  # fmt: skip
    return "\n".join(lines)


def function_ptx(instruction: str) -> str:
    """PTX of ``probe(x, y)``: y = instruction(x), one float32 a thread."""
    return f"""
.version 8.0
.target sm_90a
.address_size 64
.visible .entry probe(.param .u64 x, .param .u64 y) {{
.reg .b32 %t, %block; .reg .f32 %f<2>; .reg .b64 %rd<4>;
mov.u32 %t, %tid.x; mov.u32 %block, %ctaid.x; mad.lo.u32 %t, %block, {THREADS}, %t; mul.wide.u32 %rd2, %t, 4;
ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [y]; add.u64 %rd0, %rd0, %rd2; add.u64 %rd1, %rd1, %rd2;
ld.global.f32 %f0, [%rd0]; {instruction} %f1, %f0; st.global.f32 [%rd1], %f1;
ret; }}
"""


@cache
def _function(ptx: str, entry: str):
    from cuda.bindings import driver

    from tests.gpu.plan_executor import check

    library = check(driver.cuLibraryLoadData(ptx.encode() + b"\0", [], [], 0, [], [], 0))
    return check(driver.cuKernelGetFunction(check(driver.cuLibraryGetKernel(library, entry.encode()))))


def on_gpu(ptx: str, entry: str, blocks: int, arrays: list[np.ndarray]) -> None:
    import torch
    from cuda.bindings import driver

    from tests.gpu.plan_executor import check

    buffers = [torch.from_numpy(x.reshape(-1).view(np.uint8)).cuda() for x in arrays]
    values = [ctypes.c_uint64(buffer.data_ptr()) for buffer in buffers]
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    stream = torch.cuda.current_stream().cuda_stream
    check(driver.cuLaunchKernel(_function(ptx, entry), blocks, 1, 1, THREADS, 1, 1, 0, stream,
                                ctypes.addressof(pointers), 0))  # fmt: skip
    torch.cuda.synchronize()
    for array, buffer in zip(arrays, buffers, strict=True):
        array.reshape(-1).view(np.uint8)[:] = buffer.cpu().numpy()


def in_emulator(ptx: str, entry: str, blocks: int, arrays: list[np.ndarray], chip_products: bool = False) -> None:
    from tests.emulator.launch import Options, run_foreign
    from tests.emulator.memory import GlobalMemory

    memory = GlobalMemory()
    pointers = [memory.add(f"array {i}", x.reshape(-1).view(np.uint8)).base for i, x in enumerate(arrays)]
    parameters = [struct.pack("<Q", pointer) for pointer in pointers]
    run_foreign(ptx, entry, (blocks, 1, 1), (THREADS, 1, 1), (1, 1, 1), 0, parameters, memory,
                Options(chip_products=chip_products))  # fmt: skip


def multiply(launch: Launcher, dtype: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, registers: bool) -> np.ndarray:
    """c + a b^T by wgmma. a: (blocks, steps, 64, 16), b: (blocks, steps, 8, 16), float64 values of ``dtype``; c:
    (blocks, 64, 8) float32."""
    blocks, steps = a.shape[:2]
    arrays = [np.ascontiguousarray(x.astype(TYPES[dtype])) for x in (a, b)]
    d = np.full(c.shape, np.nan, np.float32)
    launch(product_ptx(dtype, registers, steps), "probe", blocks, [*arrays, np.ascontiguousarray(c), d])
    return d


def random_operands(kind: str, dtype: str, steps: int, blocks: int = 32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    a = random.standard_normal((blocks, steps, ROWS, DEPTH))
    b = random.standard_normal((blocks, steps, COLUMNS, DEPTH))
    c = random.standard_normal((blocks, ROWS, COLUMNS))
    if kind == "wide":
        a, b = (x * 2.0 ** random.integers(-5, 6, x.shape) for x in (a, b))
        c *= 2.0 ** random.integers(-12, 13, c.shape)
    elif kind == "cancelling":
        a[..., 1::2] = -a[..., ::2] * (1 + 2.0**-6 * random.integers(0, 2, a[..., ::2].shape))
        b[..., 1::2] = b[..., ::2]
    elif kind == "positive":
        a, b, c = np.abs(a), np.abs(b), np.abs(c)
    elif kind == "no accumulator":
        c[:] = 0
    a, b = (x.astype(TYPES[dtype]).astype(np.float64) for x in (a, b))
    return a, b, c.astype(np.float32)


KINDS = ("normal", "wide", "cancelling", "positive", "no accumulator")


class Questions:
    """Rows of addends, put to the tensor core with all of b equal to 1."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[int, float], float]] = []

    def ask(self, addends: dict[int, float], c: float = 0.0) -> int:
        """``addends``: products by position along k; ``c``: the accumulator. Returns the number of the answer."""
        self.rows.append((addends, c))
        return len(self.rows) - 1

    def answers(self, launch: Launcher, registers: bool) -> np.ndarray:
        blocks = -(-len(self.rows) // ROWS)
        a, c = np.zeros((blocks * ROWS, DEPTH)), np.zeros((blocks * ROWS, COLUMNS), np.float32)
        for row, (addends, start) in enumerate(self.rows):
            for k, value in addends.items():
                a[row, k] = value
            c[row] = start
        shape = (blocks, 1, ROWS, DEPTH)
        d = multiply(
            launch,
            "bf16",
            a.reshape(shape),
            np.ones((blocks, 1, COLUMNS, DEPTH)),
            c.reshape(blocks, ROWS, -1),
            registers,
        )
        return d.reshape(-1, COLUMNS)[: len(self.rows), 0]


def kept(values: np.ndarray, first: int) -> str:
    """Up to which exponent an addend next to 1 and -1 came through."""
    lost = np.flatnonzero(values == 0)
    return f"2^-{first + lost[0] - 1}" if len(lost) else f"2^-{first + len(values) - 1} at least"


def questions(launch: Launcher, registers: bool) -> None:
    asked, first, last = Questions(), 18, 45
    span = range(first, last)
    alone = [asked.ask({0: 1, 1: 2.0**-e, 2: -1}) for e in span]
    small_c = [asked.ask({0: 1, 2: -1}, 2.0**-e) for e in span]
    large_c = [asked.ask({0: -1, 1: 2.0**-e}, 1) for e in span]
    both = [asked.ask({0: 1, 1: 2.0**-e}, -1) for e in span]
    cut = {
        e: [asked.ask({0: 1, 1: sign * 1.75 * 2.0**-e, 2: -1}) for sign in (1, -1)]
        + [asked.ask({0: 1, 2: -1}, sign * 1.75 * 2.0**-e) for sign in (1, -1)]
        for e in range(22, 32)
    }
    finals = {
        text: asked.ask(*what)
        for text, what in {
            "1 + 2^-24": ({0: 1, 1: 2.0**-24}, 0),
            "1 + 2^-23 + 2^-24": ({0: 1, 1: 2.0**-23, 2: 2.0**-24}, 0),
            "1 + 2^-23 + 2^-24 + 2^-25": ({0: 1, 1: 2.0**-23, 2: 2.0**-24, 3: 2.0**-25}, 0),
            "-(1 + 2^-23 + 2^-24 + 2^-25)": ({0: -1, 1: -(2.0**-23), 2: -(2.0**-24), 3: -(2.0**-25)}, 0),
            "1 + 3 * 2^-24 of the accumulator 1": ({1: 1.5 * 2.0**-23}, 1),
            "1 + 2 * 2^-24 (two addends)": ({0: 1, 1: 2.0**-24, 2: 2.0**-24}, 0),
            "1 + 4 * 2^-25": ({0: 1} | {k: 2.0**-25 for k in range(1, 5)}, 0),
            "1 + 8 * 2^-26": ({0: 1} | {k: 2.0**-26 for k in range(1, 9)}, 0),
            "1.984375 + 1.984375 + 2^-23 (carry)": ({0: 1.984375, 1: 1.984375, 2: 2.0**-23}, 0),
            "14 * 1.984375 + 2^-21": ({k: 1.984375 for k in range(14)} | {14: 2.0**-21}, 0),
        }.items()
    }
    together = [
        [asked.ask({i: 1, i ^ 1: -1, j: 2.0**-60}) if j not in (i, i ^ 1) else None for j in range(DEPTH)]
        for i in range(DEPTH)
    ]
    got = asked.answers(launch, registers)
    print(f"a product kept next to 1 and -1: {kept(got[alone], first)}")
    print(f"the accumulator kept next to 1 and -1: {kept(got[small_c], first)}")
    print(f"a product kept next to an accumulator of 1 and a product of -1: {kept(got[large_c], first)}")
    print(f"a product kept next to an accumulator of -1 and a product of 1: {kept(got[both], first)}")
    print("1.75 * 2^-e beside 1 and -1, in units of 2^-e: product, -product, accumulator, -accumulator")
    for e, numbers in cut.items():
        print(f"  e={e}: " + "  ".join(f"{got[n] * 2.0**e:+.3f}" for n in numbers))
    print("sums:")
    for text, n in finals.items():
        print(f"  {text}: {float(got[n]).hex()}")
    print("2^-60 at j beside 1 at i and -1 at i^1: x where it is lost (i and j are added together)")
    for i, row in enumerate(together):
        print(f"  i={i:2d} " + "".join("." if n is None else "x" if got[n] == 0 else "o" for n in row))


def share(rule: Rule, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> float:
    """Share of the results d that the rule reproduces. Operands as :func:`multiply` takes them."""
    deep = [x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1) for x in (a, b)]
    return float(np.mean(accumulate(deep[0][:, :, None, :], deep[1][:, None, :, :], c, rule) == d))


def fit(launch: Launcher, saved: dict[str, np.ndarray], blocks: int) -> None:
    sets = {}
    for dtype in TYPES:
        for registers in (False, True):
            for kind in KINDS:
                for steps in (1, 4):
                    a, b, c = random_operands(kind, dtype, steps, blocks)
                    d = multiply(launch, dtype, a, b, c, registers)
                    name = f"{dtype} {'registers' if registers else 'shared'} {kind} x{steps}"
                    sets[name] = (a, b, c, d)
                    saved[name.replace(" ", "_") + "_d"] = d
    few = {name: tuple(x[:1] for x in data) for name, data in sets.items() if "shared" in name and "x1" in name}
    ranked = sorted(CANDIDATES, key=lambda rule: -np.mean([share(rule, *data) for data in few.values()]))
    print("rules that reproduce single instructions best:")
    for rule in ranked[:8]:
        print(f"  {np.mean([share(rule, *data) for data in few.values()]):.4%} {rule}")
    print(f"share of bits of the best on each set ({blocks * ROWS * COLUMNS} results), and of a sum rounded once:")
    for name, data in sets.items():
        a, b, c, d = data
        once = (np.einsum("bsmk,bsnk->bmn", a, b) + c).astype(np.float32)
        print(f"  {name}: {share(ranked[0], *data):.4%}, {np.mean(once == d):.4%}")


def functions(launch: Launcher, saved: dict[str, np.ndarray], blocks: int) -> None:
    print("approximate functions against float64, in units in the last place; share equal to the rounded value:")
    random = np.random.default_rng(6)
    for name, (instruction, exact, (low, high)) in FUNCTIONS.items():
        x = random.uniform(low, high, blocks * THREADS).astype(np.float32)
        y = np.zeros_like(x)
        launch(function_ptx(instruction), "probe", blocks, [x, y])
        wanted = exact(x.astype(np.float64))
        error = (y - wanted) / np.spacing(np.abs(wanted).astype(np.float32))
        equal = np.mean(y == wanted.astype(np.float32))
        print(f"  {name}: {error.min():+.2f} to {error.max():+.2f}, mean {error.mean():+.3f}, {equal:.2%} equal")
        saved[name + "_x"], saved[name + "_y"] = x, y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", type=Path, help="keep operands' results here (.npz)")
    parser.add_argument("--emulator", action="store_true", help="ask the emulator, not a GPU")
    arguments = parser.parse_args()
    launch, blocks = (in_emulator, 2) if arguments.emulator else (on_gpu, 32)
    saved: dict[str, np.ndarray] = {}
    for registers in (False, True):
        print(f"A from {'registers' if registers else 'shared memory'}:")
        questions(launch, registers)
    functions(launch, saved, 8 * blocks)
    fit(launch, saved, blocks)
    if arguments.save:
        arguments.save.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(arguments.save, **saved)


if __name__ == "__main__":
    main()
