// Weights as a checkpoint stores them, plain or quantised: what a weight's own dtype says it is,
// where its scales are, and whether all fits together. Names of scales follow from the weight's:
//   X.weight        X.weight_scale_inv, X.weight_scale, X.scale
//   P (packed)      P_scale_inv, P_scale
//   P_blocks        P_scales (GPT-OSS)
// and so do those of static input scales: X.input_scale, X.activation_scale, P_activation_scale.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cadre/quantization.h"
#include "models/quantization_config.h"
#include "models/weight_loader.h"

namespace cadre {

/// A matrix [N, K], or one for each expert [E, N, K], as the model runs it.
struct StoredWeight {
  StorageFormat format = StorageFormat::kBF16;
  TensorView values;       // plain, or as in QuantizedTensor; without data when there was a fault
  TensorView scales = {};  // F32 or F8_E8M0; absent: plain
  ScaleLayout layout = {};
  ActivationScheme activations = ActivationScheme::kNone;
  std::vector<float> input_scales = {};  // kStatic: one for each matrix
  bool is_quantized() const { return static_cast<bool>(scales); }
  QuantizedTensor tensor() const { return {format, layout, values, scales}; }
};

/// What the rows of a tensor are.
enum class Rows : uint8_t {
  kOneMatrix,
  kTwoMatrices,  // gate above up, half of the rows each: as QuantizedFusedExperts has them
};

class QuantizedWeights {
 public:
  /// `dtype`: what dequantised weights become.
  QuantizedWeights(WeightLoader& loader, const CheckpointQuantization& config, DType dtype)
      : loader_(loader), config_(config), dtype_(dtype) {}

  /// The tensor `name`, logically of this shape ([N, K] or [E, N, K]), as it runs. Faults are
  /// noted in the loader: a weight that is absent or of another shape or dtype; a quantised one
  /// without scales, or with scales of another shape or dtype; scales of a plain one.
  StoredWeight take(const std::string& name, const Dims& shape, std::string_view part,
                    Rows rows = Rows::kOneMatrix) const;
  /// The same for what no kernel reads quantised: it is dequantised where it is.
  TensorView take_plain(const std::string& name, const Dims& shape, std::string_view part) const;

  /// Whether the checkpoint has it, under its own name or as blocks.
  bool has(const std::string& name) const { return loader_.has(name) || has_blocks(name); }
  /// Packed FP4: rows come first, whatever the family does with plain ones.
  bool is_fp4(const std::string& name) const;

 private:
  struct Found;  // a quantised weight and its scales

  StoredWeight take(const std::string& name, const Dims& shape, std::string_view part, Rows rows,
                    bool dequantize) const;
  bool has_blocks(const std::string& name) const;
  StoredWeight take_unquantized(const std::string& name, const Dims& shape,
                                std::string_view part) const;
  bool find(const std::string& name, const Dims& shape, Rows rows, Found& found) const;
  bool find_scales(const std::string& name, const Dims& shape, Rows rows, Found& found) const;
  bool check_scales(const Dims& shape, Rows rows, Found& found) const;
  StoredWeight dequantized(const Found& found, const Dims& shape, std::string_view part) const;
  StoredWeight as_stored(const Found& found, const Dims& shape, std::string_view part) const;
  std::vector<float> take_input_scales(const std::string& name, int64_t count,
                                       std::string_view part) const;

  WeightLoader& loader_;
  const CheckpointQuantization& config_;
  DType dtype_;
};

/// Throws CheckpointError naming the first scale that is not a finite number, and its place. Reads
/// all scales.
void check_scale_values(const WeightLoader& loader);

}  // namespace cadre
