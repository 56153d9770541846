#include "driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace jax_fa4 {
namespace {

std::atomic<const Driver*> installed{nullptr};
std::atomic<const Driver*> loaded{nullptr};

bool Load(Driver* driver, std::string* error) {
  void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    *error = std::string("dlopen failed: ") + (reason != nullptr ? reason : "no reason given") +
             " (the NVIDIA driver is not installed or not visible here)";
    return false;
  }
#define JAX_FA4_FIND(member, symbol, parameters) \
  driver->member = reinterpret_cast<cuda::Result(*) parameters>(dlsym(handle, symbol));
#define JAX_FA4_REQUIRE(member, symbol, parameters)                                                       \
  JAX_FA4_FIND(member, symbol, parameters)                                                                \
  if (driver->member == nullptr) {                                                                        \
    *error = "libcuda.so.1 has no " symbol ": the NVIDIA driver is too old, CUDA 12.0 or later is needed"; \
    dlclose(handle);                                                                                      \
    return false;                                                                                         \
  }
  JAX_FA4_DRIVER_REQUIRED(JAX_FA4_REQUIRE)
  JAX_FA4_DRIVER_OPTIONAL(JAX_FA4_FIND)
#undef JAX_FA4_REQUIRE
#undef JAX_FA4_FIND
  // The library stays open for the life of the process: others in it use the same one.
  return true;
}

bool Initialise(const Driver* driver, std::string* error) {
  cuda::Result result = driver->init(0);
  if (result != cuda::kSuccess) *error = "cuInit failed: " + Describe(*driver, result);
  return result == cuda::kSuccess;
}

}  // namespace

const Driver* GetDriver(std::string* error) {
  if (const Driver* driver = installed.load(std::memory_order_acquire)) return Initialise(driver, error) ? driver : nullptr;
  if (const Driver* driver = loaded.load(std::memory_order_acquire)) return driver;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (const Driver* driver = loaded.load(std::memory_order_acquire)) return driver;
  static Driver driver;
  if (!Load(&driver, error)) return nullptr;
  if (!Initialise(&driver, error)) return nullptr;
  loaded.store(&driver, std::memory_order_release);
  return &driver;
}

std::string Describe(const Driver& driver, cuda::Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.get_error_name(result, &name) != cuda::kSuccess || name == nullptr) name = "unknown error";
  if (driver.get_error_string(result, &text) != cuda::kSuccess || text == nullptr) text = "no description";
  return std::string(name) + " (" + std::to_string(result) + "): " + text;
}

void InstallDriver(const Driver* driver) { installed.store(driver, std::memory_order_release); }

bool DriverIsInstalled() { return installed.load(std::memory_order_acquire) != nullptr; }

}  // namespace jax_fa4
