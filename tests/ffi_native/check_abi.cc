// Compares our declarations of the driver's types and constants with the toolkit's. Compiling is the test.

#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "driver.h"

namespace cuda = jax_fa4::cuda;

static_assert(sizeof(cuda::TensorMap) == sizeof(CUtensorMap) && alignof(cuda::TensorMap) == alignof(CUtensorMap));
static_assert(sizeof(cuda::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(cuda::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(cuda::LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(cuda::LaunchConfig, grid_x) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(cuda::LaunchConfig, block_x) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(cuda::LaunchConfig, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(cuda::LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(cuda::LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(cuda::LaunchConfig, attribute_count) == offsetof(CUlaunchConfig, numAttrs));
static_assert(std::is_same_v<cuda::DevicePointer, CUdeviceptr> && std::is_same_v<cuda::Device, CUdevice>);
static_assert(cuda::kSuccess == CUDA_SUCCESS && cuda::kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(cuda::kAttributeMaxDynamicSharedBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(cuda::kAttributeNonPortableClusterAllowed == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
static_assert(cuda::kLaunchAttributeClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(cuda::kStreamCaptureNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(cuda::kInterleaveNone == CU_TENSOR_MAP_INTERLEAVE_NONE);
static_assert(cuda::kOutOfBoundsFillZero == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
static_assert(CU_TENSOR_MAP_DATA_TYPE_INT32 == 3 && CU_TENSOR_MAP_DATA_TYPE_FLOAT16 == 6);
static_assert(CU_TENSOR_MAP_DATA_TYPE_FLOAT32 == 7 && CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 == 9);
static_assert(CU_TENSOR_MAP_SWIZZLE_128B == 3 && CU_TENSOR_MAP_L2_PROMOTION_L2_128B == 2);

// Each entry point has as many parameters, of the same sizes, as the toolkit declares.
template <typename F>
struct Signature;
template <typename R, typename... P>
struct Signature<R (*)(P...)> {
  static constexpr size_t count = sizeof...(P);
  static constexpr size_t sizes[] = {sizeof(P)...};
};
template <typename Ours, typename Theirs>
constexpr bool Same() {
  using A = Signature<Ours>;
  using B = Signature<Theirs>;
  if (A::count != B::count) return false;
  for (size_t i = 0; i < A::count; ++i) {
    if (A::sizes[i] != B::sizes[i]) return false;
  }
  return true;
}
using D = jax_fa4::Driver;
static_assert(Same<decltype(D::init), decltype(&cuInit)>());
static_assert(Same<decltype(D::get_error_name), decltype(&cuGetErrorName)>());
static_assert(Same<decltype(D::get_error_string), decltype(&cuGetErrorString)>());
static_assert(Same<decltype(D::ctx_get_current), decltype(&cuCtxGetCurrent)>());
static_assert(Same<decltype(D::ctx_push_current), decltype(&cuCtxPushCurrent)>());
static_assert(Same<decltype(D::ctx_pop_current), decltype(&cuCtxPopCurrent)>());
static_assert(Same<decltype(D::ctx_get_device), CUresult (*)(CUdevice*)>());
static_assert(Same<decltype(D::stream_get_ctx), CUresult (*)(CUstream, CUcontext*)>());
static_assert(Same<decltype(D::stream_is_capturing), decltype(&cuStreamIsCapturing)>());
static_assert(Same<decltype(D::library_load_data), decltype(&cuLibraryLoadData)>());
static_assert(Same<decltype(D::library_get_kernel), decltype(&cuLibraryGetKernel)>());
static_assert(Same<decltype(D::kernel_get_function), decltype(&cuKernelGetFunction)>());
static_assert(Same<decltype(D::kernel_set_attribute), decltype(&cuKernelSetAttribute)>());
static_assert(Same<decltype(D::tensor_map_encode_tiled), decltype(&cuTensorMapEncodeTiled)>());
static_assert(Same<decltype(D::memset_d32_async), decltype(&cuMemsetD32Async)>());
static_assert(Same<decltype(D::launch_kernel), decltype(&cuLaunchKernelEx)>());
static_assert(Same<decltype(D::kernel_get_param_info), decltype(&cuKernelGetParamInfo)>());
