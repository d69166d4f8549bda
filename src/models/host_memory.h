// How much memory this process may still take.
#pragma once

#include <cstddef>
#include <optional>

namespace cadre {

/// The kernel's estimate, capped by the cgroup's limit; empty when neither is known.
std::optional<size_t> available_host_memory();

}  // namespace cadre
