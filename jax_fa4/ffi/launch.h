// Carries out a plan on a stream.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "driver.h"
#include "plan_cache.h"

namespace jax_fa4 {

struct BufferView {
  void* data;
  size_t bytes;
};

// Loads the plan's kernels into the stream's context if they are not there yet. Refuses while the stream is captured.
// Returns null and sets `error` on failure.
const LoadedKernels* EnsureLoaded(const Driver& driver, CachedPlan* plan, std::string_view cubins, cuda::Stream stream,
                                  std::string* error);

// Enqueues all steps. False and `error` on failure; steps before the failing one are then in the stream.
bool Launch(const Driver& driver, const Plan& plan, const LoadedKernels& kernels,
            const std::vector<BufferView>& buffers, cuda::Stream stream, std::string* error);

// Makes a context current for its lifetime, at no cost if it already is.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, cuda::Context context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  cuda::Result result() const { return result_; }

 private:
  const Driver& driver_;
  bool pushed_ = false;
  cuda::Result result_;
};

}  // namespace jax_fa4
