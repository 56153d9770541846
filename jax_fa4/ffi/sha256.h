// SHA-256 (FIPS 180-4), to recognise damaged plans and cubins.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace jax_fa4 {

using Digest = std::array<uint8_t, 32>;

Digest Sha256(std::string_view data);

}  // namespace jax_fa4
