// from_pretrained and inspect_model: from a folder to a model, or to a report about it.
#include <utility>

#include "cadre/error.h"
#include "cadre/model.h"
#include "cadre/thread_pool.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"
#include "io/checkpoint.h"
#include "models/decoder_model.h"
#include "models/registry.h"
#include "models/weight_placement.h"

namespace cadre {
namespace {

DType compute_dtype(const Checkpoint& checkpoint, const LoadOptions& options) {
  if (options.dtype) {
    if (!is_compute_dtype(*options.dtype)) {
      throw InvalidArgument(
          str_cat("dtype: expected float32, bfloat16 or float16, got ", *options.dtype));
    }
    return *options.dtype;
  }
  if (const std::optional<DType> named = read_dtype(checkpoint.config())) return *named;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    if (is_compute_dtype(tensor.view.dtype())) return tensor.view.dtype();
  }
  return DType::kF32;
}

void refuse_quantized(const ConfigReader& config) {
  if (!config.has("quantization_config")) return;
  const ConfigReader quantization = config.object("quantization_config");
  throw Unsupported(str_cat(config.origin(), ": quantization_config (quant_method \"",
                            quantization.text_or("quant_method", "?"),
                            "\"): quantised checkpoints are not supported yet; load one whose "
                            "weights are float32, bfloat16 or float16"));
}

std::vector<TokenId> eos_token_ids(const Checkpoint& checkpoint) {
  if (const auto& generation = checkpoint.generation_config()) {
    if (generation->has("eos_token_id")) return read_eos_token_ids(*generation);
  }
  return read_eos_token_ids(checkpoint.config());
}

ModelInfo model_info(const Checkpoint& checkpoint, const Architecture& architecture,
                     const BuiltModel& model, DType dtype, Device device) {
  ModelInfo info;
  info.architecture = architecture.name;
  info.model_type = architecture.model_type;
  info.path = checkpoint.folder().string();
  info.compute_dtype = dtype;
  info.device = device;
  info.vocab_size = model.text.vocab_size;
  info.hidden_size = model.text.hidden_size;
  info.num_layers = model.text.num_layers;
  info.num_moe_layers = model.num_moe_layers;
  info.max_position_embeddings = model.text.max_position_embeddings;
  info.eos_token_ids = eos_token_ids(checkpoint);
  for (const auto& group : model.groups) {
    if (!group->sub_config().empty()) info.sub_configs.push_back(group->sub_config());
  }
  info.sub_configs.insert(info.sub_configs.end(), model.sub_configs.begin(),
                          model.sub_configs.end());
  if (model.vision) info.vision = model.vision_tokens;
  return info;
}

// A checkpoint seen through its family's eyes; faults of its tensors are in `weights`. The model's
// weights lie in the files.
struct Opened {
  explicit Opened(const std::string& path, const LoadOptions& options)
      : checkpoint(Checkpoint::open(resolve_model_path(path, options.revision))),
        architecture(find_architecture(checkpoint.config())),
        weights(checkpoint) {
    refuse_quantized(checkpoint.config());
    const DType dtype = compute_dtype(checkpoint, options);
    ModelBuilder builder(checkpoint.config(), weights, dtype, options.device, options.progress);
    model = architecture.build(builder);
    info = model_info(checkpoint, architecture, model, dtype, options.device);
  }

  Checkpoint checkpoint;
  Architecture architecture;
  WeightLoader weights;
  BuiltModel model;
  ModelInfo info;
};

// The same model over copies of its weights on the GPU.
std::unique_ptr<DecoderModel> load_on_device(Opened opened, const LoadOptions& options) {
  WeightPlacement placement(opened.info.device, opened.info.compute_dtype);
  for (const TensorReport& tensor : opened.weights.used()) {
    const TensorView& view = opened.checkpoint.find(tensor.name)->view;
    const bool is_table = view.dtype() == DType::kI32 || view.dtype() == DType::kI64;
    const DType computed =
        opened.weights.is_float32(tensor.name) ? DType::kF32 : opened.info.compute_dtype;
    placement.add(tensor.name, view, tensor.part, is_table ? view.dtype() : computed);
  }
  ThreadPool threads(options.num_threads);
  placement.load(threads, options.progress);
  WeightLoader weights(opened.checkpoint, &placement);
  const ProgressCallback no_progress;
  ModelBuilder builder(opened.checkpoint.config(), weights, opened.info.compute_dtype,
                       opened.info.device, no_progress);
  return std::make_unique<DecoderModel>(std::move(opened.info), opened.architecture.build(builder),
                                        placement.bytes(), placement.owner(), options.num_threads);
}

void check_options(const LoadOptions& options) {
  dense_ops(options.device.type);  // refuses the device before any file is read
  if (options.device.type == DeviceType::kCpu) return;
  device_runtime(options.device);
  if (options.prepack == Prepack::kOn) {
    throw Unsupported(str_cat("prepack: on: the packed form serves CPU kernels only, this is ",
                              to_string(options.device), "; leave it out"));
  }
}

void refuse_vision_without_ops(const ModelInfo& info) {
  if (!info.vision || dense_ops(info.device.type).has_vision_ops()) return;
  throw Unsupported(
      str_cat(info.path, ": ", info.model_type, " takes images, and the operations of ",
              "vision towers are not built for ", info.device, " yet; use --device cpu"));
}

void refuse_compressed_without_ops(const ModelInfo& info, const BuiltModel& model) {
  if (!model.needs_compressed_ops || dense_ops(info.device.type).has_compressed_ops()) return;
  throw Unsupported(str_cat(info.path, ": ", info.model_type,
                            ": compressed attention and hyper-connections are not built for ",
                            info.device, " yet; use --device cpu"));
}

}  // namespace

void Model::forward_and_sample(const ForwardInput& /*input*/, KvCache& /*cache*/,
                               const SampleRequest& /*request*/, std::span<TokenId> /*next*/) {
  throw Unsupported(str_cat("forward_and_sample: models on ", info().device,
                            " give logits; call forward() and draw with Sampler"));
}

std::unique_ptr<Model> Model::from_pretrained(const std::string& path, const LoadOptions& options) {
  check_options(options);
  Opened opened(path, options);
  opened.weights.check_complete();
  refuse_vision_without_ops(opened.info);
  refuse_compressed_without_ops(opened.info, opened.model);
  std::unique_ptr<DecoderModel> model;
  if (options.device.type == DeviceType::kCpu) {
    model = std::make_unique<DecoderModel>(std::move(opened.info), std::move(opened.model),
                                           opened.checkpoint.mapped_bytes(),
                                           opened.checkpoint.owner(), options.num_threads);
    if (options.prepack == Prepack::kOn) model->prepack(opened.checkpoint, options.progress);
  } else {
    model = load_on_device(std::move(opened), options);
  }
  model->choose_at_load(options.experts_implementation, options.decode_experts);
  model->set_graphs(options.graphs);
  return model;
}

std::unique_ptr<Model> AutoModelForImageTextToText::from_pretrained(const std::string& path,
                                                                    const LoadOptions& options) {
  // The config alone says it, before any weight is read.
  const ModelInfo info = inspect_model(path, options).info;
  if (!info.vision) {
    throw Unsupported(str_cat(info.path, ": ", info.model_type, " models take no images; use ",
                              "AutoModelForCausalLM, or a vision model"));
  }
  return Model::from_pretrained(path, options);
}

ModelReport inspect_model(const std::string& path, const LoadOptions& options) {
  Opened opened(path, options);
  ModelReport report;
  report.info = opened.info;
  for (const auto& group : opened.model.groups) {
    report.experts.emplace_back(group->sub_config(), group->query());
  }
  report.used = opened.weights.used();
  report.ignored = opened.weights.ignored();
  report.left_over = opened.weights.left_over();
  report.missing = opened.weights.missing_and_unfit();
  for (const auto* tensors : {&report.used, &report.ignored, &report.left_over}) {
    for (const TensorReport& tensor : *tensors) report.bytes_per_part[tensor.part] += tensor.bytes;
  }
  return report;
}

}  // namespace cadre
