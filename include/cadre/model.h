// Models: loaded from a folder in the Hugging Face hub's layout, run token by token or in batches,
// their experts switchable at any time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/device.h"
#include "cadre/dtype.h"
#include "cadre/experts.h"
#include "cadre/image.h"
#include "cadre/quantization.h"
#include "cadre/sampling.h"
#include "cadre/tensor.h"
#include "cadre/token_id.h"

namespace cadre {

/// Backend per sub-config; "" is the model as a whole. Keys must be "" or names of sub-configs. A
/// plain name stands for {{"", name}}.
struct ExpertsImplementation : std::map<std::string, std::string, std::less<>> {
  using map::map;
  ExpertsImplementation() = default;
  ExpertsImplementation(const char* name) : map{{"", name}} {}  // NOLINT(*-explicit-constructor)
};

/// CPU only. Whether loading copies the experts into the packed form that its kernels read fastest
/// (see prepack() in experts.h). kOff: they are read where the checkpoint lies, and loading is over
/// at once. kAuto: kOff, for the time being.
enum class Prepack : uint8_t { kAuto, kOn, kOff };

/// How far a long step (reading weights, say) has come. Called from the loading thread.
using ProgressCallback = std::function<void(std::string_view what, int64_t done, int64_t total)>;

/// On a GPU, a step of few tokens (decoding, as a rule) of experts that run on "grouped_mm" takes
/// "batched_mm" instead, where that can run; other choices are kept at every size. What
/// get_experts_implementation() tells does not change. On the CPU nothing switches.
struct DecodeExperts {
  static constexpr int64_t kAuto = -1;  // the measured crossover
  static constexpr int64_t kOff = 0;
  int64_t max_tokens = kAuto;  // of a step that switches, over all its sequences
};

struct LoadOptions {
  /// Empty: "grouped_mm" where it can run, else "eager". "batched_mm" sets the whole model.
  ExpertsImplementation experts_implementation = {};
  Device device = {};
  std::optional<DType> dtype = {};  // compute dtype; empty: the checkpoint's
  /// Of a quantised checkpoint: with `dequantize` all weights become plain ones in the compute
  /// dtype while loading, whatever their format (memory for all of them is taken, and stated when
  /// there is not enough); the checkpoint's own settings prevail over the rest. Of a plain
  /// checkpoint: `dequantize` has nothing to do; without it Unsupported, since loading does not
  /// quantise (quantize() in quantization.h does).
  std::optional<FineGrainedFP8Config> quantization_config = {};
  Prepack prepack = Prepack::kAuto;  // kOn: DeviceError when memory does not suffice
  DecodeExperts decode_experts = {};
  bool graphs = true;  // GPU: a decode step is recorded once and replayed, where its backends allow
  int num_threads = 0;        // 0: default_num_threads()
  std::string revision = {};  // of a hub id; empty: refs/main
  ProgressCallback progress = {};
};

/// How a vision model's text speaks of images: the start token, the image token once for each of an
/// image's tokens, the end token.
struct VisionTokens {
  TokenId image = 0;
  TokenId start = 0;
  TokenId end = 0;
};

/// What is known of a model without running it.
struct ModelInfo {
  std::string architecture;  // "Qwen3MoeForCausalLM"
  std::string model_type;    // "qwen3_moe"
  std::string path;          // the folder
  DType compute_dtype = DType::kF32;
  Device device;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  int64_t num_moe_layers = 0;
  int64_t max_position_embeddings = 0;
  std::vector<TokenId>
      eos_token_ids;  // from generation_config.json, else config.json; may be empty
  std::vector<std::string> sub_configs;  // names of sub-configs; empty for a plain text model
  std::optional<VisionTokens> vision;    // of a model that takes images
};

/// Bytes by purpose. mapped: of the checkpoint's files, read in place (CPU); weights: copied to the
/// GPU, or converted while loading (CPU: dequantised weights and scales); added: by packed experts
/// and backends' own layouts. All but mapped lie on the model's device.
struct MemoryReport {
  size_t mapped_bytes = 0;
  size_t weights_bytes = 0;
  size_t added_bytes = 0;
  size_t workspace_bytes = 0;
  size_t kv_cache_bytes = 0;  // of all living caches
};

/// Keys and values (or what a model has in their place) of a batch of sequences, sized at creation;
/// never grows.
class KvCache {
 public:
  virtual ~KvCache() = default;
  virtual int64_t num_sequences() const = 0;
  virtual int64_t max_tokens() const = 0;              // per sequence
  virtual int64_t length(int64_t sequence) const = 0;  // tokens stored so far
  virtual size_t bytes() const = 0;
  /// Forgets the tokens of `sequence` from `length` on. Models that keep only the latest tokens of
  /// some layers (DeepSeek-V4) can always cut to 0 and by one token, and further as long as what
  /// the next token needs is there; else Unsupported, and nothing changes.
  virtual void truncate(int64_t sequence, int64_t length) = 0;
};

enum class LogitsRows : uint8_t { kLastOfEach, kAll };

/// New tokens of some or all sequences of a cache. Sequences may have different numbers of new
/// tokens.
struct ForwardInput {
  std::span<const TokenId> token_ids;   // all new tokens, sequence after sequence
  std::span<const int64_t> num_tokens;  // [num_sequences] of each; 0 = skip this sequence
  LogitsRows rows = LogitsRows::kLastOfEach;
  /// Images among the new tokens, in their order: what an ImageProcessor gave for all of them. The
  /// text holds VisionTokens::image once for each token of each image. The memory of a forward with
  /// images grows with the largest image.
  std::span<const float> pixel_values = {};  // [num_patches, patch_width]
  std::span<const ImageGrid> image_grids = {};
};

/// How forward_and_sample() draws. Greedy, or with one number a sequence.
struct SampleRequest {
  SamplingOptions options = {};          // without a repetition penalty; the seed is not used
  std::span<const double> uniform = {};  // [num_sequences] in [0, 1); not read when greedy
  /// The next call will be for the same sequences, each with the token that this one draws, and
  /// for these numbers: the model may begin with it while the caller looks at the tokens. If
  /// another call comes, what was begun is dropped; results never depend on it.
  bool goes_on = false;
  std::span<const double> next_uniform = {};  // [num_sequences]; not read when greedy
};

/// What a MoE layer saw and gave, for capture and replay. Views lie on the host, also when the
/// model runs on a GPU, and are valid during the callback only.
struct MoeLayerRecord {
  int64_t layer = 0;
  TensorView hidden_states;  // [num_tokens, hidden_size] compute dtype
  TensorView top_k_index;    // [num_tokens, top_k] i32
  TensorView top_k_weights;  // [num_tokens, top_k] f32, scaling factor included
  TensorView output;  // [num_tokens, hidden_size] compute dtype, routed experts alone; absent in
                      // on_routing
};

/// Called for every MoE layer of a forward, in order; a forward that is cut into pieces (see
/// Model::reserve) calls them for all layers of each piece, with the piece's tokens.
struct MoeHooks {
  /// May overwrite ids and weights in place: routing replay.
  std::function<void(int64_t layer, MutableTensorView top_k_index, MutableTensorView top_k_weights)>
      on_routing = {};
  std::function<void(const MoeLayerRecord&)> on_output = {};
};

/// Calls on one model must not overlap; different models are independent.
class Model {
 public:
  /// `path`: a folder, or a hub id looked up in the local hub cache. Throws CheckpointError,
  /// Unsupported or InvalidArgument.
  static std::unique_ptr<Model> from_pretrained(const std::string& path,
                                                const LoadOptions& options = {});

  virtual ~Model() = default;

  virtual const ModelInfo& info() const = 0;
  virtual MemoryReport memory() const = 0;

  virtual std::unique_ptr<KvCache> new_cache(int64_t num_sequences, int64_t max_tokens) = 0;

  /// Makes room for forwards of up to max_tokens new tokens (2048, on a GPU 16384, at most count:
  /// beyond, only memory grows); a larger forward is cut into pieces of this size with equal
  /// results. The only call that allocates workspace; forward() calls it with 512 (4096) when
  /// nobody did.
  virtual void reserve(int64_t max_tokens) = 0;

  /// Runs the new tokens, appends them to the cache and writes logits, f32, on the model's device
  /// or on the host: [num_sequences, vocab_size] for kLastOfEach (rows of skipped sequences are
  /// left alone), [total tokens, vocab_size] for kAll.
  virtual void forward(const ForwardInput& input, KvCache& cache, MutableTensorView logits,
                       const MoeHooks* hooks = nullptr) = 0;

  /// Whether forward_and_sample() can be called: a model on a GPU draws tokens where the logits
  /// are.
  virtual bool can_sample() const { return false; }
  /// forward() with kLastOfEach whose logits stay on the device: next [num_sequences] gets the
  /// token drawn after each sequence with new tokens, -1 where all logits are NaN; others are left
  /// alone. Throws Unsupported when can_sample() is false.
  virtual void forward_and_sample(const ForwardInput& input, KvCache& cache,
                                  const SampleRequest& request, std::span<TokenId> next);

  /// One entry for the model ("") and one per sub-config; for one without experts, the name set.
  virtual ExpertsImplementation get_experts_implementation() const = 0;

  /// The same, as a step of `num_tokens` tokens over all sequences runs: see DecodeExperts.
  virtual ExpertsImplementation experts_of_step([[maybe_unused]] int64_t num_tokens) const {
    return get_experts_implementation();
  }

  /// Switches at run time, all or nothing: an unknown backend or key (InvalidArgument) or one that
  /// cannot run here (Unsupported, with reasons and with the backends that would work) changes
  /// nothing. Between backends that read weights in place it allocates nothing.
  virtual void set_experts_implementation(const ExpertsImplementation& map) = 0;
  /// The same for the model and all its sub-configs.
  virtual void set_experts_implementation(std::string_view name) = 0;
  void set_experts_implementation(const char* name) {
    set_experts_implementation(std::string_view(name));
  }

  /// The query that the experts of a sub-config ("" for a plain model) put to backends.
  virtual ExpertsQuery experts_query(std::string_view sub_config = "") const = 0;
};

/// The name that Transformers' users look for.
struct AutoModelForCausalLM {
  static std::unique_ptr<Model> from_pretrained(const std::string& path,
                                                const LoadOptions& options = {}) {
    return Model::from_pretrained(path, options);
  }
};

/// The same for models that take images. Throws Unsupported for one that does not.
struct AutoModelForImageTextToText {
  static std::unique_ptr<Model> from_pretrained(const std::string& path,
                                                const LoadOptions& options = {});
};

/// How one part of a checkpoint's tensors was used.
struct TensorReport {
  std::string name;
  std::string file;
  std::string part;  // "embedding", "attention", "experts", "router", "shared expert", "mlp",
                     // "norm", "lm_head", "vision", "unused"
  DType dtype = DType::kF32;
  Dims shape;
  size_t bytes = 0;
  std::string format;  // "fp8", "fp4", "scales" and so on; the dtype's name for all that is plain
};

struct ModelReport {
  ModelInfo info;
  std::vector<std::pair<std::string, ExpertsQuery>>
      experts;  // per sub-config ("" for a plain model); device as asked
  std::vector<TensorReport> used;
  std::vector<TensorReport> ignored;  // known and not needed: layers for multi-token prediction
  std::vector<TensorReport> left_over;
  std::vector<std::string> missing;  // with the expected shape
  std::vector<std::string> notes;    // what the config says otherwise than the tensors; no faults
  std::map<std::string, size_t> bytes_per_part;
};

/// Reads headers and config only, no weights. Faults that loading would report (missing tensors and
/// the like) are listed instead of thrown; an unreadable folder or an unknown architecture still
/// throws.
ModelReport inspect_model(const std::string& path, const LoadOptions& options = {});

/// model_type and architecture names that from_pretrained knows.
std::vector<std::string> known_architectures();

}  // namespace cadre
