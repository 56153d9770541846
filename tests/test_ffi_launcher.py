"""The native launcher against a recording driver: what it asks of the driver, in which order, and how it fails."""

import concurrent.futures
import hashlib
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_fa4.ffi import build, register
from jax_fa4.ffi.plan import ArtefactRef, Fill, Kernel, LaunchPlan, Scalars, Tensor, TensorMap
from jax_fa4.ffi.wire import encode

from .ffi_support import NATIVE_DIR, build_launcher_in_place, call, call_plan, needs_compiler, recording_driver

pytestmark = needs_compiler

CUBINS = {hashlib.sha256(data).hexdigest(): data for data in (b"\x7fELF\0one", b"\x7fELF\0two")}
FIRST, SECOND = CUBINS
ARTEFACTS = (ArtefactRef(FIRST, "forward_kernel"), ArtefactRef(SECOND, "combine_kernel"))
OPERANDS = (jnp.zeros((4, 8, 64), jnp.bfloat16), jnp.arange(8, dtype=jnp.int32))
RESULTS = (jax.ShapeDtypeStruct((4, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((16,), jnp.float32))
TENSOR_MAP = TensorMap(0, "bfloat16", (64, 8, 4), (128, 1024), (64, 8, 1), 3)
PARAMETERS = (TENSOR_MAP, Tensor(1, (7, -1), offset=4), Tensor(2, (2,), format="i"), Scalars("if", (5, 0.5)))
PARAMETER_SIZES = (128, 16, 16, 8)


def kernel(**changes):
    fields = dict(
        artefact=0, grid=(6, 2, 1), block=(384, 1, 1), cluster=(2, 1, 1), shared_bytes=200_000, parameters=PARAMETERS
    )
    return Kernel(**(fields | changes))


@pytest.fixture
def driver():
    stub = recording_driver()
    stub.install()
    stub.parameter_sizes(*PARAMETER_SIZES)
    yield stub
    stub.uninstall()


def run(*steps, artefacts=ARTEFACTS, operands=OPERANDS, results=RESULTS):
    return call_plan(operands, results, LaunchPlan(steps, artefacts), CUBINS)


def test_order_parameters_and_tensor_maps(driver):
    _, filled = run(Fill(3, 64, 0, 0x3F800000), kernel(), Fill(3, 16, 48), kernel(artefact=1, cluster=(1, 1, 1)))
    steps = driver.calls("cuMemsetD32Async", "cuTensorMapEncodeTiled", "cuLaunchKernelEx")
    assert [step["call"] for step in steps] == [
        "cuMemsetD32Async", "cuTensorMapEncodeTiled", "cuLaunchKernelEx",
        "cuMemsetD32Async", "cuTensorMapEncodeTiled", "cuLaunchKernelEx",
    ]  # fmt: skip
    assert filled.tolist() == [1.0] * 12 + [0.0] * 4

    encode_call = steps[1]
    expected = {
        "dtype": 9, "dims": [64, 8, 4], "strides": [128, 1024], "box": [64, 8, 1], "element_strides": [1, 1, 1],
        "interleave": 0, "swizzle": 3, "l2": 2, "fill": 0, "aligned": True,
    }  # fmt: skip
    assert {key: encode_call[key] for key in expected} == expected

    launch = steps[2]
    assert (launch["grid"], launch["block"], launch["cluster"], launch["shared"]) == (
        [6, 2, 1], [384, 1, 1], [2, 1, 1], 200_000,
    )  # fmt: skip
    tensor_map, indices, output, scalars = map(bytes.fromhex, launch["parameters"])
    assert tensor_map == bytes([0xA0 + encode_call["id"]]) * 128
    assert indices[8:] == (7).to_bytes(4, "little") + b"\xff" * 4
    assert output[8:] == (2).to_bytes(4, "little") + b"\0" * 4  # tail padding is zero
    assert scalars == (5).to_bytes(4, "little") + bytes.fromhex("0000003f")
    # The tensor map's address is the first operand, the second parameter's is the second operand plus the offset.
    assert encode_call["address"] % 16 == 0
    assert int.from_bytes(indices[:8], "little") % 8 == 4
    assert steps[5]["cluster"] is None
    assert steps[5]["kernel"] != launch["kernel"]


def test_fill_addresses_are_the_buffers(driver):
    driver.parameter_sizes(8)
    run(Fill(3, 64), Fill(3, 4, 60), kernel(parameters=(Tensor(3, offset=8),)), artefacts=ARTEFACTS[:1])
    whole, tail = driver.calls("cuMemsetD32Async")
    (launch,) = driver.calls("cuLaunchKernelEx")
    assert int.from_bytes(bytes.fromhex(launch["parameters"][0]), "little") == whole["address"] + 8
    assert tail["address"] - whole["address"] == 60
    assert (whole["words"], tail["words"]) == (16, 1)


def test_modules_are_loaded_once_and_attributes_only_raised(driver):
    driver.parameter_sizes(8)
    small = kernel(parameters=(Scalars("q", (1,)),), shared_bytes=50_000)
    run(small, kernel(parameters=(Scalars("q", (2,)),), shared_bytes=60_000))
    run(small)
    run(kernel(parameters=(Scalars("q", (3,)),), shared_bytes=55_000))
    assert [c["value"] for c in driver.calls("cuKernelSetAttribute")] == [50_000, 60_000]
    assert {(c["attribute"], c["device"]) for c in driver.calls("cuKernelSetAttribute")} == {(8, 3)}
    loads = driver.calls("cuLibraryLoadData")
    assert [bytes.fromhex(load["head"]) for load in loads] == list(CUBINS.values())
    assert len(driver.calls("cuLaunchKernelEx")) == 4


def test_one_cubin_with_two_entries_is_loaded_once(driver):
    run(kernel(), kernel(artefact=1), artefacts=(ARTEFACTS[0], ArtefactRef(FIRST, "other_entry")))
    assert len(driver.calls("cuLibraryLoadData")) == 1
    assert [c["entry"] for c in driver.calls("cuLibraryGetKernel")] == ["forward_kernel", "other_entry"]


def test_functions_are_resolved_for_each_context(driver):
    plan = encode(LaunchPlan((kernel(),), ARTEFACTS[:1]), [4096, 32, 4096, 64], CUBINS)
    for context in (0xC0, 0xC1, 0xC0):
        driver.context(context)
        call(OPERANDS, RESULTS, *plan)
    assert len(driver.calls("cuLibraryLoadData")) == 1
    assert len(driver.calls("cuKernelGetFunction")) == 2
    pushed = [c["context"] for c in driver.calls("cuCtxPushCurrent")]
    assert set(pushed) == {0xC0, 0xC1}
    assert len(driver.calls("cuCtxPopCurrent")) == len(pushed)


def test_concurrent_first_calls_load_once(driver):
    plan = encode(LaunchPlan((kernel(), kernel(artefact=1)), ARTEFACTS), SIZES, CUBINS)
    target = jax.ffi.ffi_call(register.TARGET_NAME, RESULTS)
    compiled = jax.jit(lambda *x: target(*x, plan=plan[0], cubins=plan[1])).lower(*OPERANDS).compile()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: jax.block_until_ready(compiled(*OPERANDS)), range(64)))
    assert len(driver.calls("cuLibraryLoadData")) == 2
    launches = [call["kernel"] for call in driver.calls("cuLaunchKernelEx")]
    assert len(launches) == 128 and len(set(launches)) == 2


def test_large_cluster_asks_for_the_non_portable_size(driver):
    run(kernel(cluster=(16, 1, 1), grid=(32, 1, 1)), artefacts=ARTEFACTS[:1])
    assert (14, 1) in [(c["attribute"], c["value"]) for c in driver.calls("cuKernelSetAttribute")]


def test_empty_grid_and_empty_fill_launch_nothing(driver):
    run(kernel(grid=(0, 2, 1)), Fill(3, 0), artefacts=ARTEFACTS[:1])
    assert driver.calls("cuLaunchKernelEx", "cuMemsetD32Async", "cuTensorMapEncodeTiled") == []


def test_empty_plan_without_buffers(driver):
    call((), (jax.ShapeDtypeStruct((0,), jnp.float32),), *encode(LaunchPlan(()), [0], {}))
    assert driver.calls("cuLaunchKernelEx") == []


def test_many_parameters_leave_the_inline_storage(driver):
    count = 80
    driver.parameter_sizes(*[128] * count)
    run(kernel(parameters=(TENSOR_MAP,) * count), artefacts=ARTEFACTS[:1])
    encoded = driver.calls("cuTensorMapEncodeTiled")
    assert len(encoded) == count and all(c["aligned"] for c in encoded)
    (launch,) = driver.calls("cuLaunchKernelEx")
    assert [p[:2] for p in launch["parameters"]] == [f"{(0xA0 + i) & 0xFF:02x}" for i in range(1, count + 1)]


@pytest.mark.parametrize(
    "call_name, result, message",
    [
        ("cuInit", 100, "kernel forward_kernel: cuInit failed: CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device"),
        ("cuLibraryLoadData", 200, "kernel forward_kernel: cuLibraryLoadData failed: CUDA_ERROR_INVALID_IMAGE (200): "),
        ("cuLibraryGetKernel", 500, "kernel forward_kernel: cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND (500): "),
        ("cuKernelGetFunction", 200, "kernel forward_kernel: cuKernelGetFunction failed: CUDA_ERROR_INVALID_IMAGE"),
        ("cuKernelSetAttribute", 1, "cuKernelSetAttribute (dynamic shared memory) failed: CUDA_ERROR_INVALID_VALUE"),
        ("cuKernelGetParamInfo", 999, "cuKernelGetParamInfo failed: unknown error (999): no description"),
        (
            "cuTensorMapEncodeTiled",
            1,
            "kernel forward_kernel: cuTensorMapEncodeTiled (parameter 0, buffer 0) failed: CU",
        ),
        ("cuLaunchKernelEx", 701, "kernel forward_kernel: cuLaunchKernelEx failed: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
        ("cuMemsetD32Async", 1, "fill of buffer 3: cuMemsetD32Async failed: CUDA_ERROR_INVALID_VALUE (1): invalid"),
        ("cuStreamGetCtx", 1, "kernel forward_kernel: cuStreamGetCtx failed: CUDA_ERROR_INVALID_VALUE (1): invalid"),
        ("cuStreamIsCapturing", 1, "cuStreamIsCapturing failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument"),
        ("cuCtxGetCurrent", 1, "cuCtxPushCurrent failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument"),
        ("cuCtxPushCurrent", 1, "cuCtxPushCurrent failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument"),
        ("cuCtxGetDevice", 1, "cuCtxGetDevice failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument"),
    ],
)
def test_driver_errors_name_kernel_call_and_reason(driver, call_name, result, message):
    driver.fail(call_name, result)
    with pytest.raises(Exception, match="jax_fa4: kernel forward_kernel: ") as error:
        run(kernel(), Fill(3, 4), artefacts=ARTEFACTS[:1])
    assert message in str(error.value)
    # A failure is not remembered: once the driver works, so does the next call.
    driver.fail("", 0)
    run(kernel(), Fill(3, 4), artefacts=ARTEFACTS[:1])


def test_loading_is_refused_during_graph_capture(driver):
    driver.capture(1)
    with pytest.raises(Exception, match="captured into a graph and the kernels are not loaded"):
        run(kernel(), artefacts=ARTEFACTS[:1])
    assert driver.calls("cuLibraryLoadData") == []
    driver.capture(0)
    run(kernel(), artefacts=ARTEFACTS[:1])
    driver.capture(1)
    run(kernel(), artefacts=ARTEFACTS[:1])  # loaded by now: capturing launches is what graphs are for


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((128, 16, 16), "the kernel declares only 3 parameters, the launch plan supplies 4"),
        ((128, 16, 16, 8, 4), "the kernel declares more than 4 parameters, the launch plan supplies 4"),
        ((64, 16, 16, 8), "the kernel declares 64 bytes for parameter 0, the launch plan supplies 128"),
        ((128, 16, 24, 8), "the kernel declares 24 bytes for parameter 2, the launch plan supplies 12"),
    ],
)
def test_parameters_must_be_what_the_kernel_declares(driver, sizes, message):
    driver.parameter_sizes(*sizes)
    with pytest.raises(Exception, match="kernel forward_kernel: cuKernelGetParamInfo: ") as error:
        run(kernel(), artefacts=ARTEFACTS[:1])
    assert message in str(error.value)
    assert driver.calls("cuLaunchKernelEx") == []


def test_driver_without_parameter_info_still_launches(driver):
    driver.install(parameter_info=False)
    run(kernel(), artefacts=ARTEFACTS[:1])
    assert len(driver.calls("cuLaunchKernelEx")) == 1


SIZES = [4096, 32, 4096, 64]
GOOD = encode(LaunchPlan((kernel(),), ARTEFACTS[:1]), SIZES, CUBINS)


def altered(position, data=GOOD[0]):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize(
    "plan, cubins, message",
    [
        (b"", GOOD[1], "is no launch plan"),
        (b"garbage" * 20, GOOD[1], "is no launch plan"),
        (altered(4), GOOD[1], "format version 0, this library reads version 1"),
        (altered(60), GOOD[1], "the launch plan is corrupt"),
        (altered(20), GOOD[1], "the launch plan is corrupt"),
        (GOOD[0][:-1], GOOD[1], "the launch plan is corrupt"),
        (GOOD[0], altered(3, GOOD[1]), "kernel forward_kernel: the cubin is corrupt"),
        (GOOD[0], GOOD[1][:-1], "kernel forward_kernel: the cubins attribute has 7 bytes and ends before"),
        (GOOD[0], GOOD[1] + b"x", "trailing"),
    ],
)
def test_damaged_attributes_are_errors(driver, plan, cubins, message):
    if message == "trailing":
        # More cubin bytes than the plan knows are harmless by themselves, but not what the plan came with.
        call(OPERANDS, RESULTS, plan, GOOD[1])
        message = "the cubins attribute has 9 bytes, the launch plan came with 8"
    with pytest.raises(Exception, match="jax_fa4: ") as error:
        call(OPERANDS, RESULTS, plan, cubins)
    assert message in str(error.value)
    driver.calls("cuLaunchKernelEx")


def resealed(body):
    """A plan with a right digest around a wrong body: only a faulty writer makes it, still no crash may follow."""
    return GOOD[0][:8] + hashlib.sha256(body).digest() + body


@pytest.mark.parametrize("cut", range(0, len(GOOD[0]) - 40, 7))
def test_truncated_body_with_right_digest_is_an_error(driver, cut):
    body = GOOD[0][40:]
    with pytest.raises(Exception, match="jax_fa4: "):
        call(OPERANDS, RESULTS, resealed(body[:cut]), GOOD[1])
    assert driver.calls("cuLaunchKernelEx") == []


@pytest.mark.parametrize("position", range(0, len(GOOD[0]) - 40, 5))
def test_altered_body_with_right_digest_never_crashes(driver, position):
    body = bytearray(GOOD[0][40:])
    body[position] ^= 0xFF
    try:
        call(OPERANDS, RESULTS, resealed(bytes(body)), GOOD[1])
    except Exception as error:
        assert "jax_fa4: " in str(error)


def test_wrong_buffers_are_errors(driver):
    with pytest.raises(Exception, match="has 3 operands and results, the launch plan expects 4"):
        call(OPERANDS[:1], RESULTS, *GOOD)
    smaller = (OPERANDS[0][:2], OPERANDS[1])
    with pytest.raises(Exception, match="buffer 0 has 2048 bytes, the launch plan expects 4096"):
        call(smaller, RESULTS, *GOOD)
    assert driver.calls("cuLaunchKernelEx") == []


def test_kernels_never_run_on_host_memory_without_a_recording_driver():
    recording_driver().uninstall()
    with pytest.raises(Exception, match="jax_fa4: kernels cannot run on the CPU"):
        call(OPERANDS, RESULTS, *GOOD)


def test_missing_libcuda_is_reported():
    build_launcher_in_place()
    code = "from jax_fa4.ffi import register; print(register.driver_unavailable_reason())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    try:
        import ctypes

        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert "dlopen failed: libcuda.so.1" in result.stdout
        assert "driver is not installed" in result.stdout
    else:
        assert result.stdout.strip() == "None" or "cuInit failed" in result.stdout


def test_importing_the_package_registers_the_handler():
    """A fresh process that runs an exported program does nothing but import."""
    build_launcher_in_place()
    code = "import jax_fa4; from jax_fa4.ffi import register; print(register.register.cache_info().currsize)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


def test_cuda_registration_needs_no_gpu():
    build_launcher_in_place()
    assert register.unavailable_reason() is None


def test_build_reports_compiler_failures(tmp_path):
    with pytest.raises(build.BuildError, match="failed with exit status"):
        build.build(tmp_path / "x.so", include_dir=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_missing_library_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(register, "LIBRARY_PATH", tmp_path / "none.so")
    with pytest.raises(register.LauncherUnavailable, match=r"was not built.*python -m jax_fa4\.ffi\.build"):
        register.load.__wrapped__()
    (tmp_path / "none.so").write_bytes(b"not a library")
    with pytest.raises(register.LauncherUnavailable, match="does not load"):
        register.load.__wrapped__()


CUDA_HEADERS = next((path for path in ("/usr/local/cuda/include",) if Path(path, "cuda.h").exists()), None)


@pytest.mark.skipif(CUDA_HEADERS is None, reason="the CUDA toolkit's cuda.h is not installed")
def test_declarations_match_the_toolkit():
    subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", "-I", str(build.SOURCE_DIR), "-I", CUDA_HEADERS]
        + [str(NATIVE_DIR / "check_abi.cc")],
        check=True,
    )
