// The bounds of what the experts interface takes, in one place for all backends.
#pragma once

#include <cstdint>

namespace cadre {

/// Far above any model; keeps a hostile config from asking for huge tables.
inline constexpr int64_t kMaxExperts = int64_t{1} << 20;

/// Of hidden_size and intermediate_size: products of two sizes then fit easily in 64 bits.
inline constexpr int64_t kMaxExpertSize = int64_t{1} << 28;

}  // namespace cadre
