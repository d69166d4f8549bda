// Text generation: sampling, stopping and the loop around a model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cadre/model.h"
#include "cadre/sampling.h"
#include "cadre/tokenizer.h"

namespace cadre {

/// Throws CheckpointError when one of the ids that the model's own tokenizer gave has no row in the
/// model: the two do not belong together. Tokens that no text uses do no harm, so only ids count.
void check_token_ids(std::span<const TokenId> ids, const Tokenizer& tokenizer,
                     const ModelInfo& info);

/// Throws InvalidArgument naming the option and its range.
void validate(const SamplingOptions& options);

/// Draws the next token of one sequence. The same seed and logits give the same tokens on every
/// machine.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options,
                   uint64_t stream = 0);  // stream: the sequence's number
  /// `logits` [vocab_size]; changed in place. `history`: all ids so far. Ties go to the lowest id;
  /// a NaN is never picked unless all are NaN, which throws Error.
  TokenId next(std::span<float> logits, std::span<const TokenId> history);

  /// The random number in [0, 1) that next() would have drawn with, for a draw made elsewhere.
  double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

  /// What next() would draw from, by id, adding up to 1; draws nothing. Changes `logits` likewise.
  std::vector<std::pair<TokenId, double>> probabilities(std::span<float> logits,
                                                        std::span<const TokenId> history);

 private:
  TokenId prepare(std::span<float> logits, std::span<const TokenId> history);
  void cut(std::span<const float> logits, float max);
  TokenId draw(float max);

  SamplingOptions options_;
  std::mt19937_64 random_;
  std::vector<std::pair<float, TokenId>> candidates_;
};

enum class FinishReason : uint8_t { kEos, kLength, kStopped };

struct GenerationOptions {
  int64_t max_new_tokens = 64;
  SamplingOptions sampling = {};
  std::vector<TokenId> eos_token_ids = {};  // stop at any of these; empty = the model's own
  bool ignore_eos = false;
  // Images in the prompts, in their order: what forward() takes (see ForwardInput).
  std::span<const float> pixel_values = {};
  std::span<const ImageGrid> image_grids = {};
};

struct GenerationResult {
  std::vector<std::vector<TokenId>>
      token_ids;  // [num_sequences] the continuation only, the eos included
  std::vector<FinishReason> finish_reasons;
  int64_t prompt_tokens = 0;  // of all sequences
  int64_t reused_tokens = 0;  // of these: found in a GenerationSession's cache, not run again
  int64_t decode_tokens = 0;  // tokens computed one step at a time
  double prefill_seconds = 0;
  double decode_seconds = 0;
  std::string prefill_experts;  // backend per stage
  std::string decode_experts;
};

/// Called for each new token; return false to stop that sequence.
using TokenCallback = std::function<bool(int64_t sequence, TokenId id)>;

/// Continues every prompt (each at least one token; lengths may differ). Throws InvalidArgument for
/// an empty prompt, a prompt longer than the context, an id outside the vocabulary and options out
/// of range. A sequence never grows beyond the context: there, as at max_new_tokens, it ends with
/// FinishReason::kLength; a prompt that fills the context gets no token. kEos wins over kStopped,
/// which wins over kLength. Sequence i draws from Sampler(options.sampling, i).
GenerationResult generate(Model& model, std::span<const std::vector<TokenId>> prompts,
                          const GenerationOptions& options, const TokenCallback& on_token = {});

/// One sequence that grows from call to call, a conversation: what a prompt shares with the tokens
/// run before it stays in the KV cache and is not run again; what differs is forgotten.
class GenerationSession {
 public:
  /// The model must outlive the session.
  explicit GenerationSession(Model& model) : model_(&model) {}

  /// As cadre::generate() with the whole sequence so far as its one prompt, and the same tokens.
  /// Its n-th call draws from Sampler(options.sampling, n). After an error the cache is empty.
  GenerationResult generate(const std::vector<TokenId>& prompt, const GenerationOptions& options,
                            const TokenCallback& on_token = {});

  /// Forgets all tokens and begins with the first stream of random numbers again.
  void reset();

  int64_t cached_tokens() const { return static_cast<int64_t>(cached_.size()); }

 private:
  void make_room(int64_t num_tokens);

  Model* model_;
  std::unique_ptr<KvCache> cache_;  // of at least cached_.size() tokens
  std::vector<TokenId> cached_;     // whose keys and values it holds
  uint64_t num_calls_ = 0;
};

}  // namespace cadre
