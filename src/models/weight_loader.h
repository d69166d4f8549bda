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
#include "io/checkpoint.h"
#include "models/weight_placement.h"

namespace cadre {

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
  bool is_float32(const std::string& name) const { return float32_.count(name) != 0; }
  /// Notes that a tensor is known and not needed, when it is there.
  void ignore(const std::string& name);
  /// The same for all tensors whose names begin so.
  void ignore_all(std::string_view prefix);
  /// Notes any other fault.
  void add_fault(std::string fault);

  /// Keeps the memory of what is handed out alive.
  std::shared_ptr<const void> owner() const {
    return placement_ != nullptr ? placement_->owner() : checkpoint_.owner();
  }

  bool ok() const { return missing_.empty() && faults_.empty(); }
  /// Throws CheckpointError naming the missing, the unfit and the left-over tensors.
  void check_complete() const;

  std::vector<TensorReport> used() const { return used_; }
  std::vector<TensorReport> ignored() const;
  std::vector<TensorReport> left_over() const;
  /// "name [shape]" of each missing tensor, then the unfit ones with what was found.
  std::vector<std::string> missing_and_unfit() const;

 private:
  using Position = std::vector<CheckpointTensor>::const_iterator;

  Position first_of(std::string_view prefix) const;  // the first that may begin so
  bool begins(Position tensor, std::string_view prefix) const;
  TensorView take_kind(const std::string& name, const Dims& shape, std::string_view part,
                       bool (*fits)(DType), std::string_view expected);
  void check_fault_count() const;
  std::vector<const CheckpointTensor*> unused() const;

  const Checkpoint& checkpoint_;
  const WeightPlacement* placement_;
  std::vector<TensorReport> used_;
  std::set<std::string, std::less<>> seen_;     // used or ignored
  std::set<std::string, std::less<>> ignored_;  // unless used too
  std::set<std::string, std::less<>> float32_;
  std::vector<std::string> missing_;
  std::vector<std::string> faults_;
};

}  // namespace cadre
