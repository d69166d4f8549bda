// The kernels of quantised weights, table by table, against the definitions in src/quant.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "backends/cpu/kernels/isa.h"
#include "cadre/float16.h"
#include "quant/activations.h"

namespace cadre::cpu {
namespace {

std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> all;
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    if (is_available(isa)) all.push_back(&kernels_for(isa, DType::kBF16));
  }
#if defined(__x86_64__)
  // Where the processor has more than this, the table above does without it.
  if (is_available(Isa::kAvx512)) all.push_back(&kAvx512Kernels);
#endif
  return all;
}

float value_of(Element type, uint8_t code) {
  return type == Element::kE4m3 ? e4m3_to_float(code) : e2m1_to_float(code);
}

uint8_t code_at(const std::vector<uint8_t>& codes, Element type, int k, int column) {
  const int per_word = codes_per_word(type);
  const auto at = static_cast<size_t>((k / per_word * kPanelColumns + column) * 4);
  const int i = k % per_word;
  if (type == Element::kE4m3) return codes[at + static_cast<size_t>(i)];
  return static_cast<uint8_t>(codes[at + static_cast<size_t>(i / 2)] >> i % 2 * 4 & 15);
}

// Rows in the type of the table, kChunk elements apart.
std::vector<char> rows_of(const KernelTable& table, const std::vector<float>& values) {
  const size_t size = table.row_type == Element::kF32 ? 4 : 2;
  std::vector<char> rows(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    const BFloat16 narrow(values[i]);
    std::memcpy(rows.data() + i * size, size == 4 ? static_cast<const void*>(&values[i]) : &narrow,
                size);
  }
  return rows;
}

// acc of one chunk in pieces, by multiply_codes or by decode and multiply.
std::vector<float> product(const KernelTable& table, Element type, bool decodes,
                           const std::vector<uint8_t>& codes, const std::vector<float>& x,
                           int num_rows, int k, int piece, const std::vector<float>& row_scales,
                           const std::vector<float>& column_scales) {
  std::vector<float> acc(static_cast<size_t>(num_rows * kPanelColumns), NAN);
  const std::vector<char> rows = rows_of(table, x);
  if (!decodes) {
    table.multiply_codes({rows.data(), num_rows, k, piece, codes.data(), type, row_scales.data(),
                          column_scales.data(), acc.data(), true});
    return acc;
  }
  alignas(64) static char panel[kPanelBytes];
  const int per_word = codes_per_word(type);
  for (int begin = 0, i = 0; begin < k; begin += piece, ++i) {
    const int count = std::min(piece, k - begin);
    table.decode({codes.data() + begin / per_word * kPanelColumns * 4, type, count, panel, 0});
    const int size = table.row_type == Element::kF32 ? 4 : 2;
    std::vector<const void*> first;
    for (int r = 0; r < num_rows; ++r) {
      first.push_back(rows.data() + (r * kChunk + begin) * size);
    }
    table.multiply({first.data(), 0, num_rows, (count + per_word - 1) / per_word * per_word, panel,
                    acc.data(), i == 0, nullptr, 0, kPanelColumns, row_scales.data() + i * num_rows,
                    column_scales.data() + i * kPanelColumns});
  }
  return acc;
}

constexpr Element kTypes[] = {Element::kE4m3, Element::kE2m1};

TEST(Codes, EveryCodeIsTheValueItStandsForAtEveryPlace) {
  for (const KernelTable* table : tables()) {
    for (const Element type : kTypes) {
      const int per_word = codes_per_word(type);
      for (int place = 0; place < per_word; ++place) {
        for (int base = 0; base < 256; base += kPanelColumns) {
          std::vector<uint8_t> codes(kPanelColumns * 4 + 3);
          for (int n = 0; n < kPanelColumns; ++n) {
            const int code = base + n;
            const auto at = static_cast<size_t>(n * 4);
            if (type == Element::kE4m3) {
              codes[at + static_cast<size_t>(place)] = static_cast<uint8_t>(code);
            } else {
              codes[at + static_cast<size_t>(place / 2)] =
                  static_cast<uint8_t>((code & 15) << place % 2 * 4);
            }
          }
          std::vector<float> x(kChunk, 0.0f);
          x[static_cast<size_t>(place)] = 1;
          for (const bool decodes : {false, true}) {
            if (!decodes && table->max_code_rows == 0) continue;
            const std::vector<float> acc = product(*table, type, decodes, codes, x, 1, per_word,
                                                   kChunk, {1.0f}, std::vector<float>(64, 1.0f));
            for (int n = 0; n < kPanelColumns; ++n) {
              const float expected = value_of(type, static_cast<uint8_t>(base + n));
              const float got = acc[static_cast<size_t>(n)];
              EXPECT_TRUE(std::isnan(expected) ? std::isnan(got) : got == expected)
                  << table->name << " code " << base + n << " place " << place << " decodes "
                  << decodes << ": " << got;
            }
          }
        }
      }
    }
  }
}

// The same bits straight from the codes, and with all pieces in one call.
void expect_same_in_other_ways(const KernelTable& table, Element type,
                               const std::vector<uint8_t>& codes, const std::vector<float>& x,
                               int num_rows, int k, int piece, const std::vector<float>& row_scales,
                               const std::vector<float>& column_scales,
                               const std::vector<float>& expected) {
  const auto expect = [&](const std::vector<float>& acc) {
    EXPECT_EQ(std::memcmp(acc.data(), expected.data(), acc.size() * 4), 0)
        << table.name << " k " << k << " piece " << piece << " rows " << num_rows;
  };
  if (num_rows <= table.max_code_rows) {
    expect(product(table, type, false, codes, x, num_rows, k, piece, row_scales, column_scales));
  }
  if (piece % 32 != 0) return;
  alignas(64) static char panel[kPanelBytes];
  const std::vector<char> rows = rows_of(table, x);
  std::vector<const void*> first;
  for (int r = 0; r < num_rows; ++r) {
    first.push_back(rows.data() + r * kChunk * (table.row_type == Element::kF32 ? 4 : 2));
  }
  const int per_word = codes_per_word(type);
  std::vector<float> acc(expected.size(), NAN);
  table.decode({codes.data(), type, k, panel, 0});
  table.multiply({first.data(), 0, num_rows, (k + per_word - 1) / per_word * per_word, panel,
                  acc.data(), true, nullptr, 0, kPanelColumns, row_scales.data(),
                  column_scales.data(), piece});
  expect(acc);
}

// Against float64, for every number of rows that has a tile of its own and for some more; decoding
// first gives the same bits.
TEST(Codes, ProductsInPiecesMatchDoubleAndEachOther) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const KernelTable* table : tables()) {
    for (const Element type : kTypes) {
      for (const int k : {1, 4, 7, 8, 31, 32, 33, 64, 100, 127, 128}) {
        for (const int piece : {8, 32, 64, 128}) {
          const int per_word = codes_per_word(type);
          const int words = (k + per_word - 1) / per_word;
          std::vector<uint8_t> codes(static_cast<size_t>(words * kPanelColumns * 4 + 3));
          for (uint8_t& code : codes) {
            do code = static_cast<uint8_t>(random());
            while ((code & 0x7f) == 0x7f);
          }
          for (const int num_rows : {1, 2, 3, 4, 5, 6, 7, 13, 17}) {
            const auto count = static_cast<size_t>(num_rows);
            const auto pieces = static_cast<size_t>((k + piece - 1) / piece);
            std::vector<float> x(count * kChunk, 0.0f), row_scales(pieces * count),
                column_scales(pieces * kPanelColumns);
            for (size_t r = 0; r < count; ++r) {
              for (int i = 0; i < k; ++i) {
                x[r * kChunk + static_cast<size_t>(i)] =
                    static_cast<float>(BFloat16(normal(random)));
              }
            }
            for (float& scale : row_scales) scale = std::abs(normal(random)) + 0.1f;
            for (float& scale : column_scales) scale = std::abs(normal(random)) + 0.1f;
            const std::vector<float> acc = product(*table, type, true, codes, x, num_rows, k, piece,
                                                   row_scales, column_scales);
            expect_same_in_other_ways(*table, type, codes, x, num_rows, k, piece, row_scales,
                                      column_scales, acc);
            double error = 0, norm = 0;
            for (size_t r = 0; r < count; ++r) {
              for (int n = 0; n < kPanelColumns; ++n) {
                double sum = 0;
                for (int i = 0; i < k; ++i) {
                  const auto p = static_cast<size_t>(i / piece);
                  sum += double{x[r * kChunk + static_cast<size_t>(i)]} *
                         value_of(type, code_at(codes, type, i, n)) * row_scales[p * count + r] *
                         column_scales[p * kPanelColumns + static_cast<size_t>(n)];
                }
                error += std::pow(acc[r * kPanelColumns + static_cast<size_t>(n)] - sum, 2);
                norm += sum * sum;
              }
            }
            EXPECT_LE(std::sqrt(error / norm), 1e-6)
                << table->name << " k " << k << " piece " << piece << " rows " << num_rows;
          }
        }
      }
    }
  }
}

TEST(ExpandScales, GivesThePowerOfTwoOfEveryByte) {
  for (const KernelTable* table : tables()) {
    uint8_t words[kPanelColumns * 4];
    float scales[4 * kPanelColumns];
    for (int i = 0; i < 256; ++i) words[i] = static_cast<uint8_t>(i);
    table->expand_scales({words, scales});
    for (int i = 0; i < 256; ++i) {
      const float got = scales[i % 4 * kPanelColumns + i / 4];
      const float expected = e8m0_to_float(static_cast<uint8_t>(i));
      EXPECT_TRUE(i == 255 ? std::isnan(got) : got == expected) << table->name << " " << i;
    }
  }
}

std::vector<float> hard_values(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x) {
    value = normal(random) * std::exp2(static_cast<float>(static_cast<int>(random() % 24) - 16));
    if (random() % 9 == 0) value = random() % 2 == 0 ? 0.0f : -0.0f;
  }
  return x;
}

// Codes and scales of a row as the table makes them; in place: over the values.
void expect_as_defined(const KernelTable& table, Element type, const std::vector<float>& values,
                       int64_t group, float static_scale, bool in_place) {
  const auto k = static_cast<int64_t>(values.size());
  const size_t size = type == Element::kF32 ? 4 : 2;
  std::vector<char> memory(values.size() * size + 1);
  char* x = memory.data() + 1;  // unaligned
  std::vector<float> rounded(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const BFloat16 bf16(values[i]);
    const Float16 f16(values[i]);
    rounded[i] = type == Element::kF32    ? values[i]
                 : type == Element::kBF16 ? static_cast<float>(bf16)
                                          : static_cast<float>(f16);
    const void* from = type == Element::kF32    ? static_cast<const void*>(&values[i])
                       : type == Element::kBF16 ? static_cast<const void*>(&bf16)
                                                : &f16;
    std::memcpy(x + i * size, from, size);
  }
  const auto groups = static_cast<size_t>((k + group - 1) / group);
  std::vector<uint8_t> expected(values.size());
  std::vector<float> expected_scales(groups), scales(groups);
  if (static_scale > 0) {
    quantize_activations(rounded.data(), k, static_scale, expected.data());
  } else {
    quantize_activations(rounded.data(), k, group, expected.data(), expected_scales.data());
  }
  std::vector<char> codes(values.size() * 2);
  char* to = in_place ? x : codes.data();
  table.quantize({x, type, k, group, static_scale, to, scales.data()});
  for (size_t i = 0; i < values.size(); ++i) {
    BFloat16 got;
    std::memcpy(&got, to + i * 2, 2);
    const float value = static_cast<float>(got);
    const float truth = e4m3_to_float(expected[i]);
    ASSERT_TRUE(std::isnan(truth) ? std::isnan(value)
                                  : value == truth && std::signbit(value) == std::signbit(truth))
        << table.name << " " << i << ": " << rounded[i] << " became " << value << " not " << truth;
  }
  for (size_t g = 0; g < groups && static_scale == 0; ++g) {
    ASSERT_TRUE(std::isnan(expected_scales[g]) ? std::isnan(scales[g])
                                               : scales[g] == expected_scales[g])
        << table.name << " group " << g;
  }
}

TEST(Quantize, IsWhatTheDefinitionSays) {
  for (const KernelTable* table : tables()) {
    for (const Element type : {Element::kF32, Element::kBF16, Element::kF16}) {
      for (const int64_t k : {1, 5, 16, 31, 32, 33, 100, 128, 129, 300}) {
        for (const int64_t group : {32, 128}) {
          const std::vector<float> x = hard_values(k, static_cast<uint32_t>(k));
          for (const float scale : {0.0f, 0.013f, 3e-5f}) {
            expect_as_defined(*table, type, x, group, scale, false);
            expect_as_defined(*table, type, x, group, scale, true);
          }
        }
      }
    }
  }
}

TEST(Quantize, NaNInfinityAndZerosAreThoseOfTheirGroup) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const KernelTable* table : tables()) {
    for (const float special : {NAN, inf, -inf, 0.0f, 1e-30f, -1e-42f, 3e38f}) {
      for (const size_t at : {size_t{0}, size_t{40}, size_t{127}}) {
        std::vector<float> x = hard_values(256, 3);
        if (std::abs(special) < 1) std::fill_n(x.begin(), 128, special);
        x[at] = special;
        expect_as_defined(*table, Element::kF32, x, 128, 0, false);
        expect_as_defined(*table, Element::kF32, x, 32, 0, true);
        expect_as_defined(*table, Element::kF32, x, 128, 0.5f, false);
      }
    }
  }
}

// Every value halfway between two codes, and its neighbours.
TEST(Quantize, RoundsToNearestEven) {
  std::vector<float> x;
  for (int code = 0; code < 0x7e; ++code) {
    const float low = e4m3_to_float(static_cast<uint8_t>(code));
    const float high = e4m3_to_float(static_cast<uint8_t>(code + 1));
    const float half = low + (high - low) / 2;
    for (const float value : {low, half, std::nextafter(half, 0.0f), std::nextafter(half, 1e9f)}) {
      x.insert(x.end(), {value, -value});
    }
  }
  for (const KernelTable* table : tables()) {
    expect_as_defined(*table, Element::kF32, x, 128, 1.0f, false);
  }
}

}  // namespace
}  // namespace cadre::cpu
