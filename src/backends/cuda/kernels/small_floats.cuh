// e4m3, e2m1 and e8m0 on the device, with the bits of quant/float8.h.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace cadre::cuda {

/// Of the two codes in the low 16 bits, the lower one first. Exact.
__device__ inline __half2 e4m3_pair(uint32_t codes) {
  const __half2_raw raw =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return raw;
}

/// Nearest, ties to even; beyond the largest the largest.
__device__ inline uint32_t to_e4m3(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

/// Of the low four bits. Exact: the bits of a float 2^126 times too small.
__device__ inline float e2m1_value(uint32_t nibble) {
  return __uint_as_float((nibble & 8u) << 28 | (nibble & 7u) << 22) * 0x1p126f;
}

/// Exact; 255 is NaN.
__device__ inline float e8m0_value(uint8_t code) {
  if (code == 255) return __uint_as_float(0x7fc00000u);
  return code == 0 ? 0x1p-127f : __uint_as_float(uint32_t{code} << 23);
}

}  // namespace cadre::cuda
