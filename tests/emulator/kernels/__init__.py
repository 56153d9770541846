"""Small CuTe-DSL kernels written to exercise the emulator; compiled when the tests run."""
