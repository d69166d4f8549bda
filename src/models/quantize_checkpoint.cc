// quantize_checkpoint: a plan of all output tensors first, so that every file's header can be
// written before its data, then one weight after the other.
#include "cadre/quantize_checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "cadre/error.h"
#include "cadre/quantization.h"
#include "cadre/thread_pool.h"
#include "core/str_cat.h"
#include "io/checkpoint.h"
#include "io/file_writer.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFp4Group = 32;

/// What becomes of a tensor of the source.
enum class Role : uint8_t { kCopy, kFp8, kFp4, kMxfp4 };

struct Item {
  const CheckpointTensor* source = nullptr;
  Role role = Role::kCopy;
  TensorView weight;                // [N, K] or [E, N, K], any strides; quantised roles only
  std::vector<TensorSpec> outputs;  // a copy, or scales and values

  size_t bytes() const {
    size_t sum = 0;
    for (const TensorSpec& spec : outputs)
      sum += TensorView(nullptr, spec.dtype, spec.shape).nbytes();
    return sum;
  }
};

struct Shard {
  std::string file;
  std::vector<const Item*> items;
};

bool ends_with_part(std::string_view name, std::string_view part) {
  return name == part || (name.ends_with(part) && name[name.size() - part.size() - 1] == '.');
}

bool starts_with_part(std::string_view name, std::string_view part) {
  return name == part || (name.starts_with(part) && name[part.size()] == '.');
}

/// Of a weight: its name without ".weight"; of experts the module that holds them all, as
/// Transformers names it.
std::string module_of(std::string_view name, bool is_expert) {
  if (name.ends_with(".weight")) name.remove_suffix(std::string_view(".weight").size());
  if (!is_expert) return std::string(name);
  const size_t experts = name.find(".experts.");
  const size_t end = experts == std::string_view::npos ? name.rfind('.') : experts;
  return std::string(name.substr(0, end)) + ".experts";
}

// Linears that stay in every format: few values, or read in a form of their own.
bool always_plain(std::string_view module) {
  for (const std::string_view part : {"shared_expert_gate", "wo_a", "o_a_proj"}) {
    if (ends_with_part(module, part)) return true;
  }
  return module.find(".compressor.") != std::string_view::npos ||
         module.find(".indexer.") != std::string_view::npos;
}

TensorView transposed(const TensorView& view) {
  const Dims shape{view.dim(0), view.dim(2), view.dim(1)};
  const Dims strides{view.stride(0), view.stride(2), view.stride(1)};
  return {view.data(), view.dtype(), shape, strides};
}

int64_t rows_of(const TensorView& weight) { return weight.dim(weight.rank() - 2); }
int64_t cols_of(const TensorView& weight) { return weight.dim(weight.rank() - 1); }

Dims with_sizes(const TensorView& weight, std::initializer_list<int64_t> last) {
  std::vector<int64_t> sizes;
  if (weight.rank() == 3) sizes.push_back(weight.dim(0));
  sizes.insert(sizes.end(), last);
  return Dims(std::span<const int64_t>(sizes));
}

void refuse_quantized(const Checkpoint& checkpoint) {
  const std::string remedy =
      "; it loads as it is (see cadre inspect); to change its format, quantise the checkpoint that "
      "it was made from";
  const ConfigReader& config = checkpoint.config();
  if (config.has("quantization_config")) {
    throw Unsupported(
        str_cat(config.origin(),
                ": expected a checkpoint with plain weights, this one is quantised already "
                "(quant_method \"",
                config.object("quantization_config").text_or("quant_method", "?"), "\")", remedy));
  }
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    const DType dtype = tensor.view.dtype();
    if (dtype != DType::kF8E4M3 && dtype != DType::kF8E5M2 && dtype != DType::kF8E8M0) continue;
    throw Unsupported(str_cat(tensor.file, ": tensor ", quote(tensor.name),
                              ": expected plain weights, found ", dtype, remedy));
  }
}

void require_complete(const ModelReport& report) {
  if (report.missing.empty() && report.left_over.empty()) return;
  throw CheckpointError(str_cat(
      report.info.path, ": expected exactly the tensors of ", report.info.architecture, ", ",
      report.missing.empty() ? str_cat("left over: ", report.left_over.front().name)
                             : str_cat("missing or unfit: ", report.missing.front()),
      "; cadre inspect lists all"));
}

class Plan {
 public:
  Plan(const Checkpoint& checkpoint, const ModelReport& report, const QuantizeOptions& options)
      : checkpoint_(checkpoint), report_(report), options_(options) {
    for (const auto& [sub_config, query] : report.experts) experts_.push_back(query.config);
    if (experts_.empty()) {
      throw Unsupported(str_cat(report.info.path, ": the model has no experts"));
    }
    check_family();
    layout_ = choose_layout();
    find_modules();
    check_names();
    make_items();
  }

  const std::vector<Item>& items() const { return items_; }
  bool is_mxfp4() const { return experts_.front().has_bias; }  // GPT-OSS

  StorageFormat format() const {
    return options_.format == CheckpointFormat::kFp4 ? StorageFormat::kFp4
                                                     : StorageFormat::kFp8Block;
  }
  const ScaleLayout& layout() const { return layout_; }
  const std::vector<std::string>& not_converted() const { return not_converted_; }

  /// What config.json says of it.
  Json quantization_config() const {
    if (is_mxfp4()) {
      return {{"quant_method", "mxfp4"}, {"modules_to_not_convert", not_converted_}};
    }
    const int64_t block = format() == StorageFormat::kFp4 ? 128 : layout_.block_rows;
    Json json = {{"quant_method", "fp8"},
                 {"fmt", "e4m3"},
                 {"activation_scheme", "dynamic"},
                 {"weight_block_size", {block, block}},
                 {"modules_to_not_convert", not_converted_}};
    if (layout_.dtype == DType::kF8E8M0) json["scale_fmt"] = "ue8m0";
    return json;
  }

 private:
  // What Transformers' modules for quantised experts do not have.
  void check_family() const {
    if (!is_mxfp4() || options_.format == CheckpointFormat::kFp4) return;
    throw Unsupported(str_cat(report_.info.path, ": experts with biases (", report_.info.model_type,
                              ") cannot be stored as fp8, Transformers has no such form; use "
                              "--format fp4 (MXFP4)"));
  }

  ScaleLayout choose_layout() const {
    if (options_.format == CheckpointFormat::kFp4) {
      require_multiples(kFp4Group);
      return {DType::kF8E8M0, 1, kFp4Group};
    }
    const DType dtype = options_.format == CheckpointFormat::kFp8 ? DType::kF32 : DType::kF8E8M0;
    for (const int64_t block : {128, 64, 32, 16, 8}) {
      if (divides(block)) return {dtype, block, block};
    }
    require_multiples(8);
    return {};
  }

  bool divides(int64_t block) const {
    return std::all_of(experts_.begin(), experts_.end(), [&](const ExpertsConfig& c) {
      return c.hidden_size % block == 0 && c.intermediate_size % block == 0;
    });
  }

  void require_multiples(int64_t block) const {
    if (divides(block)) return;
    const ExpertsConfig& c = experts_.front();
    throw Unsupported(str_cat(report_.info.path,
                              ": expected experts whose hidden and intermediate ",
                              "size are multiples of ", block, ", found ", c.hidden_size, " and ",
                              c.intermediate_size, block == kFp4Group ? "; use --format fp8" : ""));
  }

  struct Module {
    bool is_expert = false;
    bool is_dense = false;  // a linear that the format would convert
    bool stays = false;
  };

  void find_modules() {
    for (const TensorReport& tensor : report_.used) {
      const bool is_weight = tensor.name.ends_with(".weight");
      if (tensor.part == "experts") {
        if (tensor.shape.rank() == 3 || (is_weight && tensor.shape.rank() == 2)) {
          modules_[module_of(tensor.name, true)].is_expert = true;
          experts_tensors_.insert(tensor.name);
        }
        continue;
      }
      const bool is_linear =
          tensor.part == "attention" || tensor.part == "mlp" || tensor.part == "shared expert";
      if (is_linear && is_weight && tensor.shape.rank() == 2) find_linear(tensor);
    }
  }

  void find_linear(const TensorReport& tensor) {
    Module& module = modules_[module_of(tensor.name, false)];
    module.is_dense = true;
    const bool fits =
        tensor.shape[0] % layout_.block_rows == 0 && tensor.shape[1] % layout_.block_cols == 0;
    module.stays = options_.format == CheckpointFormat::kFp4 || !fits ||
                   always_plain(module_of(tensor.name, false));
  }

  // Applies the user's list and gathers the names for config.json.
  void check_names() {
    for (const std::string& name : options_.modules_to_not_convert) {
      bool found = false;
      for (auto& [module, state] : modules_) {
        const bool fits = starts_with_part(module, name) || ends_with_part(module, name);
        state.stays = state.stays || fits;
        found = found || fits;
      }
      if (found) continue;
      throw InvalidArgument(
          str_cat("modules_to_not_convert: ", quote(name),
                  ": no linear or experts module has such a name; cadre inspect ",
                  "--tensors lists the tensors, a module is one without .weight"));
    }
    require_all_experts_alike();
    gather_not_converted();
  }

  void require_all_experts_alike() {
    const Module* first = nullptr;
    for (const auto& [name, module] : modules_) {
      if (!module.is_expert) continue;
      if (first == nullptr) first = &module;
      if (first->stays == module.stays) continue;
      throw InvalidArgument(
          "modules_to_not_convert: leaves out the experts of some layers; all "
          "layers' experts have one format: name none or all (\"experts\")");
    }
  }

  // As DeepSeek-V4 has them on the hub: layers.0.attn.wo_a for self_attn.o_a_proj.
  bool has_short_names() const {
    return std::any_of(report_.used.begin(), report_.used.end(), [](const TensorReport& tensor) {
      return tensor.name.find(".attn.wo_a.") != std::string::npos;
    });
  }

  void gather_not_converted() {
    if (is_mxfp4()) {  // as GPT-OSS's own checkpoints say it
      not_converted_ = {"model.layers.*.self_attn", "model.layers.*.mlp.router",
                        "model.embed_tokens", "lm_head"};
      return;
    }
    not_converted_ = {"lm_head"};
    if (has_short_names()) {
      // Transformers does not translate these into its own; what follows are patterns of its names.
      const bool is_fp4 = options_.format == CheckpointFormat::kFp4;
      for (const char* pattern :
           {is_fp4 ? ".*self_attn" : ".*o_a_proj", is_fp4 ? ".*shared_experts" : ".*compressor"}) {
        not_converted_.emplace_back(pattern);
      }
    }
    if (report_.info.vision) not_converted_.emplace_back("model.visual");
    for (const auto& [name, module] : modules_) {
      if (module.stays) not_converted_.push_back(name);
    }
  }

  void make_items() {
    bool any = false;
    for (const CheckpointTensor& tensor : checkpoint_.tensors()) {
      items_.push_back(item_of(tensor));
      any = any || items_.back().role != Role::kCopy;
    }
    if (any) return;
    throw InvalidArgument("modules_to_not_convert: leaves nothing to quantise");
  }

  Item item_of(const CheckpointTensor& tensor) {
    const bool is_expert = experts_tensors_.count(tensor.name) != 0;
    const auto module = modules_.find(module_of(tensor.name, is_expert));
    const bool is_weight = is_expert || (tensor.name.ends_with(".weight") &&
                                         module != modules_.end() && module->second.is_dense);
    Item item;
    item.source = &tensor;
    if (!is_weight || module->second.stays) {
      item.outputs = {{tensor.name, tensor.view.dtype(), tensor.view.shape()}};
      return item;
    }
    item.weight = is_expert && tensor.view.rank() == 3 && experts_.front().is_transposed
                      ? transposed(tensor.view)
                      : tensor.view;
    if (options_.format != CheckpointFormat::kFp4) {
      item.role = Role::kFp8;
    } else {
      item.role = is_mxfp4() ? Role::kMxfp4 : Role::kFp4;
    }
    item.outputs = outputs_of(item);
    return item;
  }

  // Scales first: they may be four bytes wide, and values keep the file aligned to that.
  std::vector<TensorSpec> outputs_of(const Item& item) const {
    const std::string& name = item.source->name;
    const int64_t n = rows_of(item.weight), k = cols_of(item.weight);
    if (item.role == Role::kMxfp4) {
      return {{name + "_scales", DType::kU8, with_sizes(item.weight, {n, k / kFp4Group})},
              {name + "_blocks", DType::kU8, with_sizes(item.weight, {n, k / kFp4Group, 16})}};
    }
    const std::string scales = name + "_scale_inv";
    const Dims blocks = with_sizes(item.weight, {n / layout_.block_rows, k / layout_.block_cols});
    if (item.role == Role::kFp4) {
      return {{scales, layout_.dtype, blocks},
              {name, DType::kI8, with_sizes(item.weight, {n, k / 2})}};
    }
    return {{scales, layout_.dtype, blocks},
            {name, DType::kF8E4M3, with_sizes(item.weight, {n, k})}};
  }

  const Checkpoint& checkpoint_;
  const ModelReport& report_;
  const QuantizeOptions& options_;
  std::vector<ExpertsConfig> experts_;
  ScaleLayout layout_;
  std::map<std::string, Module> modules_;
  std::set<std::string> experts_tensors_;
  std::vector<std::string> not_converted_;
  std::vector<Item> items_;
};

// In the order of names, as many as fit in `limit` bytes each.
std::vector<Shard> into_shards(const std::vector<Item>& items, size_t limit) {
  std::vector<Shard> shards(1);
  size_t bytes = 0;
  for (const Item& item : items) {
    if (bytes + item.bytes() > limit && bytes > 0) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().items.push_back(&item);
    bytes += item.bytes();
  }
  const auto five = [](size_t number) {
    const std::string text = std::to_string(number);
    return std::string(text.size() < 5 ? 5 - text.size() : 0, '0') + text;
  };
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].file = shards.size() == 1 ? "model.safetensors"
                                        : str_cat("model-", five(i + 1), "-of-",
                                                  five(shards.size()), ".safetensors");
    // Whatever is no multiple of four bytes long comes last and leaves the others aligned.
    std::stable_partition(shards[i].items.begin(), shards[i].items.end(),
                          [](const Item* item) { return item->bytes() % 4 == 0; });
  }
  return shards;
}

/// A folder that becomes `target` with commit(), and is removed with all it holds without.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& target) : target_(target) {
    const fs::path parent = target.has_parent_path() ? target.parent_path() : fs::path(".");
    std::string pattern = (parent / ("." + target.filename().string() + ".XXXXXX")).string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      throw Error(str_cat("cannot make a folder in ", parent.string(), ": ",
                          std::error_code(errno, std::generic_category()).message(),
                          "; choose a place where you may write"));
    }
    path_ = pattern;
    fs::permissions(path_, fs::perms::owner_all | fs::perms::group_read | fs::perms::group_exec |
                               fs::perms::others_read | fs::perms::others_exec);
  }
  ~NewFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const fs::path& path() const { return path_; }
  void commit() {
    std::error_code error;
    fs::rename(path_, target_, error);
    if (error) {
      throw Error(str_cat("cannot give the finished folder its name ", target_.string(), ": ",
                          error.message(), "; choose a name that is not taken"));
    }
    path_.clear();
  }

 private:
  fs::path target_;
  fs::path path_;
};

// Tokenizer, generation config, licence: files that are neither weights in some form nor hidden.
std::vector<fs::path> other_files(const fs::path& folder) {
  static const std::set<std::string> kWeights = {
      ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".ckpt", ".msgpack"};
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const bool is_index = name.ends_with(".index.json");
    if (!entry.is_regular_file() || name.starts_with(".") || name == "config.json" || is_index ||
        kWeights.count(entry.path().extension().string()) != 0) {
      continue;
    }
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

void require_space(const fs::path& folder, size_t bytes) {
  std::error_code error;
  const fs::space_info space = fs::space(folder, error);
  if (error || space.available >= bytes) return;
  throw Error(str_cat("the quantised checkpoint needs ", bytes, " bytes in ",
                      folder.parent_path().string(), ", ", space.available,
                      " are free; free space on that disk or choose another place"));
}

void write_text(const fs::path& path, const std::string& text) {
  FileWriter writer(path, text.size());
  writer.write(std::as_bytes(std::span(text)));
  writer.commit();
}

class CheckpointQuantizer {
 public:
  CheckpointQuantizer(const Checkpoint& checkpoint, const Plan& plan,
                      const QuantizeOptions& options)
      : checkpoint_(checkpoint), plan_(plan), options_(options), threads_(options.num_threads) {}

  void write(const fs::path& folder, QuantizeReport& report) {
    const std::vector<Shard> shards = into_shards(plan_.items(), options_.shard_bytes);
    for (const Shard& shard : shards) {
      write_shard(folder / shard.file, shard);
      report.files.push_back(shard.file);
    }
    if (shards.size() > 1) {
      report.files.emplace_back("model.safetensors.index.json");
      write_text(folder / report.files.back(), index_of(shards).dump(2) + "\n");
    }
    for (const fs::path& file : other_files(checkpoint_.folder())) {
      fs::copy_file(file, folder / file.filename());
      report.files.push_back(file.filename().string());
    }
    report.files.emplace_back("config.json");
    write_text(folder / "config.json", config().dump(2) + "\n");
  }

 private:
  void write_shard(const fs::path& path, const Shard& shard) {
    std::vector<TensorSpec> specs;
    for (const Item* item : shard.items) {
      specs.insert(specs.end(), item->outputs.begin(), item->outputs.end());
    }
    SafetensorsWriter writer(path, std::move(specs), {{"format", "pt"}});
    for (const Item* item : shard.items) {
      write_item(*item, writer);
      checkpoint_.release(item->source->view.data(), item->source->view.nbytes());
      if (options_.progress) {
        options_.progress("quantising", ++done_, static_cast<int64_t>(plan_.items().size()));
      }
    }
    writer.commit();
  }

  void write_item(const Item& item, SafetensorsWriter& writer) {
    if (item.role == Role::kCopy) return writer.write(item.source->name, item.source->view);
    const QuantizedWeight weight = quantized(item);
    const void* parts[] = {weight.scales->data(), weight.values->data()};
    for (size_t i = 0; i < 2; ++i) {
      const TensorSpec& spec = item.outputs[i];
      writer.write(spec.name, TensorView(parts[i], spec.dtype, spec.shape));  // the same bytes
    }
  }

  QuantizedWeight quantized(const Item& item) {
    try {
      return quantize(item.weight, plan_.format(), plan_.layout(), &threads_);
    } catch (const InvalidArgument& error) {
      throw CheckpointError(
          str_cat(item.source->file, ": tensor ", quote(item.source->name), ": ", error.what()));
    }
  }

  static Json index_of(const std::vector<Shard>& shards) {
    size_t total = 0;
    std::map<std::string, std::string> files;
    for (const Shard& shard : shards) {
      for (const Item* item : shard.items) {
        total += item->bytes();
        for (const TensorSpec& spec : item->outputs) files[spec.name] = shard.file;
      }
    }
    return {{"metadata", {{"total_size", total}}}, {"weight_map", files}};
  }

  Json config() const {
    Json json = checkpoint_.config().json();
    if (plan_.format() == StorageFormat::kFp4 && !plan_.is_mxfp4()) {
      (json.contains("text_config") ? json["text_config"] : json)["expert_dtype"] = "fp4";
    }
    json["quantization_config"] = plan_.quantization_config();
    return json;
  }

  const Checkpoint& checkpoint_;
  const Plan& plan_;
  const QuantizeOptions& options_;
  ThreadPool threads_;
  int64_t done_ = 0;
};

QuantizeReport count(const Plan& plan) {
  QuantizeReport report;
  if (plan.format() == StorageFormat::kFp8Block) report.block_size = plan.layout().block_rows;
  report.not_converted = plan.not_converted();
  for (const Item& item : plan.items()) {
    ++(item.role == Role::kCopy ? report.num_kept : report.num_quantized);
    report.bytes_before += item.source->view.nbytes();
    report.bytes_after += item.bytes();
    for (const TensorSpec& spec : item.outputs) {
      report.bytes_per_dtype[std::string(name_of(spec.dtype))] +=
          TensorView(nullptr, spec.dtype, spec.shape).nbytes();
    }
  }
  return report;
}

void require_free_name(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(folder, ignored))) return;
  throw InvalidArgument(str_cat(folder.string(),
                                ": expected a folder that does not exist yet, this ",
                                "name is taken; give another one or remove it first"));
}

}  // namespace

QuantizeReport quantize_checkpoint(const std::string& model, const fs::path& folder,
                                   const QuantizeOptions& options) {
  // "out/" names the folder out.
  const fs::path target = folder.has_filename() ? folder : folder.parent_path();
  if (target.empty()) throw InvalidArgument("quantize_checkpoint: expected a folder, got \"\"");
  require_free_name(target);
  const Checkpoint checkpoint = Checkpoint::open(resolve_model_path(model, options.revision));
  refuse_quantized(checkpoint);
  const ModelReport inspected = inspect_model(checkpoint.folder().string());
  require_complete(inspected);
  const Plan plan(checkpoint, inspected, options);
  QuantizeReport report = count(plan);
  NewFolder output(target);
  require_space(output.path(), report.bytes_after);
  CheckpointQuantizer(checkpoint, plan, options).write(output.path(), report);
  output.commit();
  return report;
}

}  // namespace cadre
