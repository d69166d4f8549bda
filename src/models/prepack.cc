#include "models/prepack.h"

#include <algorithm>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

size_t expert_bytes(const ExpertsQuery& query) {
  ExpertsConfig one = query.config;
  one.num_experts = one.top_k = 1;
  return prepacked_bytes(one, query.format);
}

void release(const Checkpoint& checkpoint, const ExpertMatrix& matrix, int64_t rows, int64_t cols,
             StorageFormat format) {
  if (format == StorageFormat::kFp4) {  // rows of bytes
    return checkpoint.release(
        matrix.data, static_cast<size_t>((rows - 1) * matrix.row_stride + row_bytes(format, cols)));
  }
  const int64_t last = (rows - 1) * matrix.row_stride + (cols - 1) * matrix.col_stride;
  checkpoint.release(matrix.data, static_cast<size_t>((last + 1) * row_bytes(format, 1)));
}

void release_expert(const Checkpoint& checkpoint, const ExpertsConfig& config,
                    const ExpertsWeights& weights, int64_t expert) {
  const auto e = static_cast<size_t>(expert);
  const StorageFormat format = weights.format;
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  if (config.has_gate) release(checkpoint, weights.gate[e], inner, hidden, format);
  release(checkpoint, weights.up[e], inner, hidden, format);
  release(checkpoint, weights.down[e], hidden, inner, format);
}

}  // namespace

void require_memory_to_prepack(std::span<const std::unique_ptr<ExpertsGroup>> groups,
                               std::optional<size_t> available) {
  size_t packed = 0;
  size_t expert = 0;
  for (const auto& group : groups) {
    const ExpertsQuery& query = group->query();
    packed +=
        prepacked_bytes(query.config, query.format) * static_cast<size_t>(group->num_layers());
    expert = std::max(expert, expert_bytes(query));
  }
  if (!available || packed + expert <= *available) return;
  throw DeviceError(str_cat("prepack: on: the packed experts need ", format_bytes(packed),
                            " of memory, and ", format_bytes(expert), " more while one is packed; ",
                            format_bytes(*available),
                            " is available; use off, which reads the checkpoint where it lies, "
                            "or a machine with more memory"));
}

void prepack_experts(std::span<const std::unique_ptr<ExpertsGroup>> groups,
                     const Checkpoint& checkpoint, ThreadPool& threads,
                     const ProgressCallback& progress) {
  int64_t done = 0;
  int64_t total = 0;
  for (const auto& group : groups) total += group->num_layers() * group->query().config.num_experts;
  for (const auto& group : groups) {
    const ExpertsConfig& config = group->query().config;
    for (int64_t layer = 0; layer < group->num_layers(); ++layer) {
      auto weights = std::make_shared<ExpertsWeights>(*group->weights(layer));
      prepack(config, *weights, threads, [&](int64_t expert) {
        release_expert(checkpoint, config, *weights, expert);
        ++done;
        if (progress) progress(kPackingExperts, done, total);
      });
      group->replace_layer(layer, std::move(weights));
    }
  }
}

}  // namespace cadre
