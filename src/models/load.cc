// from_pretrained and inspect_model: from a folder to a model, or to a report about it.
#include <utility>

#include "cadre/error.h"
#include "cadre/model.h"
#include "cadre/thread_pool.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"
#include "io/checkpoint.h"
#include "models/decoder_model.h"
#include "models/quantization_config.h"
#include "models/quantized_weights.h"
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
    const bool is_scale = tensor.name.find("scale") != std::string::npos;
    if (!is_scale && is_compute_dtype(tensor.view.dtype())) return tensor.view.dtype();
  }
  return DType::kF32;
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
        quantization(read_quantization(checkpoint.config(), options.quantization_config)),
        weights(checkpoint) {
    const DType dtype = compute_dtype(checkpoint, options);
    ModelBuilder builder(checkpoint.config(), quantization, weights, dtype, options.device,
                         options.progress);
    model = architecture.build(builder);
    info = model_info(checkpoint, architecture, model, dtype, options.device);
  }

  Checkpoint checkpoint;
  Architecture architecture;
  CheckpointQuantization quantization;
  WeightLoader weights;
  BuiltModel model;
  ModelInfo info;
};

// What is copied: on a GPU all, on the CPU what is not read where it lies.
WeightPlacement plan_copies(const Opened& opened) {
  const DType dtype = opened.info.compute_dtype;
  const bool on_cpu = opened.info.device.type == DeviceType::kCpu;
  WeightPlacement placement(opened.info.device, dtype);
  for (const WeightRequest& request : opened.weights.requests()) {
    if (request.quantized.values) {
      placement.add_dequantized(request.name, request.quantized, request.part, request.dtype,
                                request.shape);
    } else if (request.form == WeightForm::kConverted) {
      placement.add_scales(request.name, request.stored, request.part, request.dtype);
    } else if (!on_cpu) {
      const DType wanted = request.form == WeightForm::kFloat32    ? DType::kF32
                           : request.form == WeightForm::kAsStored ? request.stored.dtype()
                                                                   : dtype;
      placement.add(request.name, request.stored, request.part, wanted);
    }
  }
  return placement;
}

// The same model over the copies.
BuiltModel build_over(const WeightPlacement& placement, const Opened& opened) {
  WeightLoader weights(opened.checkpoint, &placement);
  const ProgressCallback no_progress;
  ModelBuilder builder(opened.checkpoint.config(), opened.quantization, weights,
                       opened.info.compute_dtype, opened.info.device, no_progress);
  return opened.architecture.build(builder);
}

// Reads the files where they lie (CPU), but for what is copied.
std::unique_ptr<DecoderModel> load_model(Opened opened, const LoadOptions& options) {
  const bool on_cpu = opened.info.device.type == DeviceType::kCpu;
  WeightPlacement placement = plan_copies(opened);
  if (!placement.empty()) {
    ThreadPool threads(options.num_threads);
    placement.load(threads, options.progress);
    opened.model = build_over(placement, opened);
  }
  const WeightMemory memory{.mapped_bytes = on_cpu ? opened.checkpoint.mapped_bytes() : 0,
                            .copied_bytes = placement.bytes(),
                            .files = on_cpu ? opened.checkpoint.owner() : nullptr,
                            .copies = placement.owner()};
  return std::make_unique<DecoderModel>(std::move(opened.info), std::move(opened.model), memory,
                                        options.num_threads);
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
  check_scale_values(opened.weights);
  refuse_vision_without_ops(opened.info);
  refuse_compressed_without_ops(opened.info, opened.model);
  const Checkpoint checkpoint = opened.checkpoint;
  std::unique_ptr<DecoderModel> model = load_model(std::move(opened), options);
  if (options.prepack == Prepack::kOn) model->prepack(checkpoint, options.progress);
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
  report.notes = opened.weights.notes();
  for (const auto* tensors : {&report.used, &report.ignored, &report.left_over}) {
    for (const TensorReport& tensor : *tensors) report.bytes_per_part[tensor.part] += tensor.bytes;
  }
  return report;
}

}  // namespace cadre
