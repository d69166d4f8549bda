// The device's codes and scales against those of quant/activations.h, bit by bit.
#include "backends/cuda/kernels/quantize_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cadre/float16.h"
#include "core/str_cat.h"
#include "quant/activations.h"
#include "support/gpu.h"

namespace cadre::cuda {
namespace {

using test::Gpu;

constexpr uint8_t kUntouched = 0xaa;

struct RowsCase {
  DType dtype = DType::kF32;
  int64_t rows = 5;
  int64_t k = 320;
  int64_t gap = 0;    // elements between rows of x
  int64_t shift = 0;  // elements before the first, off alignment
  int64_t group = 128;
  float static_scale = 0;
  bool gather = false;
  bool count_on_device = false;
  bool groups_first = false;  // scales [groups, rows]
};

void set(const MutableTensorView& t, int64_t i, float value) {
  if (t.dtype() == DType::kF32) t.as<float>()[i] = value;
  if (t.dtype() == DType::kBF16) t.as<BFloat16>()[i] = BFloat16(value);
  if (t.dtype() == DType::kF16) t.as<Float16>()[i] = Float16(value);
}

float get(const TensorView& t, int64_t i) {
  if (t.dtype() == DType::kF32) return t.as<float>()[i];
  if (t.dtype() == DType::kBF16) return static_cast<float>(t.as<BFloat16>()[i]);
  return static_cast<float>(t.as<Float16>()[i]);
}

// Groups of many magnitudes, zeros, subnormals, NaN and infinities.
float value_at(int64_t row, int64_t k, std::mt19937& random) {
  std::normal_distribution<float> normal;
  switch ((row * 7 + k / 32) % 11) {
    case 0:
      return 0;
    case 1:
      return normal(random) * 1e-12f;
    case 2:
      return normal(random) * 1e-39f;
    case 3:
      return row == 3 && k % 32 == 5 ? std::numeric_limits<float>::quiet_NaN() : normal(random);
    case 4:
      return row == 4 && k % 32 == 7 ? -std::numeric_limits<float>::infinity() : normal(random);
    case 5:
      return normal(random) * 3e4f;
    default:
      return normal(random) * std::exp2(static_cast<float>(k % 9) - 5);
  }
}

bool same_code(uint8_t a, uint8_t b) {
  return a == b || ((a & 0x7f) == 0x7f && (b & 0x7f) == 0x7f);
}
bool same_scale(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void check(const RowsCase& c) {
  const Gpu gpu;
  std::mt19937 random(5);
  const int64_t x_rows = c.gather ? 7 : c.rows;
  const int64_t x_stride = c.k + c.gap;
  const Tensor x(c.dtype, {c.shift + x_rows * x_stride});
  for (int64_t i = 0; i < x->numel(); ++i) set(x, i, std::numeric_limits<float>::quiet_NaN());
  for (int64_t r = 0; r < x_rows; ++r) {
    for (int64_t k = 0; k < c.k; ++k) {
      set(x, c.shift + r * x_stride + k, value_at(r, k, random));
    }
  }
  constexpr int64_t kTopK = 3;
  const Tensor pairs(DType::kI32, {c.rows});
  for (int64_t r = 0; r < c.rows; ++r) {
    pairs->as<int32_t>()[r] =
        static_cast<int32_t>(random() % static_cast<uint64_t>(x_rows * kTopK));
  }
  const int64_t there = c.count_on_device ? c.rows - 2 : c.rows;
  const Tensor count(DType::kI32, {1});
  count->as<int32_t>()[0] = static_cast<int32_t>(there);
  const int64_t groups = c.static_scale != 0 ? 1 : num_groups(c.k, c.group);
  const int64_t codes_stride = c.k + c.gap;
  const Tensor x_gpu = gpu.to_device(x);
  const Tensor pairs_gpu = gpu.to_device(pairs);
  const Tensor count_gpu = gpu.to_device(count);
  const Tensor codes(DType::kU8, {c.rows * codes_stride}, Gpu::device());
  const Tensor scales(DType::kF32, {c.rows * groups}, Gpu::device());
  Gpu::runtime().fill(codes->mutable_data(), kUntouched, codes->nbytes(), gpu.stream());

  QuantizeRows args;
  args.dtype = c.dtype;
  args.x =
      static_cast<const char*>(x_gpu->data()) + static_cast<size_t>(c.shift) * size_of(c.dtype);
  args.x_stride = x_stride;
  args.rows = c.rows;
  args.k = c.k;
  if (c.count_on_device) args.num_rows = count_gpu->as<int32_t>();
  if (c.gather) args.pair_of_row = pairs_gpu->as<int32_t>();
  args.top_k = kTopK;
  args.group = c.group;
  args.static_scale = c.static_scale;
  args.codes = static_cast<uint8_t*>(codes->mutable_data());
  args.codes_stride = codes_stride;
  args.scales = static_cast<float*>(scales->mutable_data());
  args.scale_row_stride = c.groups_first ? 1 : groups;
  args.scale_group_stride = c.groups_first ? c.rows : 1;
  quantize_rows(args, gpu.stream());
  const Tensor got_codes = gpu.to_host(codes);
  const Tensor got_scales = gpu.to_host(scales);

  std::vector<float> row(static_cast<size_t>(c.k));
  std::vector<uint8_t> expected(row.size());
  std::vector<float> expected_scales(static_cast<size_t>(groups));
  for (int64_t r = 0; r < there; ++r) {
    const int64_t source = c.gather ? pairs->as<int32_t>()[r] / kTopK : r;
    for (int64_t k = 0; k < c.k; ++k) {
      row[static_cast<size_t>(k)] = get(x, c.shift + source * x_stride + k);
    }
    if (c.static_scale != 0) {
      quantize_activations(row.data(), c.k, c.static_scale, expected.data());
      expected_scales[0] = c.static_scale;
    } else {
      quantize_activations(row.data(), c.k, c.group, expected.data(), expected_scales.data());
    }
    for (int64_t k = 0; k < codes_stride; ++k) {
      const uint8_t got = got_codes->as<uint8_t>()[r * codes_stride + k];
      if (k >= c.k) {
        ASSERT_EQ(got, kUntouched) << "row " << r << " beyond k";
      } else {
        ASSERT_TRUE(same_code(got, expected[static_cast<size_t>(k)]))
            << "row " << r << " k " << k << " value " << row[static_cast<size_t>(k)];
      }
    }
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t at = r * args.scale_row_stride + g * args.scale_group_stride;
      ASSERT_TRUE(same_scale(got_scales->as<float>()[at], expected_scales[static_cast<size_t>(g)]))
          << "row " << r << " group " << g;
    }
  }
  for (int64_t i = there * codes_stride; i < codes->numel(); ++i) {
    ASSERT_EQ(got_codes->as<uint8_t>()[i], kUntouched) << "a row that is not there";
  }
}

TEST(QuantizeRows, HasTheBitsOfTheHost) {
  CADRE_REQUIRE_GPU();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t group : {128, 32}) {
      for (const int64_t k : {1, 31, 64, 96, 128, 160, 192, 320, 576, 768, 7168}) {
        SCOPED_TRACE(str_cat(name_of(dtype), " group ", group, " k ", k));
        check({.dtype = dtype, .rows = 23, .k = k, .group = group});
      }
    }
  }
}

TEST(QuantizeRows, TakesEveryLayout) {
  CADRE_REQUIRE_GPU();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    check({.dtype = dtype, .gap = 3, .shift = 1});
    check({.dtype = dtype, .rows = 300, .gap = 16, .groups_first = true});
    check({.dtype = dtype, .rows = 90, .gather = true});
    check({.dtype = dtype, .rows = 90, .count_on_device = true});
  }
}

TEST(QuantizeRows, StaticScales) {
  CADRE_REQUIRE_GPU();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const float scale : {0.013f, 1.0f, 700.0f}) {
      check({.dtype = dtype, .rows = 9, .k = 200, .static_scale = scale});
    }
  }
}

// Every rounding of e4m3: a scale of one, values between all neighbours.
TEST(QuantizeRows, RoundsAsTheHostDoes) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  const int64_t k = 1 << 16;  // all upper halves of a float32
  const Tensor x(DType::kF32, {k});
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t bits = static_cast<uint32_t>(i) << 16 | static_cast<uint32_t>(i % 3) * 0x7fffu;
    std::memcpy(x->as<float>() + i, &bits, sizeof(bits));
  }
  const Tensor x_gpu = gpu.to_device(x);
  const Tensor codes(DType::kU8, {k}, Gpu::device());
  const Tensor scale(DType::kF32, {1}, Gpu::device());
  QuantizeRows args;
  args.dtype = DType::kF32;
  args.x = x_gpu->data();
  args.rows = 1;
  args.k = k;
  args.static_scale = 1;
  args.codes = static_cast<uint8_t*>(codes->mutable_data());
  args.scales = static_cast<float*>(scale->mutable_data());
  quantize_rows(args, gpu.stream());
  const Tensor got = gpu.to_host(codes);
  for (int64_t i = 0; i < k; ++i) {
    ASSERT_TRUE(same_code(got->as<uint8_t>()[i], float_to_e4m3(x->as<float>()[i])))
        << x->as<float>()[i];
  }
}

}  // namespace
}  // namespace cadre::cuda
