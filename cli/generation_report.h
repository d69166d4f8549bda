// What the commands that generate tell about a run: rates, backends, memory, and why it ended.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cadre/generation.h"
#include "io/json.h"

namespace cadre::cli {

/// What a run used, next to what the library returned of it.
struct RunMemory {
  MemoryReport memory;
  Device device;
};

/// "eos", "length", "context" (full before max_new_tokens were there) or "stopped".
std::string_view end_of(const GenerationResult& result, size_t sequence, int64_t max_new_tokens);

Json stats_json(const GenerationResult& result, const RunMemory& used);
std::string stats_text(const GenerationResult& result, const RunMemory& used);

}  // namespace cadre::cli
