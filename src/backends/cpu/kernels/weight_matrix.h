// The matrices of a layer's experts as the CPU kernels take them.
#pragma once

#include "backends/cpu/kernels/panel_product.h"
#include "cadre/experts.h"

namespace cadre::cpu {

/// How weights of a format lie in memory.
Element element_of(StorageFormat format);

/// Whether a format has one e8m0 scale per 32 of k of each row.
constexpr bool has_scale_words(StorageFormat format) {
  return format == StorageFormat::kMxFp8 || format == StorageFormat::kFp4;
}

WeightMatrix weight_matrix(const ExpertMatrix& matrix, StorageFormat format,
                           const ScaleLayout& layout);

inline WeightMatrix weight_matrix(const ExpertsWeights& weights, const ExpertMatrix& matrix) {
  return weight_matrix(matrix, weights.format, weights.scale_layout);
}

/// Reasons why scales of this layout do not belong to the format; empty when they do.
std::string scale_layout_fault(StorageFormat format, const ScaleLayout& layout);

}  // namespace cadre::cpu
