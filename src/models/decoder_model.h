// The Model of every decoder-only family: one decoder, its groups of experts, and the memory that
// forwards take.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "cadre/model.h"
#include "cadre/thread_pool.h"
#include "cadre/workspace.h"
#include "layers/decoder.h"
#include "models/decoder_cache.h"
#include "models/image_inputs.h"
#include "models/model_builder.h"
#include "models/step_ahead.h"
#include "models/step_graphs.h"
#include "models/step_outputs.h"

namespace cadre {

/// Where a model's weights lie, and what keeps them there.
struct WeightMemory {
  size_t mapped_bytes = 0;  // of files read in place
  size_t copied_bytes = 0;
  std::shared_ptr<const void> files;
  std::shared_ptr<const void> copies;
};

class DecoderModel final : public Model {
 public:
  /// Largest piece that a forward is cut into: beyond it, a longer piece reads weights hardly less
  /// often per token, and only the workspace grows.
  static constexpr int64_t kMaxStepTokens = 2048;
  static constexpr int64_t kMaxStepTokensOfGpu = 16384;  // fills its multiprocessors
  /// Piece of a forward that nobody reserved for.
  static constexpr int64_t kDefaultStepTokens = 512;
  static constexpr int64_t kDefaultStepTokensOfGpu = 4096;

  DecoderModel(ModelInfo info, BuiltModel model, WeightMemory weights, int num_threads);
  ~DecoderModel() override;

  const ModelInfo& info() const override { return info_; }
  MemoryReport memory() const override;
  std::unique_ptr<KvCache> new_cache(int64_t num_sequences, int64_t max_tokens) override;
  void reserve(int64_t max_tokens) override;
  void forward(const ForwardInput& input, KvCache& cache, MutableTensorView logits,
               const MoeHooks* hooks) override;
  bool can_sample() const override { return info_.device.type != DeviceType::kCpu; }
  void forward_and_sample(const ForwardInput& input, KvCache& cache, const SampleRequest& request,
                          std::span<TokenId> next) override;
  ExpertsImplementation get_experts_implementation() const override;
  void set_experts_implementation(const ExpertsImplementation& map) override;
  void set_experts_implementation(std::string_view name) override;
  ExpertsImplementation experts_of_step(int64_t num_tokens) const override;
  ExpertsQuery experts_query(std::string_view sub_config) const override;

  const Decoder& decoder() const { return decoder_; }

  /// Packs all experts. Throws DeviceError, before it begins, when memory does not suffice. Only
  /// before the first choice.
  void prepack(const Checkpoint& checkpoint, const ProgressCallback& progress);
  /// The first choice, for each group `map`'s or its default; prepares what reads in place too.
  void choose_at_load(const ExpertsImplementation& map, const DecodeExperts& decode);
  void set_graphs(bool on) { use_graphs_ = on; }

 private:
  /// What becomes of the logits of a forward.
  struct Outcome {
    MutableTensorView logits = {};           // written here, on either side
    const SampleRequest* request = nullptr;  // or tokens drawn by this
    std::span<TokenId> next = {};            // go here
    std::shared_ptr<const void> cache = {};  // its life; with a request
  };

  DecoderCache& check_input(const ForwardInput& input, KvCache& cache) const;
  void check_logits(const ForwardInput& input, const TensorView& logits) const;
  void run_steps(const ForwardInput& input, DecoderCache& cache, const Outcome& outcome,
                 MoeObserver* observer);
  // The rest of a step that draws and is under way, with the lengths before it: begins with what
  // follows, if that is wanted, and takes the tokens.
  void finish_sampled_step(const ForwardInput& input, KvStore& store, const Outcome& outcome);
  void begin_ahead(const ForwardInput& input, KvStore& store, const Outcome& outcome);
  // Waits for a step that nobody will ask for, and forgets it.
  void drop_ahead();
  void run_step(const DecoderStep& step, KvStore& store, const SampleRequest* request,
                MoeObserver* observer);
  bool can_replay(const DecoderStep& step, const MoeObserver* observer) const;
  StepKey key_of(const DecoderStep& step, const KvStore& store, const SampleRequest* request) const;
  // Fills spans_ and wanted_ with the next piece that begins at token `begin`; returns its end.
  int64_t plan_step(const ForwardInput& input, const KvStore& store, int64_t begin);
  // Prepares, makes room, and only then switches; `name_of_group(group)` is empty for "as it is".
  template <typename NameOfGroup>
  void switch_groups(const NameOfGroup& name_of_group);
  void set_whole(const ExpertsImplementation& map);
  size_t step_workspace_bytes(int64_t step) const;
  void fit_workspace();

  ModelInfo info_;
  WeightMemory weights_;
  std::vector<std::unique_ptr<ExpertsGroup>> groups_;
  std::string whole_;                      // the name last set for the model as a whole
  ExpertsImplementation without_experts_;  // of sub-configs that have none
  Decoder decoder_;
  ThreadPool threads_;
  OwnedStream owned_stream_;
  Stream stream_;  // owned_stream_'s
  Workspace workspace_;
  bool use_graphs_ = true;
  StepGraphs graphs_;  // after all memory that graphs use
  StepOutputs outputs_;
  std::optional<StepAhead> ahead_;
  std::unique_ptr<DeviceEvent> step_done_[2];  // of steps that draw, in turn; null on the CPU
  size_t step_turn_ = 0;                       // of the last step
  std::shared_ptr<std::atomic<size_t>> cache_bytes_;  // of all living caches
  // A forward's plan, sized by reserve().
  std::vector<SequenceSpan> spans_;
  std::vector<LogitsRow> wanted_;
  std::vector<size_t> pending_;          // choice per group during a switch
  std::unique_ptr<ImageInputs> images_;  // of a model that takes some
};

}  // namespace cadre
