// The CUDA driver as a table of entry points, found by dlopen("libcuda.so.1").
#pragma once

#include <string>

#include "cuda_types.h"

namespace jax_fa4 {

// Every entry point that the launcher calls. X(member, symbol, result type, parameters).
// The `_v2` symbols are what cuda.h's macros map the plain names to.
#define JAX_FA4_DRIVER_REQUIRED(X)                                                                                     \
  X(init, "cuInit", (unsigned int flags))                                                                              \
  X(get_error_name, "cuGetErrorName", (cuda::Result, const char** text))                                               \
  X(get_error_string, "cuGetErrorString", (cuda::Result, const char** text))                                           \
  X(ctx_get_current, "cuCtxGetCurrent", (cuda::Context*))                                                              \
  X(ctx_push_current, "cuCtxPushCurrent_v2", (cuda::Context))                                                          \
  X(ctx_pop_current, "cuCtxPopCurrent_v2", (cuda::Context*))                                                           \
  X(ctx_get_device, "cuCtxGetDevice", (cuda::Device*))                                                                 \
  X(stream_get_ctx, "cuStreamGetCtx", (cuda::Stream, cuda::Context*))                                                  \
  X(stream_is_capturing, "cuStreamIsCapturing", (cuda::Stream, int* status))                                           \
  X(library_load_data, "cuLibraryLoadData",                                                                            \
    (cuda::Library*, const void* image, int* jit_options, void** jit_values, unsigned int jit_count, int* options,     \
     void** values, unsigned int count))                                                                               \
  X(library_get_kernel, "cuLibraryGetKernel", (cuda::Kernel*, cuda::Library, const char* name))                        \
  X(kernel_get_function, "cuKernelGetFunction", (cuda::Function*, cuda::Kernel))                                       \
  X(kernel_set_attribute, "cuKernelSetAttribute", (int attribute, int value, cuda::Kernel, cuda::Device))              \
  X(tensor_map_encode_tiled, "cuTensorMapEncodeTiled",                                                                 \
    (cuda::TensorMap*, int dtype, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides,         \
     const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion, int fill))   \
  X(memset_d32_async, "cuMemsetD32Async", (cuda::DevicePointer, unsigned int pattern, size_t words, cuda::Stream))     \
  X(launch_kernel, "cuLaunchKernelEx",                                                                                 \
    (const cuda::LaunchConfig*, cuda::Function, void** parameters, void** extra))

// Entry points that older drivers lack; the launcher does without.
#define JAX_FA4_DRIVER_OPTIONAL(X)                                                                                     \
  X(kernel_get_param_info, "cuKernelGetParamInfo", (cuda::Kernel, size_t index, size_t* offset, size_t* size))

struct Driver {
#define JAX_FA4_MEMBER(member, symbol, parameters) cuda::Result(*member) parameters = nullptr;
  JAX_FA4_DRIVER_REQUIRED(JAX_FA4_MEMBER)
  JAX_FA4_DRIVER_OPTIONAL(JAX_FA4_MEMBER)
#undef JAX_FA4_MEMBER
};

// The driver in use: the test's table if one is installed, else libcuda, loaded and initialised on first use. Returns
// null and sets `error` if there is none. Thread-safe; a failure is not remembered, so that a driver that appears later
// (a container's late mount) is found.
const Driver* GetDriver(std::string* error);

// "CUDA_ERROR_INVALID_VALUE (1): invalid argument", whatever the driver knows about `result`.
std::string Describe(const Driver& driver, cuda::Result result);

// For tests only: uses `driver` from now on (null: back to libcuda). The caller must hold no launch in flight.
void InstallDriver(const Driver* driver);

// True while a test's table is installed.
bool DriverIsInstalled();

}  // namespace jax_fa4
