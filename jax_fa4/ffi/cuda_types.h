// The few types and constants of the CUDA driver API that the launcher needs.
//
// Declared here so that building needs no CUDA toolkit. They are part of the driver's stable ABI; tests compare them
// with the toolkit's cuda.h where one is installed (tests/ffi_native/check_abi.cc).
#pragma once

#include <cstddef>
#include <cstdint>

namespace jax_fa4::cuda {

using Result = int;  // CUresult
using Device = int;  // CUdevice
using DevicePointer = unsigned long long;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Library = struct LibraryTag*;
using Kernel = struct KernelTag*;
using Function = struct FunctionTag*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;

inline constexpr int kAttributeMaxDynamicSharedBytes = 8;      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
inline constexpr int kAttributeNonPortableClusterAllowed = 14;  // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
inline constexpr int kLaunchAttributeClusterDimension = 4;     // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
inline constexpr int kStreamCaptureNone = 0;                   // CU_STREAM_CAPTURE_STATUS_NONE
inline constexpr int kInterleaveNone = 0;                      // CU_TENSOR_MAP_INTERLEAVE_NONE
inline constexpr int kOutOfBoundsFillZero = 0;                 // CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE

// More CTAs than this per cluster need the non-portable attribute.
inline constexpr uint32_t kPortableClusterSize = 8;

struct alignas(128) TensorMap {
  unsigned char opaque[128];
};

struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned int x, y, z;
    } cluster;
  } value;
};

struct LaunchConfig {
  unsigned int grid_x, grid_y, grid_z;
  unsigned int block_x, block_y, block_z;
  unsigned int shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned int attribute_count;
};

}  // namespace jax_fa4::cuda
