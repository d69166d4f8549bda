#include "models/weight_loader.h"

#include <algorithm>
#include <utility>

#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

// A config that asks for this many tensors too many is nonsense; gathering on would only take time.
constexpr size_t kMaxFaults = 20000;
// Names in one message.
constexpr size_t kMaxListed = 10;

// Buffers that older checkpoints carry and every implementation computes anew.
bool is_derived(std::string_view name) {
  constexpr std::string_view kSuffix = "rotary_emb.inv_freq";
  return name.size() >= kSuffix.size() && name.substr(name.size() - kSuffix.size()) == kSuffix;
}

TensorReport report(const CheckpointTensor& tensor, std::string_view part,
                    std::string_view format = {}) {
  const DType dtype = tensor.view.dtype();
  return {tensor.name,
          tensor.file,
          std::string(part),
          dtype,
          tensor.view.shape(),
          tensor.view.nbytes(),
          std::string(format.empty() ? name_of(dtype) : format)};
}

std::string listed(const std::vector<std::string>& items) {
  std::string text;
  for (size_t i = 0; i < std::min(items.size(), kMaxListed); ++i) text += "\n  " + items[i];
  if (items.size() > kMaxListed) text += str_cat("\n  and ", items.size() - kMaxListed, " more");
  return text;
}

}  // namespace

TensorView WeightLoader::take_kind(const std::string& name, const Dims& shape,
                                   std::string_view part, WeightForm form, bool (*fits)(DType),
                                   std::string_view expected) {
  const TensorView stand_in(nullptr, DType::kF32, shape);
  const CheckpointTensor* tensor = checkpoint_.find(name);
  if (tensor == nullptr) {
    miss(name, shape);
    return stand_in;
  }
  use(*tensor, part, {});
  if (!(tensor->view.shape() == shape)) {
    add_fault(str_cat(tensor->file, ": tensor \"", name, "\": expected shape ", shape, ", found ",
                      tensor->view.shape(), " (", tensor->view.dtype(), ")"));
    return stand_in;
  }
  if (!fits(tensor->view.dtype())) {
    add_fault(str_cat(tensor->file, ": tensor \"", name, "\": expected ", expected, ", found ",
                      tensor->view.dtype(), " ", tensor->view.shape()));
    return stand_in;
  }
  return hand_out({name, std::string(part), form, tensor->view});
}

void WeightLoader::use(const CheckpointTensor& tensor, std::string_view part,
                       std::string_view format) {
  seen_.insert(tensor.name);
  used_.push_back(report(tensor, part, format));
}

void WeightLoader::miss(const std::string& name, const Dims& shape) {
  missing_.push_back(str_cat(name, " ", shape));
  check_fault_count();
}

TensorView WeightLoader::hand_out(WeightRequest request) {
  if (request.form != WeightForm::kConverted) request.shape = request.stored.shape();
  TensorView view = request.stored;
  if (request.form == WeightForm::kConverted) {
    view = {request.stored.data(), request.dtype, request.shape};
  }
  if (placement_ != nullptr && placement_->holds(request.name)) {
    view = placement_->view(request.name);
  }
  requests_.push_back(std::move(request));
  return view;
}

TensorView WeightLoader::take_bytes(const CheckpointTensor& tensor, DType dtype,
                                    std::string_view part, std::string_view format) {
  CADRE_ASSERT(size_of(dtype) == size_of(tensor.view.dtype()));
  use(tensor, part, format);
  return hand_out({tensor.name, std::string(part), WeightForm::kAsStored,
                   TensorView(tensor.view.data(), dtype, tensor.view.shape())});
}

TensorView WeightLoader::take_converted(const CheckpointTensor& tensor, WeightRequest request,
                                        std::string_view part, std::string_view format) {
  use(tensor, part, format);
  request.name = tensor.name;
  request.part = part;
  request.form = WeightForm::kConverted;
  return hand_out(std::move(request));
}

TensorView WeightLoader::take(const std::string& name, const Dims& shape, std::string_view part) {
  return take_kind(
      name, shape, part, WeightForm::kComputed, [](DType dtype) { return is_compute_dtype(dtype); },
      "float32, bfloat16 or float16");
}

TensorView WeightLoader::take_integers(const std::string& name, const Dims& shape,
                                       std::string_view part) {
  return take_kind(
      name, shape, part, WeightForm::kAsStored,
      [](DType dtype) { return dtype == DType::kI32 || dtype == DType::kI64; }, "int32 or int64");
}

TensorView WeightLoader::take_float32(const std::string& name, const Dims& shape,
                                      std::string_view part) {
  return take_kind(
      name, shape, part, WeightForm::kFloat32, [](DType dtype) { return is_compute_dtype(dtype); },
      "float32, bfloat16 or float16");
}

std::shared_ptr<const void> WeightLoader::owner() const {
  if (placement_ == nullptr) return checkpoint_.owner();
  if (placement_->device().type != DeviceType::kCpu) return placement_->owner();
  using Both = std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>;
  return std::make_shared<const Both>(checkpoint_.owner(), placement_->owner());
}

void WeightLoader::ignore(const std::string& name) {
  if (has(name) && seen_.insert(name).second) ignored_.insert(name);
}

void WeightLoader::ignore_all(std::string_view prefix) {
  for (auto it = first_of(prefix); begins(it, prefix); ++it) ignore(it->name);
}

bool WeightLoader::has_any(std::string_view prefix) const {
  return begins(first_of(prefix), prefix);
}

WeightLoader::Position WeightLoader::first_of(std::string_view prefix) const {
  const std::vector<CheckpointTensor>& tensors = checkpoint_.tensors();  // sorted by name
  return std::lower_bound(
      tensors.begin(), tensors.end(), prefix,
      [](const CheckpointTensor& tensor, std::string_view name) { return tensor.name < name; });
}

bool WeightLoader::begins(Position tensor, std::string_view prefix) const {
  return tensor != checkpoint_.tensors().end() &&
         tensor->name.compare(0, prefix.size(), prefix) == 0;
}

void WeightLoader::add_fault(std::string fault) {
  faults_.push_back(std::move(fault));
  check_fault_count();
}

void WeightLoader::check_fault_count() const {
  if (missing_.size() + faults_.size() > kMaxFaults) check_complete();
}

std::vector<const CheckpointTensor*> WeightLoader::unused() const {
  std::vector<const CheckpointTensor*> result;
  for (const CheckpointTensor& tensor : checkpoint_.tensors()) {
    if (seen_.find(tensor.name) == seen_.end() && !is_derived(tensor.name)) {
      result.push_back(&tensor);
    }
  }
  return result;
}

std::vector<TensorReport> WeightLoader::ignored() const {
  std::vector<TensorReport> result;
  for (const std::string& name : ignored_) {
    result.push_back(report(*checkpoint_.find(name), "unused"));
  }
  return result;
}

std::vector<TensorReport> WeightLoader::left_over() const {
  std::vector<TensorReport> result;
  for (const CheckpointTensor* tensor : unused()) result.push_back(report(*tensor, "unused"));
  return result;
}

std::vector<std::string> WeightLoader::notes() const {
  if (contradicted_.empty()) return {};
  return {str_cat(
      "config.json: quantization_config.modules_to_not_convert names ", contradicted_.size(),
      " weights that are stored quantised, and run so (first: ", contradicted_.front(), ")")};
}

std::vector<std::string> WeightLoader::missing_and_unfit() const {
  std::vector<std::string> result = missing_;
  result.insert(result.end(), faults_.begin(), faults_.end());
  return result;
}

void WeightLoader::check_complete() const {
  std::vector<std::string> extra;
  for (const CheckpointTensor* tensor : unused()) {
    extra.push_back(str_cat(tensor->name, " ", tensor->view.shape(), " ", tensor->view.dtype(),
                            " in ", tensor->file));
  }
  if (ok() && extra.empty()) return;
  std::string message = str_cat("load_checkpoint: ", checkpoint_.folder().string(),
                                ": the weights do not fit config.json");
  if (!faults_.empty()) message += str_cat("\n", faults_.size(), " unfit:", listed(faults_));
  if (!missing_.empty()) {
    message += str_cat("\n", missing_.size(), " missing (name, expected shape):", listed(missing_));
  }
  if (!extra.empty()) {
    message += str_cat("\n", extra.size(), " left over, used by nothing:", listed(extra));
  }
  throw CheckpointError(
      message + "\ncheck config.json or fetch the checkpoint again; cadre inspect lists all");
}

}  // namespace cadre
