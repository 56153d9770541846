// A CUDA driver for tests: records every call as one line of JSON, and fails the call it is told to fail.
//
// Memory is host memory, so fills really fill. "Kernels" do nothing: their parameters' bytes are recorded.

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"

namespace {

using namespace jax_fa4;

struct State {
  std::mutex mutex;
  std::string log;
  std::string failing_call;
  int failing_result = 0;
  int capturing = 0;
  std::vector<size_t> parameter_sizes;
  std::map<std::string, intptr_t> kernels;  // entry -> handle
  intptr_t maps = 0;
  uintptr_t context = 0xc0;
};

State& state() {
  static State instance;
  return instance;
}

std::string Format(const char* format, ...) {
  char text[4096];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return text;
}

// Records a call and returns what it is to return.
int Call(const char* name, const std::string& fields = "") {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().log += Format("{\"call\": \"%s\"", name) + (fields.empty() ? "" : ", " + fields) + "}\n";
  return state().failing_call == name ? state().failing_result : 0;
}

template <typename T>
std::string List(const T* values, size_t count) {
  std::string text = "[";
  for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(static_cast<unsigned long long>(values[i]));
  return text + "]";
}

std::string Hex(const void* data, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i) text += Format("%02x", static_cast<const unsigned char*>(data)[i]);
  return text;
}

int Init(unsigned int) { return Call("cuInit"); }

int GetErrorName(int result, const char** text) {
  if (result == 999) return 1;  // an error that the driver cannot name
  *text = result == 100   ? "CUDA_ERROR_NO_DEVICE"
          : result == 200 ? "CUDA_ERROR_INVALID_IMAGE"
          : result == 500 ? "CUDA_ERROR_NOT_FOUND"
          : result == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
                          : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}

int GetErrorString(int result, const char** text) {
  if (result == 999) return 1;
  *text = result == 100   ? "no CUDA-capable device is detected"
          : result == 200 ? "device kernel image is invalid"
          : result == 500 ? "named symbol not found"
          : result == 701 ? "too many resources requested for launch"
                          : "invalid argument";
  return 0;
}

int CtxGetCurrent(cuda::Context* context) {
  *context = nullptr;
  return Call("cuCtxGetCurrent");
}
int CtxPush(cuda::Context context) {
  return Call("cuCtxPushCurrent", Format("\"context\": %lu", reinterpret_cast<uintptr_t>(context)));
}
int CtxPop(cuda::Context*) { return Call("cuCtxPopCurrent"); }
int CtxGetDevice(cuda::Device* device) {
  *device = 3;
  return Call("cuCtxGetDevice");
}
int StreamGetCtx(cuda::Stream, cuda::Context* context) {
  *context = reinterpret_cast<cuda::Context>(state().context);
  return Call("cuStreamGetCtx");
}
int StreamIsCapturing(cuda::Stream, int* status) {
  *status = state().capturing;
  return Call("cuStreamIsCapturing");
}
int LibraryLoadData(cuda::Library* library, const void* image, int*, void**, unsigned int, int*, void**, unsigned int) {
  *library = reinterpret_cast<cuda::Library>(static_cast<intptr_t>(0x11b));
  return Call("cuLibraryLoadData", "\"head\": \"" + Hex(image, 8) + "\"");
}
int LibraryGetKernel(cuda::Kernel* kernel, cuda::Library, const char* name) {
  intptr_t handle;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    handle = state().kernels.emplace(name, 0x1000 + state().kernels.size()).first->second;
  }
  *kernel = reinterpret_cast<cuda::Kernel>(handle);
  return Call("cuLibraryGetKernel", Format("\"entry\": \"%s\", \"kernel\": %ld", name, static_cast<long>(handle)));
}
int KernelGetFunction(cuda::Function* function, cuda::Kernel kernel) {
  *function = reinterpret_cast<cuda::Function>(kernel);
  return Call("cuKernelGetFunction", Format("\"kernel\": %ld", static_cast<long>(reinterpret_cast<intptr_t>(kernel))));
}
int KernelSetAttribute(int attribute, int value, cuda::Kernel kernel, cuda::Device device) {
  return Call("cuKernelSetAttribute", Format("\"attribute\": %d, \"value\": %d, \"kernel\": %ld, \"device\": %d",
                                             attribute, value, static_cast<long>(reinterpret_cast<intptr_t>(kernel)),
                                             device));
}
int KernelGetParamInfo(cuda::Kernel, size_t index, size_t* offset, size_t* size) {
  if (int result = Call("cuKernelGetParamInfo", Format("\"index\": %zu", index))) return result;
  if (index >= state().parameter_sizes.size()) return cuda::kInvalidValue;
  *offset = 0;
  *size = state().parameter_sizes[index];
  return 0;
}
int TensorMapEncodeTiled(cuda::TensorMap* map, int dtype, uint32_t rank, void* address, const uint64_t* dims,
                         const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                         int swizzle, int l2_promotion, int fill) {
  intptr_t id = ++state().maps;
  std::memset(map->opaque, static_cast<int>(0xa0 + id), sizeof(map->opaque));
  return Call("cuTensorMapEncodeTiled",
              Format("\"id\": %ld, \"aligned\": %s, \"dtype\": %d, \"address\": %llu, \"dims\": %s, \"strides\": %s, "
                     "\"box\": %s, \"element_strides\": %s, \"interleave\": %d, \"swizzle\": %d, \"l2\": %d, "
                     "\"fill\": %d",
                     static_cast<long>(id), reinterpret_cast<uintptr_t>(map) % 128 == 0 ? "true" : "false", dtype,
                     static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(address)), List(dims, rank).c_str(),
                     List(strides, rank - 1).c_str(), List(box, rank).c_str(), List(element_strides, rank).c_str(),
                     interleave, swizzle, l2_promotion, fill));
}
int MemsetD32Async(cuda::DevicePointer address, unsigned int pattern, size_t words, cuda::Stream) {
  if (int result = Call("cuMemsetD32Async", Format("\"address\": %llu, \"pattern\": %u, \"words\": %zu", address,
                                                   pattern, words))) {
    return result;
  }
  auto* target = reinterpret_cast<uint32_t*>(static_cast<uintptr_t>(address));
  for (size_t i = 0; i < words; ++i) target[i] = pattern;
  return 0;
}
int LaunchKernelEx(const cuda::LaunchConfig* config, cuda::Function function, void** parameters, void**) {
  std::string bytes = "[";
  for (size_t i = 0; i < state().parameter_sizes.size(); ++i) {
    bytes += (i ? ", \"" : "\"") + Hex(parameters[i], state().parameter_sizes[i]) + "\"";
  }
  std::string cluster = "null";
  for (unsigned int i = 0; i < config->attribute_count; ++i) {
    const auto& attribute = config->attributes[i];
    if (attribute.id == cuda::kLaunchAttributeClusterDimension) {
      const unsigned int sizes[3] = {attribute.value.cluster.x, attribute.value.cluster.y, attribute.value.cluster.z};
      cluster = List(sizes, 3);
    }
  }
  const unsigned int grid[3] = {config->grid_x, config->grid_y, config->grid_z};
  const unsigned int block[3] = {config->block_x, config->block_y, config->block_z};
  return Call("cuLaunchKernelEx",
              Format("\"kernel\": %ld, \"grid\": %s, \"block\": %s, \"cluster\": %s, \"shared\": %u, \"stream\": %lu, ",
                     static_cast<long>(reinterpret_cast<intptr_t>(function)), List(grid, 3).c_str(),
                     List(block, 3).c_str(), cluster.c_str(), config->shared_bytes,
                     reinterpret_cast<uintptr_t>(config->stream)) +
                  "\"parameters\": " + bytes + "]");
}

}  // namespace

extern "C" {

const void* stub_driver(int with_param_info) {
  static Driver driver;
  driver = {Init,          GetErrorName,      GetErrorString,  CtxGetCurrent,     CtxPush,
            CtxPop,        CtxGetDevice,      StreamGetCtx,    StreamIsCapturing, LibraryLoadData,
            LibraryGetKernel, KernelGetFunction, KernelSetAttribute, TensorMapEncodeTiled, MemsetD32Async,
            LaunchKernelEx, with_param_info ? KernelGetParamInfo : nullptr};
  return &driver;
}

void stub_reset(void) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().log.clear();
  state().failing_call.clear();
  state().capturing = 0;
  state().parameter_sizes.clear();
  state().kernels.clear();
  state().maps = 0;
  state().context = 0xc0;
}

void stub_clear_log(void) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().log.clear();
}

void stub_fail(const char* call, int result) {
  state().failing_call = call;
  state().failing_result = result;
}

void stub_capture(int capturing) { state().capturing = capturing; }

void stub_context(uintptr_t context) { state().context = context; }

void stub_parameter_sizes(const size_t* sizes, size_t count) { state().parameter_sizes.assign(sizes, sizes + count); }

// The log so far; valid until the next call of this function.
const char* stub_log(void) {
  static std::string copy;
  std::lock_guard<std::mutex> lock(state().mutex);
  copy = state().log;
  return copy.c_str();
}
}
