// What runs through the layers of a decoder: how a sublayer (attention, MLP, experts) reads it and
// how its output joins it. Plain residuals add up; hyper-connections keep several streams and mix
// them anew at every sublayer. All of it is float32, whatever the compute dtype.
#pragma once

#include <optional>

#include "layers/forward_context.h"

namespace cadre {

/// Between the streams and one sublayer, or (with n outputs in place of (2 + n) * n, and one scale)
/// the head. Plain residuals have none.
struct HyperConnection {
  LinearWeights weights = {};  // [(2 + n) * n, n * hidden_size]
  TensorView base = {};        // [(2 + n) * n]
  TensorView scale = {};       // [3]
};

struct HyperConfig {
  int64_t num_streams = 0;  // n, up to kMaxHyperStreams
  int64_t sinkhorn_iterations = 1;
  float eps = 1e-6f;       // of the weights
  float norm_eps = 1e-6f;  // of the streams' norm
};

/// For every sublayer in turn: open, input or normalize, sum or add, close.
class Residual {
 public:
  virtual ~Residual() = default;

  virtual void open(const HyperConnection& connection) = 0;
  /// What the sublayer reads, before its norm: [num_tokens, hidden_size] f32.
  virtual TensorView input() = 0;
  /// x [num_tokens, hidden_size] = norm of it
  virtual void normalize(const Norm& norm, MutableTensorView x) = 0;
  /// [num_tokens, hidden_size] f32, where the sublayer adds its output.
  virtual MutableTensorView sum() = 0;
  /// Adds `out`, now or when it is needed: it must stay as it is until the next sublayer has
  /// normalized.
  virtual void add(const TensorView& out) = 0;
  virtual void close() = 0;

  /// After all sublayers: x [n, hidden_size] = norm of rows `rows` [n] i32, ascending.
  virtual void normalize_rows(const TensorView& rows, const Norm& norm, MutableTensorView x) = 0;
};

class PlainResidual final : public Residual {
 public:
  /// `stream` [num_tokens, hidden_size] f32: the embedding, from now on the residual.
  PlainResidual(const ForwardContext& context, MutableTensorView stream)
      : context_(context), stream_(stream) {}
  static size_t workspace_bytes(const WorkspaceQuery& query, int64_t hidden_size);

  void open(const HyperConnection& /*connection*/) override {}
  TensorView input() override { return sum(); }
  void normalize(const Norm& norm, MutableTensorView x) override;
  MutableTensorView sum() override;
  void add(const TensorView& out) override;
  void close() override {}
  void normalize_rows(const TensorView& rows, const Norm& norm, MutableTensorView x) override;

 private:
  const ForwardContext& context_;
  MutableTensorView stream_;
  TensorView pending_;  // still to be added
};

class HyperResidual final : public Residual {
 public:
  /// Takes from the workspace what it needs for the step. `embedding` [num_tokens, hidden_size] f32
  /// is its own from now on.
  HyperResidual(const ForwardContext& context, const HyperConfig& config,
                const HyperConnection& head, MutableTensorView embedding);
  static size_t workspace_bytes(const WorkspaceQuery& query, const HyperConfig& config,
                                int64_t hidden_size);

  void open(const HyperConnection& connection) override;
  TensorView input() override { return collapsed_; }
  void normalize(const Norm& norm, MutableTensorView x) override;
  MutableTensorView sum() override { return sum_; }
  void add(const TensorView& out) override;
  void close() override;
  void normalize_rows(const TensorView& rows, const Norm& norm, MutableTensorView x) override;

 private:
  // The flat streams times a connection's weights.
  MutableTensorView logits(const MutableTensorView& streams, const HyperConnection& connection);

  const ForwardContext& context_;
  const HyperConfig& config_;
  const HyperConnection& head_;
  MutableTensorView collapsed_;  // [num_tokens, hidden_size]: what the sublayer reads
  MutableTensorView streams_;    // [num_tokens, n, hidden_size]
  MutableTensorView sum_;        // [num_tokens, hidden_size]: of the sublayer's outputs
  MutableTensorView post_;       // [num_tokens, n]
  MutableTensorView mix_;        // [num_tokens, n, n]
};

}  // namespace cadre
