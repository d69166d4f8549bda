#include "models/verify.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <variant>
#include <vector>

#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "cadre/workspace.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"
#include "experts/host_experts.h"
#include "experts/relative_error.h"
#include "models/decoder_model.h"

namespace cadre {
namespace {

/// What one MoE layer saw.
struct LayerInput {
  int64_t layer = 0;
  Tensor hidden_states;
  Tensor top_k_index;
  Tensor top_k_weights;
};

/// Ends the forward when the last layer wanted has been seen.
struct SeenEnough {};

Tensor copy_of(const TensorView& view) {
  const Tensor copy(view.dtype(), view.shape());
  const size_t row_bytes = static_cast<size_t>(view.dim(1)) * size_of(view.dtype());
  for (int64_t row = 0; row < view.dim(0); ++row) {
    std::memcpy(copy.view()[row].mutable_data(), view[row].data(), row_bytes);
  }
  return copy;
}

const DecoderModel& checked_model(const Model& model, const VerifyOptions& options) {
  const auto* decoder = dynamic_cast<const DecoderModel*>(&model);
  const ModelInfo& info = model.info();
  if (decoder == nullptr || info.num_moe_layers == 0) {
    throw Unsupported(str_cat("verify: ", info.path, ": expected a model with experts, ",
                              info.architecture, " here has none"));
  }
  if (options.num_tokens < 1 || options.num_tokens > info.max_position_embeddings) {
    throw InvalidArgument(str_cat("verify: expected from 1 to ", info.max_position_embeddings,
                                  " tokens (the context of ", info.path, "), got ",
                                  options.num_tokens));
  }
  if (options.num_layers < 0 || options.num_layers > info.num_moe_layers) {
    throw InvalidArgument(str_cat("verify: expected from 1 to ", info.num_moe_layers,
                                  " layers (those of ", info.path,
                                  " that have experts; 0 = all), got ", options.num_layers));
  }
  return *decoder;
}

std::vector<LayerInput> capture(Model& model, const VerifyOptions& options) {
  const int64_t wanted = options.num_layers == 0 ? model.info().num_moe_layers : options.num_layers;
  std::mt19937_64 random(options.seed);
  std::vector<TokenId> ids(static_cast<size_t>(options.num_tokens));
  for (TokenId& id : ids) {
    id = static_cast<TokenId>(random() % static_cast<uint64_t>(model.info().vocab_size));
  }
  std::vector<LayerInput> inputs;
  MoeHooks hooks;
  hooks.on_output = [&](const MoeLayerRecord& record) {
    inputs.push_back({record.layer, copy_of(record.hidden_states), copy_of(record.top_k_index),
                      copy_of(record.top_k_weights)});
    const auto seen = static_cast<int64_t>(inputs.size());
    if (options.progress) options.progress("running the model", seen, wanted);
    if (seen == wanted) throw SeenEnough();
  };
  model.reserve(options.num_tokens);  // one piece: the layers come in order
  const std::unique_ptr<KvCache> cache = model.new_cache(1, options.num_tokens);
  const Tensor logits(DType::kF32, {1, model.info().vocab_size});
  try {
    model.forward({ids, {&options.num_tokens, 1}}, *cache, logits, &hooks);
  } catch (const SeenEnough&) {
    return inputs;
  }
  return inputs;
}

void replace_last_slot(const Tensor& top_k_index) {
  top_k_index->as<int32_t>()[top_k_index->numel() - 1] = -1;
}

std::vector<double> reference_of(const ExpertsQuery& query, const ExpertsWeights& weights,
                                 const RoutedTokens& tokens, ThreadPool& pool) {
  const int64_t hidden = query.config.hidden_size;
  const int64_t count = tokens.hidden_states.dim(0);
  std::vector<double> output(static_cast<size_t>(count * hidden));
  // The reference takes one thread; tokens do not depend on each other.
  pool.parallel_for(count, [&](int64_t t, int) {
    const RoutedTokens one{tokens.hidden_states.slice(t, t + 1),
                           tokens.top_k_index.slice(t, t + 1),
                           tokens.top_k_weights.slice(t, t + 1),
                           {}};
    reference_forward(query.config, weights, one, output.data() + t * hidden,
                      query.activation_scheme);
  });
  return output;
}

/// Runs one backend twice, the second time by the clock; returns the seconds.
double run_backend(ExpertsBackend& backend, const ExpertsQuery& query,
                   const std::shared_ptr<const ExpertsWeights>& weights, const RoutedTokens& tokens,
                   const Stream& stream) {
  const CurrentDevice current(query.device);
  const auto prepared = backend.prepare(query, weights);
  Workspace workspace(query.device, backend.workspace_bytes(query, tokens.hidden_states.dim(0),
                                                            stream.threads->num_threads()));
  backend.forward(*prepared, tokens, workspace, stream);
  synchronize(stream);
  const auto start = std::chrono::steady_clock::now();
  backend.forward(*prepared, tokens, workspace, stream);
  synchronize(stream);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void add(VerifySummary& summary, const ExpertsCheck& check) {
  ++summary.num_checks;
  if (!check.ok()) ++summary.num_failed;
  const double share = check.relative_error / check.bound;
  summary.worst_error = std::max(
      summary.worst_error, std::isnan(share) ? std::numeric_limits<double>::infinity() : share);
}

class Verifier {
 public:
  Verifier(const DecoderModel& model, int num_threads)
      : model_(model), pool_(num_threads), stream_(model.info().device, pool_) {}

  /// False when `on_check` wants no more.
  bool verify_layer(const LayerInput& input, VerifySummary& summary,
                    FunctionRef<bool(const ExpertsCheck&)> on_check) {
    const auto& block = std::get<MoeBlock>(model_.decoder().layer(input.layer).feed_forward);
    const ExpertsGroup& group = block.group();
    const ExpertsQuery& query = group.query();
    const auto& weights = group.weights(block.index());
    const Stream& stream = stream_.get();
    const std::vector<double> truth =
        reference_of(query, HostExperts(query.config, *weights, input.top_k_index, stream).get(),
                     {input.hidden_states, input.top_k_index, input.top_k_weights, {}}, pool_);
    const Tensor x = to_device_of(stream, input.hidden_states.view());
    const Tensor index = to_device_of(stream, input.top_k_index.view());
    const Tensor factors = to_device_of(stream, input.top_k_weights.view());
    Tensor poison(query.compute_dtype, input.hidden_states->shape());
    std::memset(poison->mutable_data(), 0xff, poison->nbytes());  // NaN: every row is written
    for (const BackendEntry& entry : list_backends()) {
      if (entry.backend == nullptr || entry.device != query.device.type) continue;
      if (!entry.backend->supports(query)) continue;
      ExpertsCheck check{input.layer, group.sub_config(), entry.name, query.compute_dtype,
                         query.format};
      const Tensor output = to_device_of(stream, poison.view());
      check.seconds = run_backend(*entry.backend, query, weights,
                                  {x.view(), index.view(), factors.view(), output}, stream);
      const Tensor result = to_host(stream, output.view());
      synchronize(stream);
      check.relative_error = relative_error(result, truth);
      check.bound = entry.backend->emulation_bound(query, query.compute_dtype);
      add(summary, check);
      if (!on_check(check)) return false;
    }
    return true;
  }

 private:
  const DecoderModel& model_;
  ThreadPool pool_;
  OwnedStream stream_;
};

}  // namespace

VerifySummary verify_experts(Model& model, const VerifyOptions& options,
                             FunctionRef<bool(const ExpertsCheck&)> on_check) {
  Verifier verifier(checked_model(model, options), options.num_threads);
  const std::vector<LayerInput> inputs = capture(model, options);
  VerifySummary summary;
  int64_t done = 0;
  for (const LayerInput& input : inputs) {
    replace_last_slot(input.top_k_index);
    if (!verifier.verify_layer(input, summary, on_check)) break;
    if (options.progress) {
      options.progress("verifying", ++done, static_cast<int64_t>(inputs.size()));
    }
  }
  return summary;
}

}  // namespace cadre
