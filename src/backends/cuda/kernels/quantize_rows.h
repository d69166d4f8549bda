// Activations to e4m3 codes and float32 scales on the device, with the bits of quant/activations.h.
#pragma once

#include <cstdint>

#include "cadre/dtype.h"
#include "cadre/storage_format.h"
#include "cadre/stream.h"
#include "cadre/workspace.h"

namespace cadre::cuda {

/// Row r of codes is row r of x quantised in groups of k; its scale of group g goes to
/// scales[r * scale_row_stride + g * scale_group_stride]. Nothing beyond k is written.
struct QuantizeRows {
  DType dtype = DType::kBF16;  // of x: f32, bf16 or f16
  const void* x = nullptr;
  int64_t x_stride = 0;  // elements
  int64_t rows = 0;
  int64_t k = 0;
  const int32_t* num_rows = nullptr;     // device; rows that are there, at most `rows`; null: all
  const int32_t* pair_of_row = nullptr;  // device; row r is x[pair_of_row[r] / top_k]; null: x[r]
  int64_t top_k = 1;
  int64_t group = 128;     // or 32
  float static_scale = 0;  // set: the scale of all, one group; code = e4m3(x / scale)
  uint8_t* codes = nullptr;
  int64_t codes_stride = 0;  // bytes
  // K is cut into `splits` of whole groups of 128, as if each were a matrix of its own: their codes
  // and scales follow each other, row r of split s as row s * rows + r, groups counted in the
  // split.
  int64_t splits = 1;
  // In place of codes: their values in fp16, [rows, k], columns in the order of mx_place() of
  // kernels/hopper_mx_gemm.h; k in multiples of 16.
  uint16_t* placed = nullptr;
  float* scales = nullptr;
  int64_t scale_row_stride = 0;
  int64_t scale_group_stride = 1;
  uint32_t* zeros = nullptr;  // device; num_zeros (up to 32) words to set to 0, for kernels behind
  int num_zeros = 0;
  // The kernel behind may start before the one ahead has ended: for one that reads nothing of that
  // before its own wait.
  bool next_starts_first = false;
};

void quantize_rows(const QuantizeRows& args, const Stream& stream);

/// Groups of a row.
constexpr int64_t num_groups(int64_t k, int64_t group) { return (k + group - 1) / group; }

/// Where quantised rows lie: codes [rows, k] at multiples of 16 bytes, scales [rows, groups].
struct ActivationCodes {
  uint8_t* codes = nullptr;
  int64_t stride = 0;  // bytes between rows of codes
  float* scales = nullptr;
  int64_t groups = 0;
};

/// The group of dynamic activations beside weights of a format.
int64_t activation_group(StorageFormat format);

size_t activation_codes_bytes(int64_t rows, int64_t k, int64_t group);
ActivationCodes allocate_activation_codes(int64_t rows, int64_t k, int64_t group,
                                          Workspace& workspace);

/// Takes x, its rows and `group` or `static_scale` from `args`, the rest from `codes`.
void quantize_rows(QuantizeRows args, const ActivationCodes& codes, const Stream& stream);

}  // namespace cadre::cuda
