// A cache as DecoderModel makes it.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "cadre/error.h"
#include "cadre/model.h"
#include "core/str_cat.h"
#include "layers/kv_store.h"
#include "models/image_inputs.h"

namespace cadre {

class DecoderCache final : public KvCache {
 public:
  /// `total`: bytes of all caches of a model, which tells whose this is.
  DecoderCache(std::shared_ptr<std::atomic<size_t>> total, const KvShape& shape, Device device)
      : total_(std::move(total)),
        store_(shape, device),
        shifts_(static_cast<size_t>(shape.num_sequences)) {
    *total_ += store_.bytes();
  }
  ~DecoderCache() override { *total_ -= store_.bytes(); }

  int64_t num_sequences() const override { return store_.shape().num_sequences; }
  int64_t max_tokens() const override { return store_.shape().max_tokens; }
  int64_t length(int64_t sequence) const override {
    check_sequence(sequence);
    return store_.length(sequence);
  }
  size_t bytes() const override { return store_.bytes(); }
  void truncate(int64_t sequence, int64_t length) override {
    check_sequence(sequence);
    if (length < 0 || length > store_.length(sequence)) {
      throw InvalidArgument(str_cat("KvCache::truncate: sequence ", sequence, " has ",
                                    store_.length(sequence), " tokens, cannot cut it to ", length));
    }
    if (!store_.can_resume(sequence, length)) {
      throw Unsupported(str_cat(
          "KvCache::truncate: sequence ", sequence, " has ", store_.length(sequence),
          " tokens, and some layers keep no more of it than the latest: it cannot be cut to ",
          length, "; cut it to 0 and run its tokens again"));
    }
    store_.set_length(sequence, length);
    shifts_[static_cast<size_t>(sequence)].truncate(length);
  }

  /// By the shared counter: the address of a model that is gone may be another model's by now.
  bool counts_in(const std::shared_ptr<std::atomic<size_t>>& total) const {
    return total_ == total;
  }
  KvStore& store() { return store_; }
  const KvStore& store() const { return store_; }
  std::span<RopeShift> shifts() { return shifts_; }
  std::span<const RopeShift> shifts() const { return shifts_; }
  /// Ends with the cache, whatever takes its address then.
  std::shared_ptr<const void> life() const { return life_; }

 private:
  void check_sequence(int64_t sequence) const {
    if (sequence < 0 || sequence >= num_sequences()) {
      throw InvalidArgument(
          str_cat("KvCache: sequence ", sequence, " is outside [0, ", num_sequences(), ")"));
    }
  }

  std::shared_ptr<std::atomic<size_t>> total_;
  std::shared_ptr<const int> life_ = std::make_shared<const int>(0);
  KvStore store_;
  std::vector<RopeShift> shifts_;  // [num_sequences]
};

}  // namespace cadre
