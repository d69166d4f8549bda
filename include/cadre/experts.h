// The experts interface: what the model fixes, what one call brings, and what a backend must
// answer.
//
// A Mixture-of-Experts layer projects each token through the k experts that its router picked and
// sums the results with the routing weights. Router, shared experts and scaling factors stay
// outside. Backends differ only in how the products run. Names and flags follow Hugging Face
// Transformers' experts interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/activation.h"
#include "cadre/device.h"
#include "cadre/dtype.h"
#include "cadre/quantization.h"
#include "cadre/storage_format.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"
#include "cadre/workspace.h"

namespace cadre {

class ThreadPool;

namespace cpu {
class PackedExperts;
}

/// What the model fixes about its experts. With a gate, h = act(gate) * up; without, h = act(up).
/// `swiglu_limit` L alone: gate = min(gate, L), up = clamp(up, -L, L) before the activation.
/// `swiglu_alpha` a set (GPT-OSS): after the clamp, h = (up + 1) * gate * sigmoid(a * gate),
/// `activation` is ignored.
struct ExpertsConfig {
  int64_t num_experts = 0;        // E
  int64_t hidden_size = 0;        // H
  int64_t intermediate_size = 0;  // I
  int64_t top_k = 0;              // k
  Activation activation = Activation::kSilu;
  bool has_gate = true;         // gate_up_proj with 2I rows; else up_proj with I rows
  bool has_bias = false;        // biases on both projections
  bool is_transposed = false;   // fused tensors are [E, K, N] instead of [E, N, K]
  bool is_concatenated = true;  // rows [all gate; all up]; false: [g0, u0, g1, u1, ...]
  std::optional<float> swiglu_limit = {};
  std::optional<float> swiglu_alpha = {};
};

/// Throws InvalidArgument naming the field when a size is not positive, k > E, a limit is not
/// positive, or a gate option is set without a gate.
void validate(const ExpertsConfig& config);

/// One projection of one expert: the logical [N, K] matrix W of y = W x. Element (n, k) lies at
/// data + n * row_stride + k * col_stride, in elements of the storage type. FP4 packs two k per
/// byte, the even one in the low nibble: its col_stride is 1 and its row_stride counts bytes.
/// Quantised formats: the scale of element (n, k), with block rows and columns of the layer's
/// ScaleLayout (0 = all of them share one), is
///   scales[(n + scale_row_offset) / block_rows * scale_row_stride + k / block_cols *
///   scale_col_stride].
struct ExpertMatrix {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
  const void* scales = nullptr;  // null for plain formats
  int64_t scale_row_stride = 0;  // in scales
  int64_t scale_col_stride = 1;
  int64_t scale_row_offset = 0;  // rows of the first block that lie before row 0 (up behind gate)
  float input_scale = 0;         // of the activations, ActivationScheme::kStatic only
};

/// One bias vector of one expert; element n at data + n * stride.
struct ExpertVector {
  const void* data = nullptr;
  int64_t stride = 1;
};

/// All experts of one layer, in the storage they were loaded in. Layout flags are resolved into
/// pointers and strides once, when this is built, so a backend cannot mistake [gate; up] for
/// interleaved rows.
struct ExpertsWeights {
  Device device;
  StorageFormat format = StorageFormat::kBF16;
  ScaleLayout scale_layout;        // quantised formats only
  std::vector<ExpertMatrix> gate;  // [E] of [I, H]; empty without a gate
  std::vector<ExpertMatrix> up;    // [E] of [I, H]
  std::vector<ExpertMatrix> down;  // [E] of [H, I]
  DType bias_dtype = DType::kF32;
  std::vector<ExpertVector> gate_bias;  // [E] of [I]; empty without bias or gate
  std::vector<ExpertVector> up_bias;    // [E] of [I]; empty without bias
  std::vector<ExpertVector> down_bias;  // [E] of [H]; empty without bias
  std::shared_ptr<const void> owner;    // keeps the memory alive (a file mapping, a tensor)
  /// A copy of gate, up and down in the order in which CPU kernels read them, made by prepack();
  /// null = kernels read in place. Whoever changes the values or pointers above makes it anew or
  /// drops it. The pointers stay valid with it: the reference and other readers go on using them.
  std::shared_ptr<const cpu::PackedExperts> packed;
};

/// The fused tensors of Transformers' experts modules. Shapes by the flags of the config:
/// gate_up_proj [E, 2I, H] (transposed [E, H, 2I]; without a gate [E, I, H]), down_proj [E, H, I]
/// (transposed [E, I, H]), gate_up_proj_bias [E, 2I] (without a gate [E, I]), down_proj_bias [E,
/// H]. The last dimension must have stride 1; the others may have any (an expert stride above N * K
/// is fine).
struct FusedExperts {
  TensorView gate_up_proj = {};
  TensorView down_proj = {};
  TensorView gate_up_proj_bias = {};
  TensorView down_proj_bias = {};
};

/// Throws InvalidArgument naming the tensor, both shapes and both dtypes when one does not fit the
/// config.
ExpertsWeights make_experts_weights(const ExpertsConfig& config, const FusedExperts& tensors,
                                    std::shared_ptr<const void> owner = nullptr);

/// One tensor per expert and projection, the usual layout on the hub: gate and up [I, H], down [H,
/// I], each E long (gate empty without a gate). No biases; is_transposed and is_concatenated do not
/// apply.
ExpertsWeights make_experts_weights(const ExpertsConfig& config, std::span<const TensorView> gate,
                                    std::span<const TensorView> up,
                                    std::span<const TensorView> down,
                                    std::shared_ptr<const void> owner = nullptr);

/// Quantised fused tensors. Values have the shapes of FusedExperts in stored elements (FP4: two in
/// a byte); kMxFp8 and kFp4 have K last whatever is_transposed says. Scales of blocks lie as their
/// values do: [E, ceil(N / block_rows), ceil(K / block_cols)], transposed [E, .., ..] the other way
/// round. Those of gate_up_proj are one grid over all 2I rows (up may begin inside a block), or
/// with 2 * ceil(I / block_rows) rows, where that is another number, a grid for gate and one for
/// up. Interleaved rows need blocks of one row. kFp8Tensor: [E, 2, 1] (gate, up; without a gate [E,
/// 1, 1]) and [E, 1, 1].
struct QuantizedFusedExperts {
  QuantizedTensor gate_up_proj = {};
  QuantizedTensor down_proj = {};
  TensorView gate_up_proj_bias = {};  // as in FusedExperts
  TensorView down_proj_bias = {};
  std::span<const float> gate_up_input_scales = {};  // [E], ActivationScheme::kStatic only
  std::span<const float> down_input_scales = {};
};

/// Quantised weights with a tensor for each expert and projection: gate and up [I, H], down [H, I],
/// each E long (gate empty without a gate). Scales of gate and of up are their own. No biases.
struct QuantizedExperts {
  std::span<const QuantizedTensor> gate = {};
  std::span<const QuantizedTensor> up = {};
  std::span<const QuantizedTensor> down = {};
  std::span<const float> gate_input_scales = {};  // [E], ActivationScheme::kStatic only
  std::span<const float> up_input_scales = {};
  std::span<const float> down_input_scales = {};
};

/// Quantised weights of one format and scale layout. Throw InvalidArgument as the others do, for
/// scales too.
ExpertsWeights make_experts_weights(const ExpertsConfig& config,
                                    const QuantizedFusedExperts& tensors,
                                    std::shared_ptr<const void> owner = nullptr);
ExpertsWeights make_experts_weights(const ExpertsConfig& config, const QuantizedExperts& tensors,
                                    std::shared_ptr<const void> owner = nullptr);

/// Bytes of the packed form of a layer. Throws as prepack() does for config and format.
size_t prepacked_bytes(const ExpertsConfig& config, StorageFormat format);

/// Puts the packed form of a layer of plain weights into weights.packed, in place of one that is
/// there; it serves every CPU backend. `on_expert` is called after each expert, in order: its
/// values above are not read again by CPU kernels that find the packed form. Throws Unsupported for
/// quantised formats and other devices, InvalidArgument when the weights do not fit the config or a
/// pointer is null, DeviceError when memory runs out; weights.packed is null then.
void prepack(const ExpertsConfig& config, ExpertsWeights& weights, ThreadPool& threads,
             const std::function<void(int64_t expert)>& on_expert = {});

/// Bytes of weights.packed; 0 without.
size_t packed_bytes(const ExpertsWeights& weights);

/// One call. Rows may be strided, the last dimension must have stride 1. Ids outside [0,
/// num_experts) mean "no expert": the slot contributes nothing and neither its weight nor any
/// expert is read. An expert named twice counts twice.
struct RoutedTokens {
  TensorView hidden_states;  // [num_tokens, hidden_size] in the compute dtype
  TensorView top_k_index;    // [num_tokens, top_k] i32 or i64
  TensorView top_k_weights;  // [num_tokens, top_k] f32 or the compute dtype
  MutableTensorView
      output;  // [num_tokens, hidden_size] in the compute dtype or f32; every row is written
};

/// The question that a backend answers before any weight is loaded.
struct ExpertsQuery {
  ExpertsConfig config = {};
  Device device = {};
  DType compute_dtype = DType::kBF16;
  StorageFormat format = StorageFormat::kBF16;
  ScaleLayout scale_layout = {};
  ActivationScheme activation_scheme = ActivationScheme::kNone;
  int ep_size = 1;  // ranks of the expert-parallel group
};

/// The answer: yes, or the list of reasons why not. Each reason names the requirement that is not
/// met.
struct Support {
  std::vector<std::string> reasons;

  bool ok() const { return reasons.empty(); }
  explicit operator bool() const { return ok(); }
};

/// "; "-joined reasons, or "ok".
std::string to_string(const Support& support);

/// What a backend made of a layer's weights. Backends that need more derive from it.
struct PreparedExperts {
  PreparedExperts(const ExpertsQuery& query, std::shared_ptr<const ExpertsWeights> weights,
                  size_t added_bytes = 0)
      : query(query), weights(std::move(weights)), added_bytes(added_bytes) {}
  virtual ~PreparedExperts() = default;

  ExpertsQuery query;
  std::shared_ptr<const ExpertsWeights> weights;
  // Memory beyond the weights and their packed form; 0 = reads them as they are.
  size_t added_bytes = 0;
};

/// How far a backend may lie from the float64 reference, as |out - ref| / |ref| over the whole
/// output.
double stated_bound(DType compute_dtype, StorageFormat format);

/// The same against a reference that rounds activations as the query says (reference_forward with
/// its activation_scheme), for outputs of this dtype: what is left are the roundings of sums, h and
/// the output.
double emulation_bound(const ExpertsQuery& query, DType output_dtype);

/// One way to run experts on one kind of device. Stateless: one object serves all layers and
/// models; all state is in what prepare() returns and in the workspace.
class ExpertsBackend {
 public:
  virtual ~ExpertsBackend() = default;

  /// Needs no weights and does no device work. Every condition that prepare() or forward() would
  /// refuse is answered here.
  virtual Support supports(const ExpertsQuery& query) const = 0;

  /// Builds what forward() needs. Called only when supports(query) is ok.
  virtual std::unique_ptr<PreparedExperts> prepare(
      const ExpertsQuery& query, std::shared_ptr<const ExpertsWeights> weights) = 0;

  /// How far outputs of this dtype may lie from a reference that rounds activations as the query
  /// says: emulation_bound() above, unless the backend's instructions sum less exactly than
  /// float32.
  virtual double emulation_bound(const ExpertsQuery& query, DType output_dtype) const;

  /// Whether forward() on a GPU may be recorded into a graph: it reads nothing on the host.
  virtual bool can_be_captured() const { return true; }

  /// Workspace that a forward of up to max_tokens tokens takes on a stream with `num_threads` CPU
  /// threads.
  virtual size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                                 int num_threads) const = 0;

  /// Checks the call against the prepared experts (InvalidArgument on any mismatch of shape, dtype
  /// or device), then runs it. Allocates nothing; the same call twice gives the same bits.
  void forward(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
               const Stream& stream);

 protected:
  /// The backend's own work; arguments are already checked. num_tokens may be 0.
  virtual void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
                   const Stream& stream) = 0;
};

/// A row of the registry: a backend name on a kind of device, and what stands behind it.
struct BackendEntry {
  std::string name;
  DeviceType device = DeviceType::kCpu;
  ExpertsBackend* backend = nullptr;  // null when it is not part of this build
  std::string not_built_reason;       // set when backend is null
};

/// All known names in the order of the specification, then user-registered ones: eager, batched_mm,
/// grouped_mm, deepgemm, deepgemm_megamoe, sonicmoe, each for the CPU and for CUDA.
std::vector<BackendEntry> list_backends();

/// The distinct names of list_backends(), in order.
std::vector<std::string> backend_names();

/// Throws InvalidArgument listing the valid names when `name` is unknown, Unsupported with the
/// reason when it is known but not built for this kind of device.
ExpertsBackend& find_backend(std::string_view name, DeviceType device);

/// The answer for a name: the backend's own, or the reason why it is not built. Throws
/// InvalidArgument for an unknown name.
Support supports(std::string_view name, const ExpertsQuery& query);

using BackendFactory = std::function<std::unique_ptr<ExpertsBackend>()>;

/// Adds a backend at run time; models loaded before can switch to it too. Throws InvalidArgument
/// when the name is empty or taken on that device. Thread-safe. There is no removal: models may
/// hold it.
void register_backend(const std::string& name, const BackendFactory& factory,
                      DeviceType device = DeviceType::kCpu);

/// The truth that backends are measured against: the recipe of numbers in float64, one thread, no
/// speed. Reads weights of any format. With quantised weights `activations` says what becomes of
/// activations: kDynamic and kStatic round them as backends do (docs/numerics.md), kNone takes
/// exact ones, so that the dequantised layer is what it computes. `output` is [num_tokens,
/// hidden_size] f64, contiguous. Inputs as in RoutedTokens (its own output is ignored).
void reference_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                       const RoutedTokens& tokens, double* output,
                       ActivationScheme activations = ActivationScheme::kNone);

}  // namespace cadre
