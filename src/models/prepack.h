// Packing the experts of a model when it is loaded.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "cadre/model.h"
#include "cadre/thread_pool.h"
#include "io/checkpoint.h"
#include "layers/experts_group.h"

namespace cadre {

/// What prepack_experts() calls its progress, which counts experts.
inline constexpr std::string_view kPackingExperts = "packing experts";

/// Throws DeviceError saying how much the packed form needs, beside one expert of the checkpoint,
/// when that is more than `available`. Empty: unknown, and enough.
void require_memory_to_prepack(std::span<const std::unique_ptr<ExpertsGroup>> groups,
                               std::optional<size_t> available);

/// Packs every layer of the groups, expert by expert; what the checkpoint holds in memory of an
/// expert that is packed is given back at once. Tells `progress` of every expert.
void prepack_experts(std::span<const std::unique_ptr<ExpertsGroup>> groups,
                     const Checkpoint& checkpoint, ThreadPool& threads,
                     const ProgressCallback& progress);

}  // namespace cadre
