// A cache as DecoderModel makes it.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "cadre/error.h"
#include "cadre/model.h"
#include "core/str_cat.h"
#include "layers/kv_store.h"

namespace cadre {

class DecoderCache final : public KvCache {
 public:
  /// `total`: bytes of all caches of a model, which tells whose this is.
  DecoderCache(std::shared_ptr<std::atomic<size_t>> total, const KvShape& shape, Device device)
      : total_(std::move(total)), store_(shape, device) {
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
    store_.set_length(sequence, length);
  }

  /// By the shared counter: the address of a model that is gone may be another model's by now.
  bool counts_in(const std::shared_ptr<std::atomic<size_t>>& total) const {
    return total_ == total;
  }
  KvStore& store() { return store_; }
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
};

}  // namespace cadre
