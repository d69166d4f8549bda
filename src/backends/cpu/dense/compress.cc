// Entries of compressed attention: a softmax over a few rows for every channel on its own, then a
// norm and a rotation of the row that comes out. An entry is computed by one thread, in the order
// of its rows, so its bits do not depend on how its tokens came.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/ring.h"
#include "backends/cpu/dense/rows.h"
#include "cadre/thread_pool.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

constexpr int64_t kChannels = 128;  // at a time

// One thread's memory: the entry, and the cosines and sines of its position.
size_t scratch_bytes(int64_t width) {
  return Workspace::padded(2 * static_cast<size_t>(width) * sizeof(float));
}

// Entry `entry` of one sequence.
class Entry {
 public:
  Entry(const CompressArgs& args, const SequenceSpan& sequence, int64_t entry)
      : args_(args),
        sequence_(sequence),
        first_(entry * args.rate()),
        width_(args.width()),
        series_(args.values.dim(1) / width_) {}

  void run(float* scratch) const {
    for (int64_t c = 0; c < width_; c += kChannels) {
      mix(c, std::min(kChannels, width_ - c), scratch + c);
    }
    norm_row(scratch, DType::kF32, args_.norm, args_.norm_eps, width_, scratch, DType::kF32);
    rotate(scratch, scratch + width_);
    const DType dtype = args_.entries.dtype();
    const int64_t row = sequence_.slot * args_.entries.dim(2) + first_ / args_.rate();
    store_floats(scratch, width_, dtype, at(args_.entries.mutable_data(), dtype, row * width_));
  }

 private:
  // Rows of the softmax count from `first_`; those below zero are the other series'.
  int64_t first_row() const { return series_ == 2 && first_ > 0 ? -args_.rate() : 0; }
  int64_t column(int64_t row, int64_t channel) const {
    return row < 0 ? channel : (series_ - 1) * width_ + channel;
  }
  const float* values(int64_t row, int64_t channel) const {
    const std::byte* found = row_at(first_ + row, args_.values, args_.value_ring, sequence_);
    return reinterpret_cast<const float*>(found) + column(row, channel);
  }
  // Gates with their bias, `count` channels.
  void load_gates(int64_t row, int64_t channel, int64_t count, float* gates) const {
    const TensorView& bias = args_.position_bias;
    const int64_t bias_row = row < 0 ? row + args_.rate() : row;
    load_floats(at(bias.data(), bias.dtype(), bias_row * bias.dim(1) + column(row, channel)),
                bias.dtype(), count, gates);
    const std::byte* found = row_at(first_ + row, args_.gates, args_.gate_ring, sequence_);
    const float* raw = reinterpret_cast<const float*>(found) + column(row, channel);
    for (int64_t c = 0; c < count; ++c) gates[c] += raw[c];
  }

  void mix(int64_t channel, int64_t count, float* out) const {
    std::array<float, kChannels> gates;
    std::array<float, kChannels> max;
    std::array<float, kChannels> sum{};
    max.fill(-std::numeric_limits<float>::infinity());
    for (int64_t row = first_row(); row < args_.rate(); ++row) {
      load_gates(row, channel, count, gates.data());
      for (size_t c = 0; c < static_cast<size_t>(count); ++c) max[c] = std::max(max[c], gates[c]);
    }
    std::fill_n(out, count, 0.0f);
    for (int64_t row = first_row(); row < args_.rate(); ++row) {
      load_gates(row, channel, count, gates.data());
      const float* values_of_row = values(row, channel);
      for (size_t c = 0; c < static_cast<size_t>(count); ++c) {
        const float weight = std::exp(gates[c] - max[c]);
        sum[c] += weight;
        out[c] += weight * values_of_row[c];
      }
    }
    for (size_t c = 0; c < static_cast<size_t>(count); ++c) out[c] /= sum[c];
  }

  void rotate(float* entry, float* angles) const {
    const int64_t half = args_.inverse_frequencies.dim(0);
    const float* inverse = args_.inverse_frequencies.as<float>();
    const auto position = static_cast<float>(first_);
    for (int64_t i = 0; i < half; ++i) {
      const float angle = position * inverse[i];
      angles[i] = std::cos(angle) * args_.rope_scale;
      angles[half + i] = std::sin(angle) * args_.rope_scale;
    }
    float* rotated = entry + width_ - 2 * half;
    rotate_head(rotated, DType::kF32, rotated, DType::kF32, half, angles, angles + half,
                RopePairs::kNeighbours);
  }

  const CompressArgs& args_;
  const SequenceSpan& sequence_;
  int64_t first_;  // token
  int64_t width_;
  int64_t series_;
};

}  // namespace

void CpuDenseOps::compress(const CompressArgs& args, Workspace& workspace, const Stream& stream) {
  const int64_t rate = args.rate();
  const int64_t width = args.width();
  const int64_t series = args.values.dim(1) / width;
  CADRE_ASSERT((series == 1 || series == 2) && args.values.dim(1) == series * width &&
               args.value_ring.dim(2) >= series * rate &&
               2 * args.inverse_frequencies.dim(0) <= width);
  const Workspace::Scope scope(workspace);
  const size_t stride = scratch_bytes(width);
  auto* memory = static_cast<std::byte*>(
      workspace.allocate(stride * static_cast<size_t>(stream.threads->num_threads())));
  for (const SequenceSpan& s : args.tokens.sequences) {
    const int64_t before = s.past / rate;
    const int64_t closed = (s.past + s.num_tokens) / rate - before;
    const int64_t cost = 40 * series * rate * width;
    for_row_ranges(stream, closed, cost, [&](int64_t begin, int64_t end, int thread) {
      auto* scratch = reinterpret_cast<float*>(memory + stride * static_cast<size_t>(thread));
      for (int64_t i = begin; i < end; ++i) Entry(args, s, before + i).run(scratch);
    });
  }
}

size_t CpuDenseOps::compress_workspace_bytes(int64_t width, int num_threads) const {
  return scratch_bytes(width) * static_cast<size_t>(num_threads);
}

}  // namespace cadre::cpu
