#include "backends/cpu/kernels/weight_matrix.h"

#include "core/str_cat.h"

namespace cadre::cpu {

Element element_of(StorageFormat format) {
  switch (format) {
    case StorageFormat::kF32:
      return Element::kF32;
    case StorageFormat::kF16:
      return Element::kF16;
    case StorageFormat::kBF16:
      return Element::kBF16;
    case StorageFormat::kFp8Block:
    case StorageFormat::kFp8Tensor:
    case StorageFormat::kMxFp8:
      return Element::kE4m3;
    case StorageFormat::kFp4:
      break;
  }
  return Element::kE2m1;
}

WeightMatrix weight_matrix(const ExpertMatrix& matrix, StorageFormat format,
                           const ScaleLayout& layout) {
  WeightMatrix result{matrix.data, matrix.row_stride, matrix.col_stride, element_of(format), {}};
  if (!is_quantized(format)) return result;
  result.scales = {matrix.scales,
                   matrix.scale_row_stride,
                   matrix.scale_col_stride,
                   matrix.scale_row_offset,
                   layout.block_rows,
                   layout.block_cols,
                   layout.dtype == DType::kF8E8M0,
                   has_scale_words(format)};
  return result;
}

std::string scale_layout_fault(StorageFormat format, const ScaleLayout& layout) {
  const bool is_mx = has_scale_words(format);
  const bool is_tensor = format == StorageFormat::kFp8Tensor;
  const bool fits_dtype = layout.dtype == DType::kF8E8M0 || (layout.dtype == DType::kF32 && !is_mx);
  const bool fits_blocks = is_mx       ? layout.block_rows == 1 && layout.block_cols == 32
                           : is_tensor ? layout.block_rows == 0 && layout.block_cols == 0
                                       : layout.block_rows >= 0 && layout.block_cols >= 0;
  if (fits_dtype && fits_blocks) return "";
  return str_cat(name_of(format), " weights have ",
                 is_mx       ? "float8_e8m0 scales of blocks of 1 x 32"
                 : is_tensor ? "one float32 or float8_e8m0 scale a matrix"
                             : "float32 or float8_e8m0 scales",
                 ", not ", name_of(layout.dtype), " scales of blocks of ", layout.block_rows, " x ",
                 layout.block_cols);
}

}  // namespace cadre::cpu
