// LaunchPlan as the C++ side sees it; the byte format is documented in wire.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "sha256.h"

namespace jax_fa4 {

struct TensorMapParameter {
  uint16_t buffer;
  uint8_t dtype, rank, swizzle, l2_promotion;
  uint64_t offset;
  uint64_t dims[5];
  uint64_t strides[4];
  uint32_t box[5];
};

struct TensorParameter {
  uint16_t buffer;
  uint64_t offset;
};

struct ScalarsParameter {};

struct Parameter {
  std::variant<TensorMapParameter, TensorParameter, ScalarsParameter> kind;
  // Where the parameter's bytes start in KernelStep::bytes, and how many the plan supplies. The kernel may declare up
  // to `padded_size`.
  size_t position, size, padded_size;
};

struct KernelStep {
  uint16_t artefact;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t shared_bytes;
  std::vector<Parameter> parameters;
  // All parameters' bytes, each on its own aligned boundary; pointers and tensor maps are filled in at each launch.
  std::vector<uint8_t> bytes;

  bool empty() const { return grid[0] == 0 || grid[1] == 0 || grid[2] == 0; }
};

struct FillStep {
  uint16_t buffer;
  uint64_t offset, size;
  uint32_t pattern;
};

struct Artefact {
  Digest sha256;
  uint64_t position, size;  // bytes within the cubins attribute
  std::string entry;
};

struct Plan {
  std::vector<uint64_t> buffer_bytes;
  std::vector<Artefact> artefacts;
  std::vector<std::variant<KernelStep, FillStep>> steps;
};

inline constexpr size_t kParameterAlignment = 128;  // of CUtensorMap in the newest cuda.h; 64 in older ones

// First eight bytes of the digest in a plan's header: cheap to get, and enough to find the plan in a table. Zero for
// anything too short to be a plan.
uint64_t PlanKey(std::string_view data);

// Reads and checks a plan: version, digest, truncation, indices, extents within buffers. Checks each cubin's presence
// and SHA-256. On failure returns false and says why in `error`.
bool ReadPlan(std::string_view data, std::string_view cubins, Plan* plan, std::string* error);

}  // namespace jax_fa4
