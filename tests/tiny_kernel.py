"""A kernel that compiles in well under a second, for tests of the compiler's driver: scales a vector in place."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor


@cute.kernel
def scale_kernel(x: cute.Tensor, factor: Float32, size: Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * 128 + thread
    if index < size:
        x[index] = x[index] * factor


@cute.jit
def launch(x: cute.Tensor, factor: Float32, size: Int32):
    scale_kernel(x, factor, size).launch(grid=[4, 1, 1], block=[128, 1, 1])


def build(spec):
    return launch, (make_fake_compact_tensor(Float32, (cute.SymInt(),)), Float32(1), Int32(1))
