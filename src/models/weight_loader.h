// Hands out a checkpoint's tensors by name and keeps the books: what was used for what, what is
// missing or does not fit, what is left over. Faults are gathered, so that one error names them
// all.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/model.h"
#include "cadre/quantization.h"
#include "io/checkpoint.h"
#include "models/weight_placement.h"

namespace cadre {

/// What becomes of a tensor that a model asks for.
enum class WeightForm : uint8_t {
  kComputed,   // a plain weight: as stored on the CPU, in the compute dtype on a GPU
  kFloat32,    // the same, in float32 on a GPU
  kAsStored,   // the same bytes on every device
  kConverted,  // made of what is stored, while the model is loaded
};

/// A tensor that a model asked for.
struct WeightRequest {
  std::string name;
  std::string part;
  WeightForm form = WeightForm::kComputed;
  TensorView stored;               // in the file, under the dtype that it is handed out with
  QuantizedTensor quantized = {};  // kConverted: this, dequantised; absent: scales of another dtype
  std::string scales_name = {};    // with `quantized`
  DType dtype = DType::kF32;       // kConverted: of the result
  Dims shape = {};                 // of what is handed out
};

class WeightLoader {
 public:
  /// `placement`: hand out the copies on a GPU that it holds, in place of the files' own; null:
  /// those.
  explicit WeightLoader(const Checkpoint& checkpoint, const WeightPlacement* placement = nullptr)
      : checkpoint_(checkpoint), placement_(placement) {}

  const Checkpoint& checkpoint() const { return checkpoint_; }
  bool has(std::string_view name) const { return checkpoint_.find(name) != nullptr; }
  /// A tensor whose name begins so.
  bool has_any(std::string_view prefix) const;

  /// The tensor `name`, float32, bfloat16 or float16 of this shape. `part` as in TensorReport. A
  /// tensor that is absent or of another kind is noted as a fault; a view of the expected shape
  /// without data stands in for it.
  TensorView take(const std::string& name, const Dims& shape, std::string_view part);
  /// The same for the few values that a model reads in float32: their copy on a GPU has that dtype.
  /// In a file they may have another.
  TensorView take_float32(const std::string& name, const Dims& shape, std::string_view part);
  /// The same for a table of integers, i32 or i64. At any address.
  TensorView take_integers(const std::string& name, const Dims& shape, std::string_view part);
  /// The bytes of a tensor that is there, under another dtype of the same size.
  TensorView take_bytes(const CheckpointTensor& tensor, DType dtype, std::string_view part,
                        std::string_view format);
  /// What is made of a tensor that is there; `request` without name, part and form. Until load.cc
  /// has made it, a view that nobody may read stands in for it.
  TensorView take_converted(const CheckpointTensor& tensor, WeightRequest request,
                            std::string_view part, std::string_view format);
  /// Notes that a tensor that is there was used, and by what.
  void use(const CheckpointTensor& tensor, std::string_view part, std::string_view format);
  /// Notes that a tensor of this shape is not there.
  void miss(const std::string& name, const Dims& shape);
  /// Notes that a tensor is known and not needed, when it is there.
  void ignore(const std::string& name);
  /// The same for all tensors whose names begin so.
  void ignore_all(std::string_view prefix);
  /// Notes any other fault.
  void add_fault(std::string fault);
  /// Notes a quantised weight that the config says is not.
  void contradict(const std::string& name) { contradicted_.push_back(name); }

  /// Keeps the memory of what is handed out alive: the files', and that of copies.
  std::shared_ptr<const void> owner() const;

  bool ok() const { return missing_.empty() && faults_.empty(); }
  /// Throws CheckpointError naming the missing, the unfit and the left-over tensors.
  void check_complete() const;

  /// In the order of their first request.
  const std::vector<WeightRequest>& requests() const { return requests_; }
  std::vector<TensorReport> used() const { return used_; }
  std::vector<TensorReport> ignored() const;
  std::vector<TensorReport> left_over() const;
  /// What the config says otherwise than the tensors, by which the model goes.
  std::vector<std::string> notes() const;
  /// "name [shape]" of each missing tensor, then the unfit ones with what was found.
  std::vector<std::string> missing_and_unfit() const;

 private:
  using Position = std::vector<CheckpointTensor>::const_iterator;

  Position first_of(std::string_view prefix) const;  // the first that may begin so
  bool begins(Position tensor, std::string_view prefix) const;
  TensorView take_kind(const std::string& name, const Dims& shape, std::string_view part,
                       WeightForm form, bool (*fits)(DType), std::string_view expected);
  TensorView hand_out(WeightRequest request);
  void check_fault_count() const;
  std::vector<const CheckpointTensor*> unused() const;

  const Checkpoint& checkpoint_;
  const WeightPlacement* placement_;
  std::vector<WeightRequest> requests_;
  std::vector<TensorReport> used_;
  std::set<std::string, std::less<>> seen_;     // used or ignored
  std::set<std::string, std::less<>> ignored_;  // unless used too
  std::vector<std::string> contradicted_;
  std::vector<std::string> missing_;
  std::vector<std::string> faults_;
};

}  // namespace cadre
