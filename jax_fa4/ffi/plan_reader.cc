#include "plan_reader.h"

#include <cstring>
#include <map>

namespace jax_fa4 {
namespace {

constexpr std::string_view kMagic = "JFA4";
constexpr uint16_t kVersion = 1;
constexpr size_t kDigestPosition = 8;
constexpr size_t kHeaderBytes = kDigestPosition + sizeof(Digest);
constexpr size_t kTensorMapBytes = 128;
constexpr uint8_t kStepKernel = 1, kStepFill = 2;
constexpr uint8_t kTagTensorMap = 1, kTagTensor = 2, kTagScalars = 3;

// Sequential little-endian reader. After the first read past the end every read gives zero and ok() is false.
class Reader {
 public:
  explicit Reader(std::string_view data) : data_(data) {}

  bool ok() const { return ok_; }
  bool at_end() const { return data_.empty(); }

  std::string_view Raw(size_t size) {
    if (size > data_.size()) {
      ok_ = false;
      data_ = {};
      return {};
    }
    std::string_view result = data_.substr(0, size);
    data_.remove_prefix(size);
    return result;
  }

  template <typename T>
  T Take() {
    std::string_view raw = Raw(sizeof(T));
    T value = 0;
    for (size_t i = 0; i < raw.size(); ++i) value |= static_cast<T>(static_cast<T>(static_cast<uint8_t>(raw[i])) << (8 * i));
    return value;
  }

  template <typename T>
  void TakeInto(T* values, size_t count) {
    for (size_t i = 0; i < count; ++i) values[i] = Take<T>();
  }

  std::string_view Sized() { return Raw(Take<uint16_t>()); }

 private:
  std::string_view data_;
  bool ok_ = true;
};

size_t RoundUp(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool ElementBytes(uint8_t dtype, uint64_t* bytes) {
  switch (dtype) {
    case 3:  // CU_TENSOR_MAP_DATA_TYPE_INT32
    case 7:  // FLOAT32
      *bytes = 4;
      return true;
    case 6:  // FLOAT16
    case 9:  // BFLOAT16
      *bytes = 2;
      return true;
    default:
      return false;
  }
}

// True if [offset, offset + size) lies in the buffer. Guards the device's memory even if the Python side erred.
bool Inside(const Plan& plan, uint16_t buffer, uint64_t offset, uint64_t size, std::string* error) {
  if (buffer >= plan.buffer_bytes.size()) {
    *error = "buffer " + std::to_string(buffer) + " does not exist, the plan has " +
             std::to_string(plan.buffer_bytes.size());
    return false;
  }
  uint64_t bytes = plan.buffer_bytes[buffer];
  if (offset > bytes || size > bytes - offset) {
    *error = "offset " + std::to_string(offset) + " and size " + std::to_string(size) + " exceed buffer " +
             std::to_string(buffer) + " of " + std::to_string(bytes) + " bytes";
    return false;
  }
  return true;
}

bool ReadTensorMap(Reader& reader, const Plan& plan, TensorMapParameter* map, std::string* error) {
  *map = {};
  map->buffer = reader.Take<uint16_t>();
  map->dtype = reader.Take<uint8_t>();
  map->rank = reader.Take<uint8_t>();
  map->swizzle = reader.Take<uint8_t>();
  map->l2_promotion = reader.Take<uint8_t>();
  map->offset = reader.Take<uint64_t>();
  uint64_t extent = 0;
  if (map->rank < 1 || map->rank > 5 || !ElementBytes(map->dtype, &extent)) {
    *error = "tensor map has rank " + std::to_string(map->rank) + " and data type " + std::to_string(map->dtype);
    return false;
  }
  reader.TakeInto(map->dims, map->rank);
  reader.TakeInto(map->strides, map->rank - 1);
  reader.TakeInto(map->box, map->rank);
  extent *= map->dims[0];
  for (int i = 1; i < map->rank; ++i) {
    if (map->dims[i] == 0 || map->dims[i] > (uint64_t{1} << 32) || map->strides[i - 1] >= (uint64_t{1} << 40)) {
      *error = "tensor map has dimension " + std::to_string(map->dims[i]) + " with stride " +
               std::to_string(map->strides[i - 1]);
      return false;
    }
    uint64_t span = 0;
    if (__builtin_mul_overflow(map->dims[i] - 1, map->strides[i - 1], &span) ||
        __builtin_add_overflow(extent, span, &extent)) {
      *error = "tensor map extent overflows";
      return false;
    }
  }
  return Inside(plan, map->buffer, map->offset, extent, error);
}

bool ReadParameter(Reader& reader, const Plan& plan, KernelStep* step, std::string* error) {
  Parameter parameter{ScalarsParameter{}, RoundUp(step->bytes.size(), kParameterAlignment), 0, 0};
  std::string_view payload;
  size_t prefix = 0, alignment = 8;
  uint8_t tag = reader.Take<uint8_t>();
  if (tag == kTagTensorMap) {
    TensorMapParameter map;
    if (!ReadTensorMap(reader, plan, &map, error)) return false;
    parameter.kind = map;
    prefix = kTensorMapBytes;
  } else if (tag == kTagTensor) {
    TensorParameter tensor{reader.Take<uint16_t>(), reader.Take<uint64_t>()};
    if (!Inside(plan, tensor.buffer, tensor.offset, 0, error)) return false;
    reader.Take<uint8_t>();  // int_bits and format serve the Python reader only
    reader.Sized();
    payload = reader.Sized();
    parameter.kind = tensor;
    prefix = 8;
  } else if (tag == kTagScalars) {
    reader.Sized();
    payload = reader.Sized();
  } else {
    *error = "unknown parameter tag " + std::to_string(tag);
    return false;
  }
  parameter.size = prefix + payload.size();
  parameter.padded_size = RoundUp(parameter.size, alignment);
  step->bytes.resize(parameter.position + RoundUp(parameter.size, kParameterAlignment));
  if (!payload.empty()) std::memcpy(step->bytes.data() + parameter.position + prefix, payload.data(), payload.size());
  step->parameters.push_back(parameter);
  return true;
}

bool ReadKernel(Reader& reader, const Plan& plan, KernelStep* step, std::string* error) {
  step->artefact = reader.Take<uint16_t>();
  reader.TakeInto(step->grid, 3);
  reader.TakeInto(step->block, 3);
  reader.TakeInto(step->cluster, 3);
  step->shared_bytes = reader.Take<uint32_t>();
  uint16_t count = reader.Take<uint16_t>();
  if (step->artefact >= plan.artefacts.size()) {
    *error = "artefact " + std::to_string(step->artefact) + " does not exist";
    return false;
  }
  const std::string& entry = plan.artefacts[step->artefact].entry;
  for (uint16_t i = 0; i < count; ++i) {
    if (!ReadParameter(reader, plan, step, error)) {
      *error = "kernel " + entry + ", parameter " + std::to_string(i) + ": " + *error;
      return false;
    }
  }
  return true;
}

bool ReadArtefacts(Reader& reader, std::string_view cubins, Plan* plan, std::string* error) {
  uint16_t count = reader.Take<uint16_t>();
  std::map<Digest, uint64_t> positions;
  uint64_t end = 0;
  for (uint16_t i = 0; i < count && reader.ok(); ++i) {
    Artefact artefact{};
    std::string_view digest = reader.Raw(sizeof(Digest));
    if (!digest.empty()) std::memcpy(artefact.sha256.data(), digest.data(), sizeof(Digest));
    artefact.size = reader.Take<uint64_t>();
    artefact.entry = std::string(reader.Sized());
    auto [position, added] = positions.emplace(artefact.sha256, end);
    artefact.position = position->second;
    if (artefact.position > cubins.size() || artefact.size > cubins.size() - artefact.position) {
      *error = "kernel " + artefact.entry + ": the cubins attribute has " + std::to_string(cubins.size()) +
               " bytes and ends before this kernel's cubin does";
      return false;
    }
    if (added) {
      end += artefact.size;
      if (Sha256(cubins.substr(artefact.position, artefact.size)) != artefact.sha256) {
        *error = "kernel " + artefact.entry + ": the cubin is corrupt, it does not match its SHA-256";
        return false;
      }
    }
    plan->artefacts.push_back(std::move(artefact));
  }
  return true;
}

}  // namespace

uint64_t PlanKey(std::string_view data) {
  return data.size() < kHeaderBytes ? 0 : Reader(data.substr(kDigestPosition)).Take<uint64_t>();
}

bool ReadPlan(std::string_view data, std::string_view cubins, Plan* plan, std::string* error) {
  if (data.size() < kHeaderBytes || data.substr(0, kMagic.size()) != kMagic) {
    *error = "the plan attribute is no launch plan (" + std::to_string(data.size()) + " bytes, wrong magic or too short)";
    return false;
  }
  Reader header(data.substr(kMagic.size()));
  if (uint16_t version = header.Take<uint16_t>(); version != kVersion) {
    *error = "the launch plan has format version " + std::to_string(version) + ", this library reads version " +
             std::to_string(kVersion) + ": the Python package and its native library are of different versions";
    return false;
  }
  std::string_view body = data.substr(kHeaderBytes);
  Digest digest = Sha256(body);
  if (std::memcmp(digest.data(), data.data() + kDigestPosition, sizeof(Digest)) != 0) {
    *error = "the launch plan is corrupt, it does not match its SHA-256";
    return false;
  }
  Reader reader(body);
  uint16_t buffers = reader.Take<uint16_t>();
  plan->buffer_bytes.resize(buffers);
  reader.TakeInto(plan->buffer_bytes.data(), buffers);
  if (!ReadArtefacts(reader, cubins, plan, error)) return false;
  uint32_t steps = reader.Take<uint32_t>();
  for (uint32_t i = 0; i < steps && reader.ok(); ++i) {
    uint8_t tag = reader.Take<uint8_t>();
    if (tag == kStepKernel) {
      KernelStep step{};
      if (!ReadKernel(reader, *plan, &step, error)) return false;
      plan->steps.emplace_back(std::move(step));
    } else if (tag == kStepFill) {
      FillStep step{reader.Take<uint16_t>(), reader.Take<uint64_t>(), reader.Take<uint64_t>(), reader.Take<uint32_t>()};
      if (!Inside(*plan, step.buffer, step.offset, step.size, error)) return false;
      plan->steps.emplace_back(step);
    } else {
      *error = "unknown step tag " + std::to_string(tag);
      return false;
    }
  }
  if (!reader.ok() || !reader.at_end()) {
    *error = "the launch plan is truncated or has trailing bytes";
    return false;
  }
  return true;
}

}  // namespace jax_fa4
