#include "launch.h"

#include <cstring>

namespace jax_fa4 {
namespace {

// Kernel parameters of attention kernels take less than this; larger blocks go to the heap.
constexpr size_t kInlineBytes = 4096;
constexpr size_t kInlineParameters = 32;
constexpr uint32_t kUnitElementStrides[5] = {1, 1, 1, 1, 1};

std::string Failure(const Driver& driver, const std::string& entry, const std::string& call, cuda::Result result) {
  return "kernel " + entry + ": " + call + " failed: " + Describe(driver, result);
}

bool FillParameter(const Driver& driver, const Parameter& parameter, const std::vector<BufferView>& buffers,
                   uint8_t* bytes, size_t index, const std::string& entry, std::string* error) {
  uint8_t* target = bytes + parameter.position;
  if (const auto* tensor = std::get_if<TensorParameter>(&parameter.kind)) {
    uint64_t address = reinterpret_cast<uint64_t>(buffers[tensor->buffer].data) + tensor->offset;
    std::memcpy(target, &address, sizeof(address));
  } else if (const auto* map = std::get_if<TensorMapParameter>(&parameter.kind)) {
    void* address = static_cast<char*>(buffers[map->buffer].data) + map->offset;
    cuda::Result result = driver.tensor_map_encode_tiled(
        reinterpret_cast<cuda::TensorMap*>(target), map->dtype, map->rank, address, map->dims, map->strides, map->box,
        kUnitElementStrides, cuda::kInterleaveNone, map->swizzle, map->l2_promotion, cuda::kOutOfBoundsFillZero);
    if (result != cuda::kSuccess) {
      *error = Failure(driver, entry, "cuTensorMapEncodeTiled (parameter " + std::to_string(index) + ", buffer " +
                       std::to_string(map->buffer) + ")", result);
      return false;
    }
  }
  return true;
}

bool LaunchKernel(const Driver& driver, const KernelStep& step, const std::string& entry, cuda::Function function,
                  const std::vector<BufferView>& buffers, cuda::Stream stream, std::string* error) {
  alignas(kParameterAlignment) uint8_t inline_bytes[kInlineBytes];
  void* inline_pointers[kInlineParameters];
  std::vector<uint8_t> heap_bytes;
  std::vector<void*> heap_pointers;
  uint8_t* bytes = inline_bytes;
  void** pointers = inline_pointers;
  if (step.bytes.size() > kInlineBytes) {
    heap_bytes.resize(step.bytes.size() + kParameterAlignment);
    auto address = reinterpret_cast<uintptr_t>(heap_bytes.data());
    bytes = heap_bytes.data() + (kParameterAlignment - address % kParameterAlignment) % kParameterAlignment;
  }
  if (step.parameters.size() > kInlineParameters) {
    heap_pointers.resize(step.parameters.size());
    pointers = heap_pointers.data();
  }
  if (!step.bytes.empty()) std::memcpy(bytes, step.bytes.data(), step.bytes.size());
  for (size_t i = 0; i < step.parameters.size(); ++i) {
    if (!FillParameter(driver, step.parameters[i], buffers, bytes, i, entry, error)) return false;
    pointers[i] = bytes + step.parameters[i].position;
  }

  cuda::LaunchAttribute attribute{};
  cuda::LaunchConfig config{};
  config.grid_x = step.grid[0], config.grid_y = step.grid[1], config.grid_z = step.grid[2];
  config.block_x = step.block[0], config.block_y = step.block[1], config.block_z = step.block[2];
  config.shared_bytes = step.shared_bytes;
  config.stream = stream;
  config.attributes = &attribute;
  if (step.cluster[0] != 1 || step.cluster[1] != 1 || step.cluster[2] != 1) {
    attribute.id = cuda::kLaunchAttributeClusterDimension;
    attribute.value.cluster = {step.cluster[0], step.cluster[1], step.cluster[2]};
    config.attribute_count = 1;
  }
  cuda::Result result = driver.launch_kernel(&config, function, pointers, nullptr);
  if (result != cuda::kSuccess) {
    *error = Failure(driver, entry, "cuLaunchKernelEx", result);
    return false;
  }
  return true;
}

bool CheckBuffers(const Plan& plan, const std::vector<BufferView>& buffers, std::string* error) {
  if (buffers.size() != plan.buffer_bytes.size()) {
    *error = "the custom call has " + std::to_string(buffers.size()) + " operands and results, the launch plan expects " +
             std::to_string(plan.buffer_bytes.size());
    return false;
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].bytes != plan.buffer_bytes[i]) {
      *error = "buffer " + std::to_string(i) + " has " + std::to_string(buffers[i].bytes) +
               " bytes, the launch plan expects " + std::to_string(plan.buffer_bytes[i]);
      return false;
    }
    if (buffers[i].data == nullptr && buffers[i].bytes != 0) {
      *error = "buffer " + std::to_string(i) + " is null";
      return false;
    }
  }
  return true;
}

}  // namespace

ScopedContext::ScopedContext(const Driver& driver, cuda::Context context) : driver_(driver) {
  cuda::Context current = nullptr;
  result_ = driver.ctx_get_current(&current);
  if (result_ != cuda::kSuccess || current == context) return;
  result_ = driver.ctx_push_current(context);
  pushed_ = result_ == cuda::kSuccess;
}

ScopedContext::~ScopedContext() {
  cuda::Context context = nullptr;
  if (pushed_) driver_.ctx_pop_current(&context);
}

const LoadedKernels* EnsureLoaded(const Driver& driver, CachedPlan* plan, std::string_view cubins, cuda::Stream stream,
                                  std::string* error) {
  cuda::Context context = nullptr;
  if (cuda::Result result = driver.stream_get_ctx(stream, &context); result != cuda::kSuccess) {
    *error = "cuStreamGetCtx failed: " + Describe(driver, result);
    return nullptr;
  }
  if (const LoadedKernels* loaded = plan->FindLoaded(context)) return loaded;
  int capture = 0;
  if (cuda::Result result = driver.stream_is_capturing(stream, &capture); result != cuda::kSuccess) {
    *error = "cuStreamIsCapturing failed: " + Describe(driver, result);
    return nullptr;
  }
  if (capture != cuda::kStreamCaptureNone) {
    *error = "the stream is being captured into a graph and the kernels are not loaded yet";
    return nullptr;
  }
  ScopedContext scope(driver, context);
  if (scope.result() != cuda::kSuccess) {
    *error = "cuCtxPushCurrent failed: " + Describe(driver, scope.result());
    return nullptr;
  }
  return GetPlanCache().Load(driver, plan, cubins, context, error);
}

bool Launch(const Driver& driver, const Plan& plan, const LoadedKernels& kernels,
            const std::vector<BufferView>& buffers, cuda::Stream stream, std::string* error) {
  if (!CheckBuffers(plan, buffers, error)) return false;
  ScopedContext scope(driver, kernels.context);
  if (scope.result() != cuda::kSuccess) {
    *error = "cuCtxPushCurrent failed: " + Describe(driver, scope.result());
    return false;
  }
  for (const auto& any_step : plan.steps) {
    if (const auto* step = std::get_if<KernelStep>(&any_step)) {
      if (step->empty()) continue;
      const std::string& entry = plan.artefacts[step->artefact].entry;
      if (!LaunchKernel(driver, *step, entry, kernels.functions[step->artefact], buffers, stream, error)) return false;
    } else if (const auto* fill = std::get_if<FillStep>(&any_step); fill->size != 0) {
      auto address = static_cast<cuda::DevicePointer>(reinterpret_cast<uintptr_t>(buffers[fill->buffer].data)) + fill->offset;
      cuda::Result result = driver.memset_d32_async(address, fill->pattern, fill->size / 4, stream);
      if (result != cuda::kSuccess) {
        *error = "fill of buffer " + std::to_string(fill->buffer) + ": cuMemsetD32Async failed: " +
                 Describe(driver, result);
        return false;
      }
    }
  }
  return true;
}

}  // namespace jax_fa4
