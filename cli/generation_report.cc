#include "generation_report.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/device_runtime.h"
#include "core/str_cat.h"
#include "session.h"

namespace cadre::cli {

namespace {

double per_second(int64_t count, double seconds) {
  return seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

/// Prompt tokens that the model ran.
int64_t prefilled(const GenerationResult& result) {
  return result.prompt_tokens - result.reused_tokens;
}

bool on_cpu(Device device) { return device.type == DeviceType::kCpu; }

std::string device_text(Device device) {
  if (on_cpu(device)) return str_cat("cpu:     ", cpu_instruction_set());
  return str_cat("gpu:     ", device_runtime(device).properties(device.index).name, " (",
                 to_string(device), ")");
}

}  // namespace

std::string_view end_of(const GenerationResult& result, size_t sequence, int64_t max_new_tokens) {
  switch (result.finish_reasons[sequence]) {
    case FinishReason::kEos:
      return "eos";
    case FinishReason::kLength:
      return static_cast<int64_t>(result.token_ids[sequence].size()) < max_new_tokens ? "context"
                                                                                      : "length";
    case FinishReason::kStopped:
      break;
  }
  return "stopped";
}

Json stats_json(const GenerationResult& result, const RunMemory& used) {
  const MemoryReport& memory = used.memory;
  return {{"prompt_tokens", result.prompt_tokens},
          {"reused_tokens", result.reused_tokens},
          {"decode_tokens", result.decode_tokens},
          {"prefill_seconds", result.prefill_seconds},
          {"decode_seconds", result.decode_seconds},
          {"prefill_tokens_per_second", per_second(prefilled(result), result.prefill_seconds)},
          {"decode_tokens_per_second", per_second(result.decode_tokens, result.decode_seconds)},
          {"prefill_experts", result.prefill_experts},
          {"decode_experts", result.decode_experts},
          {"device", to_string(used.device)},
          {"cpu_isa", cpu_instruction_set()},
          {"mapped_bytes", memory.mapped_bytes},
          {"weights_bytes", memory.weights_bytes},
          {"added_bytes", memory.added_bytes},
          {"workspace_bytes", memory.workspace_bytes},
          {"kv_cache_bytes", memory.kv_cache_bytes}};
}

std::string stats_text(const GenerationResult& result, const RunMemory& used) {
  const MemoryReport& memory = used.memory;
  const auto stage = [](int64_t tokens, double seconds, const std::string& experts) {
    char text[160];
    std::snprintf(text, sizeof text, "%lld tokens in %.3f s, %.1f tokens/s, experts: %s",
                  static_cast<long long>(tokens), seconds, per_second(tokens, seconds),
                  experts.c_str());
    return std::string(text);
  };
  return str_cat(
      "prefill: ", stage(prefilled(result), result.prefill_seconds, result.prefill_experts),
      "\ndecode:  ", stage(result.decode_tokens, result.decode_seconds, result.decode_experts),
      "\n", device_text(used.device), "\nmemory:  ",
      on_cpu(used.device) ? "mapped " + format_bytes(memory.mapped_bytes)
                          : "weights " + format_bytes(memory.weights_bytes),
      ", added ", format_bytes(memory.added_bytes), ", workspace ",
      format_bytes(memory.workspace_bytes), ", KV cache ", format_bytes(memory.kv_cache_bytes));
}

}  // namespace cadre::cli
