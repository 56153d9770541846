// The XLA FFI handler that carries out launch plans, one function per stage.
//
// Attributes of the custom call: `plan` (see wire.py) and `cubins` (the plan's cubins one after the other). Operands and
// results may be of any number and type; the plan says how many bytes each must have.

#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "driver.h"
#include "launch.h"
#include "plan_cache.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jax_fa4 {
namespace {

ffi::Error Failed(ffi::ErrorCode code, const Plan* plan, const std::string& error) {
  std::string message = "jax_fa4: ";
  // Errors that concern no kernel in particular name the first one, so that the call can be recognised.
  if (plan != nullptr && !plan->artefacts.empty() && error.rfind("kernel ", 0) != 0) {
    message += "kernel " + plan->artefacts[0].entry + ": ";
  }
  return ffi::Error(code, message + error);
}

// Reads the plan once per call site, when the executable is built. No driver is needed: compiling for another machine
// must work.
ffi::Error Instantiate(std::string_view plan_bytes, std::string_view cubins) {
  std::string error;
  if (GetPlanCache().Find(plan_bytes, cubins, &error) == nullptr) {
    return Failed(ffi::ErrorCode::kInvalidArgument, nullptr, error);
  }
  return ffi::Error::Success();
}

struct Ready {
  const Driver* driver;
  const Plan* plan;
  const LoadedKernels* kernels;
};

ffi::Error GetReady(cuda::Stream stream, std::string_view plan_bytes, std::string_view cubins, Ready* ready) {
  std::string error;
  CachedPlan* plan = GetPlanCache().Find(plan_bytes, cubins, &error);
  if (plan == nullptr) return Failed(ffi::ErrorCode::kInvalidArgument, nullptr, error);
  const Driver* driver = GetDriver(&error);
  if (driver == nullptr) return Failed(ffi::ErrorCode::kFailedPrecondition, &plan->plan, error);
  const LoadedKernels* kernels = EnsureLoaded(*driver, plan, cubins, stream, &error);
  if (kernels == nullptr) return Failed(ffi::ErrorCode::kInternal, &plan->plan, error);
  *ready = {driver, &plan->plan, kernels};
  return ffi::Error::Success();
}

// Runs before each execution, outside of any graph capture: the place to load modules.
ffi::Error Initialize(cuda::Stream stream, std::string_view plan_bytes, std::string_view cubins, ffi::RemainingArgs,
                      ffi::RemainingRets) {
  Ready ready;
  return GetReady(stream, plan_bytes, cubins, &ready);
}

ffi::Error Execute(cuda::Stream stream, std::string_view plan_bytes, std::string_view cubins, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  Ready ready;
  if (ffi::Error error = GetReady(stream, plan_bytes, cubins, &ready); error.failure()) return error;
  std::vector<BufferView> buffers;
  buffers.reserve(args.size() + rets.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    buffers.push_back({buffer->untyped_data(), buffer->size_bytes()});
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return buffer.error();
    buffers.push_back({(*buffer)->untyped_data(), (*buffer)->size_bytes()});
  }
  std::string error;
  if (!Launch(*ready.driver, *ready.plan, *ready.kernels, buffers, stream, &error)) {
    return Failed(ffi::ErrorCode::kInternal, ready.plan, error);
  }
  return ffi::Error::Success();
}

// The same on XLA's CPU client, whose buffers are host memory: for tests that install a recording driver.
ffi::Error ExecuteOnHost(std::string_view plan_bytes, std::string_view cubins, ffi::RemainingArgs args,
                         ffi::RemainingRets rets) {
  if (!DriverIsInstalled()) {
    return Failed(ffi::ErrorCode::kFailedPrecondition, nullptr, "kernels cannot run on the CPU");
  }
  return Execute(nullptr, plan_bytes, cubins, args, rets);
}

auto AttributeBinding(ffi::Binding<ffi::ExecutionStage::kInstantiate> binding) {
  return std::move(binding).Attr<std::string_view>("plan").Attr<std::string_view>("cubins");
}

}  // namespace
}  // namespace jax_fa4

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFa4Instantiate, jax_fa4::Instantiate,
                              jax_fa4::AttributeBinding(ffi::Ffi::BindInstantiate()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFa4Initialize, jax_fa4::Initialize,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                                  .Ctx<ffi::PlatformStream<jax_fa4::cuda::Stream>>()
                                  .Attr<std::string_view>("plan")
                                  .Attr<std::string_view>("cubins")
                                  .RemainingArgs()
                                  .RemainingRets());

// The operations depend on the attributes alone, so they may be captured once and replayed.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFa4Execute, jax_fa4::Execute,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kExecute>()
                                  .Ctx<ffi::PlatformStream<jax_fa4::cuda::Stream>>()
                                  .Attr<std::string_view>("plan")
                                  .Attr<std::string_view>("cubins")
                                  .RemainingArgs()
                                  .RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFa4ExecuteOnHost, jax_fa4::ExecuteOnHost,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kExecute>()
                                  .Attr<std::string_view>("plan")
                                  .Attr<std::string_view>("cubins")
                                  .RemainingArgs()
                                  .RemainingRets());

// Version of the plan format that this library reads (wire.py).
extern "C" int jax_fa4_wire_version() { return 1; }

// Writes why the CUDA driver cannot be used into `text` (at most `size` bytes with the terminator) and returns 0, or
// returns 1 if it can.
extern "C" int jax_fa4_driver_status(char* text, size_t size) {
  std::string error;
  bool usable = jax_fa4::GetDriver(&error) != nullptr;
  if (text != nullptr && size != 0) {
    size_t length = error.size() < size ? error.size() : size - 1;
    std::memcpy(text, error.data(), length);
    text[length] = '\0';
  }
  return usable ? 1 : 0;
}

// For tests: `table` is a jax_fa4::Driver (see driver.h), or null to return to libcuda. No launch may be in flight.
extern "C" void jax_fa4_install_driver(const void* table) {
  jax_fa4::InstallDriver(static_cast<const jax_fa4::Driver*>(table));
  jax_fa4::ResetPlanCache();
}
