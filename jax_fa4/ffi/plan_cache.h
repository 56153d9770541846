// What the process remembers between calls: plans that were read, modules that were loaded.
//
// Plans are found by the digest in their header rather than kept as XLA FFI state, because a state's type id is valid
// for one XLA runtime only, and the CPU client and the CUDA plugin of one process are two.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "driver.h"
#include "plan_reader.h"

namespace jax_fa4 {

// The kernels of one plan in one CUDA context, by artefact index.
struct LoadedKernels {
  cuda::Context context;
  std::vector<cuda::Function> functions;
  const LoadedKernels* next;
};

struct CachedPlan {
  std::string data;  // the plan attribute, which is also the key
  size_t cubins_bytes = 0;
  Plan plan;
  // Grows at the front under PlanCache's mutex, read without it. A process has few contexts.
  std::atomic<const LoadedKernels*> loaded{nullptr};

  const LoadedKernels* FindLoaded(cuda::Context context) const {
    const LoadedKernels* node = loaded.load(std::memory_order_acquire);
    while (node != nullptr && node->context != context) node = node->next;
    return node;
  }
};

// Thread-safe. Entries live as long as the process: a plan takes a few kilobytes, and a module must outlive every graph
// that launches it.
class PlanCache {
 public:
  // Finds the plan, reading it on first sight. Null and `error` if it is damaged.
  CachedPlan* Find(std::string_view data, std::string_view cubins, std::string* error);

  // Loads all kernels of the plan into the current context and sets their attributes. Null and `error` if the driver
  // refuses. Must not run while the stream is captured.
  const LoadedKernels* Load(const Driver& driver, CachedPlan* plan, std::string_view cubins, cuda::Context context,
                            std::string* error);

 private:
  struct KernelRecord {
    cuda::Kernel kernel = nullptr;
    // Largest dynamic shared memory granted so far, per device.
    std::unordered_map<cuda::Device, uint32_t> shared_bytes;
  };

  bool LoadKernel(const Driver& driver, const Artefact& artefact, std::string_view cubins, KernelRecord** record,
                  std::string* error);

  struct KeyHash {
    size_t operator()(std::string_view data) const { return static_cast<size_t>(PlanKey(data)); }
  };

  std::shared_mutex plans_mutex_;
  std::unordered_map<std::string_view, std::unique_ptr<CachedPlan>, KeyHash> plans_;
  std::mutex load_mutex_;
  std::unordered_map<std::string, cuda::Library> libraries_;    // by digest
  std::unordered_map<std::string, KernelRecord> kernels_;       // by digest + entry
};

// The process's cache.
PlanCache& GetPlanCache();

// For tests only: forgets everything, together with a change of the driver's table.
void ResetPlanCache();

}  // namespace jax_fa4
