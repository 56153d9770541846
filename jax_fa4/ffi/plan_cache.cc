#include "plan_cache.h"

namespace jax_fa4 {
namespace {

// Never destroyed: XLA may still run launches while static objects are being torn down.
std::atomic<PlanCache*> cache{nullptr};

std::string Key(const Digest& digest) { return std::string(reinterpret_cast<const char*>(digest.data()), digest.size()); }

std::string Failure(const Driver& driver, const std::string& entry, const char* call, cuda::Result result) {
  return "kernel " + entry + ": " + call + " failed: " + Describe(driver, result);
}

// Compares the plan's parameters with what the compiled kernel declares.
bool CheckParameters(const Driver& driver, const KernelStep& step, const std::string& entry, cuda::Kernel kernel,
                     std::string* error) {
  if (driver.kernel_get_param_info == nullptr) return true;
  for (size_t i = 0; i <= step.parameters.size(); ++i) {
    size_t offset = 0, size = 0;
    cuda::Result result = driver.kernel_get_param_info(kernel, i, &offset, &size);
    bool exists = result == cuda::kSuccess;
    if (!exists && result != cuda::kInvalidValue) {
      *error = Failure(driver, entry, "cuKernelGetParamInfo", result);
      return false;
    }
    if (exists != (i < step.parameters.size())) {
      *error = "kernel " + entry + ": cuKernelGetParamInfo: the kernel declares " +
               (exists ? "more than " : "only ") + std::to_string(i) + " parameters, the launch plan supplies " +
               std::to_string(step.parameters.size());
      return false;
    }
    if (exists && (size < step.parameters[i].size || size > step.parameters[i].padded_size)) {
      *error = "kernel " + entry + ": cuKernelGetParamInfo: the kernel declares " + std::to_string(size) +
               " bytes for parameter " + std::to_string(i) + ", the launch plan supplies " +
               std::to_string(step.parameters[i].size);
      return false;
    }
  }
  return true;
}

}  // namespace

CachedPlan* PlanCache::Find(std::string_view data, std::string_view cubins, std::string* error) {
  CachedPlan* found = nullptr;
  {
    std::shared_lock<std::shared_mutex> lock(plans_mutex_);
    if (auto it = plans_.find(data); it != plans_.end()) found = it->second.get();
  }
  if (found == nullptr) {
    auto plan = std::make_unique<CachedPlan>();
    plan->data = std::string(data);
    plan->cubins_bytes = cubins.size();
    if (!ReadPlan(plan->data, cubins, &plan->plan, error)) return nullptr;
    std::unique_lock<std::shared_mutex> lock(plans_mutex_);
    std::string_view key = plan->data;
    found = plans_.emplace(key, std::move(plan)).first->second.get();
  }
  if (cubins.size() != found->cubins_bytes) {
    *error = "the cubins attribute has " + std::to_string(cubins.size()) + " bytes, the launch plan came with " +
             std::to_string(found->cubins_bytes);
    return nullptr;
  }
  return found;
}

bool PlanCache::LoadKernel(const Driver& driver, const Artefact& artefact, std::string_view cubins,
                           KernelRecord** record, std::string* error) {
  std::string digest = Key(artefact.sha256);
  *record = &kernels_[digest + artefact.entry];
  if ((*record)->kernel != nullptr) return true;
  auto library = libraries_.find(digest);
  if (library == libraries_.end()) {
    std::string_view image = cubins.substr(artefact.position, artefact.size);
    if (Sha256(image) != artefact.sha256) {
      *error = "kernel " + artefact.entry + ": the cubin is corrupt, it does not match its SHA-256";
      return false;
    }
    cuda::Library handle = nullptr;
    cuda::Result result = driver.library_load_data(&handle, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result != cuda::kSuccess) {
      *error = Failure(driver, artefact.entry, "cuLibraryLoadData", result);
      return false;
    }
    library = libraries_.emplace(digest, handle).first;
  }
  cuda::Result result = driver.library_get_kernel(&(*record)->kernel, library->second, artefact.entry.c_str());
  if (result != cuda::kSuccess) {
    (*record)->kernel = nullptr;
    *error = Failure(driver, artefact.entry, "cuLibraryGetKernel", result);
    return false;
  }
  return true;
}

const LoadedKernels* PlanCache::Load(const Driver& driver, CachedPlan* plan, std::string_view cubins,
                                     cuda::Context context, std::string* error) {
  std::lock_guard<std::mutex> lock(load_mutex_);
  if (const LoadedKernels* loaded = plan->FindLoaded(context)) return loaded;
  const std::vector<Artefact>& artefacts = plan->plan.artefacts;
  auto loaded = std::make_unique<LoadedKernels>();
  loaded->context = context;
  loaded->functions.resize(artefacts.size());
  cuda::Device device = 0;
  if (cuda::Result result = driver.ctx_get_device(&device); result != cuda::kSuccess) {
    *error = "cuCtxGetDevice failed: " + Describe(driver, result);
    return nullptr;
  }
  std::vector<KernelRecord*> records(artefacts.size());
  for (size_t i = 0; i < artefacts.size(); ++i) {
    if (!LoadKernel(driver, artefacts[i], cubins, &records[i], error)) return nullptr;
  }
  for (const auto& any_step : plan->plan.steps) {
    const auto* step = std::get_if<KernelStep>(&any_step);
    if (step == nullptr) continue;
    const std::string& entry = artefacts[step->artefact].entry;
    KernelRecord& record = *records[step->artefact];
    if (!CheckParameters(driver, *step, entry, record.kernel, error)) return nullptr;
    // Only ever raised: another plan may already launch this kernel with more.
    uint32_t& granted = record.shared_bytes[device];
    if (step->shared_bytes > granted) {
      cuda::Result result = driver.kernel_set_attribute(cuda::kAttributeMaxDynamicSharedBytes,
                                                        static_cast<int>(step->shared_bytes), record.kernel, device);
      if (result != cuda::kSuccess) {
        *error = Failure(driver, entry, "cuKernelSetAttribute (dynamic shared memory)", result);
        return nullptr;
      }
      granted = step->shared_bytes;
    }
    if (uint64_t{step->cluster[0]} * step->cluster[1] * step->cluster[2] > cuda::kPortableClusterSize) {
      cuda::Result result =
          driver.kernel_set_attribute(cuda::kAttributeNonPortableClusterAllowed, 1, record.kernel, device);
      if (result != cuda::kSuccess) {
        *error = Failure(driver, entry, "cuKernelSetAttribute (non-portable cluster size)", result);
        return nullptr;
      }
    }
  }
  // Makes the driver load the code into this context now; otherwise the first launch would, perhaps during a capture.
  for (size_t i = 0; i < artefacts.size(); ++i) {
    cuda::Result result = driver.kernel_get_function(&loaded->functions[i], records[i]->kernel);
    if (result != cuda::kSuccess) {
      *error = Failure(driver, artefacts[i].entry, "cuKernelGetFunction", result);
      return nullptr;
    }
  }
  loaded->next = plan->loaded.load(std::memory_order_relaxed);
  plan->loaded.store(loaded.get(), std::memory_order_release);
  return loaded.release();
}

PlanCache& GetPlanCache() {
  PlanCache* current = cache.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  auto created = std::make_unique<PlanCache>();
  if (cache.compare_exchange_strong(current, created.get(), std::memory_order_acq_rel)) return *created.release();
  return *current;
}

void ResetPlanCache() { delete cache.exchange(nullptr, std::memory_order_acq_rel); }

}  // namespace jax_fa4
