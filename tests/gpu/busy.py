"""Other work for the GPU, on a CUDA stream of its own, while a test runs."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

BYTES = 64 << 20
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class _Driver:
    """The entry points of libcuda that are needed, each raising RuntimeError for a result other than 0."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str):
        function = getattr(self._library, name)

        def checked(*arguments: object) -> None:
            result = function(*arguments)
            if result:
                raise RuntimeError(f"{name}: CUDA error {result}")

        return checked


@contextlib.contextmanager
def busy_stream(device: int = 0) -> Iterator[list[int]]:
    """Fills and copies 64 MiB over and over on another stream of the process's primary context until left.

    Gives a list with one entry for each round done so far; leaving raises what went wrong in the thread.
    """
    rounds: list[int] = []
    errors: list[BaseException] = []
    started, stop = threading.Event(), threading.Event()

    def work() -> None:
        try:
            _work(device, rounds, started, stop)
        except BaseException as error:  # raised again by the thread that waits
            errors.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    started.wait()
    try:
        yield rounds
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


def _work(device: int, rounds: list[int], started: threading.Event, stop: threading.Event) -> None:
    cuda = _Driver()
    handle, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    source, target = ctypes.c_uint64(), ctypes.c_uint64()
    cuda.cuInit(0)
    cuda.cuDeviceGet(ctypes.byref(handle), device)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    cuda.cuCtxSetCurrent(context)
    cuda.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING)
    cuda.cuMemAlloc_v2(ctypes.byref(source), ctypes.c_size_t(BYTES))
    cuda.cuMemAlloc_v2(ctypes.byref(target), ctypes.c_size_t(BYTES))
    try:
        while not stop.is_set():
            for value in range(8):
                cuda.cuMemsetD32Async(source, ctypes.c_uint(value), ctypes.c_size_t(BYTES // 4), stream)
                cuda.cuMemcpyDtoDAsync_v2(target, source, ctypes.c_size_t(BYTES), stream)
            cuda.cuStreamSynchronize(stream)
            rounds.append(len(rounds))
            started.set()
    finally:
        cuda.cuMemFree_v2(source)
        cuda.cuMemFree_v2(target)
        cuda.cuStreamDestroy_v2(stream)
        cuda.cuDevicePrimaryCtxRelease_v2(handle)
