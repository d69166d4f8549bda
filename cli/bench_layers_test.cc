#include "bench_layers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "quant/float8.h"
#include "weight_formats.h"

namespace cadre::cli {
namespace {

ExpertsQuery query_of(int64_t experts, int64_t k, int64_t hidden, int64_t intermediate,
                      StorageFormat format = StorageFormat::kBF16) {
  ExpertsQuery query;
  query.config.num_experts = experts;
  query.config.top_k = k;
  query.config.hidden_size = hidden;
  query.config.intermediate_size = intermediate;
  query.format = format;
  query.compute_dtype = DType::kF32;
  return query;
}

std::vector<std::vector<int32_t>> experts_of(const BenchCall& call) {
  const TensorView ids = call.tokens().top_k_index;
  std::vector<std::vector<int32_t>> rows;
  for (int64_t t = 0; t < ids.dim(0); ++t) {
    const auto* row = ids[t].as<int32_t>();
    rows.emplace_back(row, row + ids.dim(1));
  }
  return rows;
}

TEST(BenchLayers, TakeTurnsThroughTheMemoryAskedFor) {
  const ExpertsQuery query = query_of(8, 2, 64, 32);  // 8 * 3 * 64 * 32 * 2 = 98304 bytes
  EXPECT_EQ(expert_bytes(query), 12288u);
  EXPECT_EQ(num_layers(query, 98304 * 5, 20), 5);
  EXPECT_EQ(num_layers(query, 98304 * 5 + 1, 20), 6);
  EXPECT_EQ(num_layers(query, 1, 20), 2);
  EXPECT_EQ(num_layers(query, size_t{1} << 40, 20), 20);
}

TEST(BenchLayers, NoTwoExpertsAreEqualAndValuesAreOfTheRightSize) {
  // Experts of 2^20 values: a pattern of that length would make them all alike.
  ThreadPool pool(2);
  const ExpertsQuery query = query_of(3, 1, 1024, 512);
  const auto layers = make_layers(query, 2, 0, 1, Stream::cpu(pool));
  std::set<std::string> starts;
  for (const auto& layer : layers) {
    for (const auto* matrices : {&layer->gate, &layer->up, &layer->down}) {
      for (const ExpertMatrix& matrix : *matrices) {
        starts.emplace(static_cast<const char*>(matrix.data), 64);
      }
    }
  }
  EXPECT_EQ(starts.size(), 2u * 3 * 3);
}

TEST(BenchLayers, EveryPlainFormatAgreesWithTheReference) {
  ThreadPool pool(2);
  for (const StorageFormat format :
       {StorageFormat::kF32, StorageFormat::kF16, StorageFormat::kBF16}) {
    const ExpertsQuery query = query_of(6, 2, 40, 24, format);
    const auto layers = make_layers(query, 1, 0, 1, Stream::cpu(pool));
    BenchCall call(query.config, query.compute_dtype, 9, 1, Stream::cpu(pool));
    call.route(Routing::kUniform);
    ExpertsBackend& backend = find_backend("grouped_mm", DeviceType::kCpu);
    Workspace workspace({}, backend.workspace_bytes(query, 9, 2));
    backend.forward(*backend.prepare(query, layers[0]), call.tokens(), workspace,
                    Stream::cpu(pool));
    EXPECT_LE(call.error_of_sample(*layers[0], ActivationScheme::kNone, 4),
              stated_bound(DType::kF32, format));
    // Outputs of order one, and a fault in the last token is among what is looked at.
    const MutableTensorView output = call.tokens().output;
    double sum = 0;
    for (int64_t i = 0; i < output.numel(); ++i) sum += std::abs(output.as<float>()[i]);
    EXPECT_GT(sum / static_cast<double>(output.numel()), 0.01);
    output[8].as<float>()[0] += 1;
    EXPECT_GT(call.error_of_sample(*layers[0], ActivationScheme::kNone, 4), 1e-2);
  }
}

ExpertsQuery query_of(const WeightFormat& format) {
  ExpertsQuery query = query_of(3, 2, 200, 160, format.storage);
  query.scale_layout = format.scales;
  query.activation_scheme = format.activations;
  return query;
}

TEST(BenchLayers, BytesCountScalesAndPackedNibbles) {
  // gate and up [160, 200], down [200, 160]: values, then scales of full and partial blocks.
  const std::map<std::string_view, size_t> bytes = {{"fp8", 3 * 32000 + 3 * 2 * 2 * 4},
                                                    {"fp8-ue8m0", 3 * 32000 + 3 * 2 * 2},
                                                    {"fp8-tensor", 3 * 32000 + 3 * 4},
                                                    {"mxfp8", 3 * 32000 + 2 * 160 * 7 + 200 * 5},
                                                    {"fp4", 3 * 16000 + 2 * 160 * 7 + 200 * 5}};
  for (const auto& [name, expected] : bytes) {
    EXPECT_EQ(expert_bytes(query_of(find_weight_format(name))), expected) << name;
  }
}

float scale_value(const ExpertMatrix& matrix, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(matrix.scales)[i];
  return e8m0_to_float(static_cast<const uint8_t*>(matrix.scales)[i]);
}

TEST(BenchLayers, ScalesDifferAndLeadToWeightsOfTheRightSize) {
  ThreadPool pool(2);
  for (const WeightFormat& format : weight_formats()) {
    if (!is_quantized(format.storage)) continue;
    SCOPED_TRACE(format.name);
    const auto layers = make_layers(query_of(format), 1, 0, 1, Stream::cpu(pool));
    std::set<float> scales;
    for (const ExpertMatrix& matrix : layers[0]->up) {
      const int64_t count = format.scales.block_rows == 1 ? 160 * 7 : matrix.scale_row_stride;
      for (int64_t i = 0; i < count; ++i) {
        scales.insert(scale_value(matrix, format.scales.dtype, i));
      }
    }
    EXPECT_GE(scales.size(), 2u);
    EXPECT_LE(*scales.rbegin() / *scales.begin(), 4.0f);
    // Weights of 1 / sqrt(200): the largest code stands for about four times that.
    const float largest = format.storage == StorageFormat::kFp4 ? 6 : 448;
    EXPECT_GT(*scales.begin() * largest * std::sqrt(200.0f), 1.0f);
    EXPECT_LT(*scales.rbegin() * largest * std::sqrt(200.0f), 8.0f);
  }
}

TEST(BenchCall, ComparesWithTheReferenceThatRoundsActivationsAlike) {
  ThreadPool pool(2);
  for (const WeightFormat& format : weight_formats()) {
    SCOPED_TRACE(format.name);
    const ExpertsQuery query = query_of(format);
    const auto layers = make_layers(query, 1, 0, 1, Stream::cpu(pool));
    BenchCall call(query.config, DType::kF32, 1, 1, Stream::cpu(pool));
    call.route(Routing::kUniform);
    std::vector<double> truth(200);
    reference_forward(query.config, *layers[0], call.tokens(), truth.data(), format.activations);
    double sum = 0;
    for (size_t i = 0; i < truth.size(); ++i) {
      call.tokens().output.as<float>()[i] = static_cast<float>(truth[i]);
      sum += std::abs(truth[i]);
    }
    EXPECT_GT(sum / 200, 0.01);
    EXPECT_LT(call.error_of_sample(*layers[0], format.activations, 4), 1e-7);
    if (format.activations == ActivationScheme::kDynamic) {
      EXPECT_GT(call.error_of_sample(*layers[0], ActivationScheme::kNone, 4), 1e-2);
    }
  }
}

TEST(BenchLayers, MoreThanTheMemoryIsRefusedBeforeItIsTaken) {
  ThreadPool pool(1);
  try {
    make_layers(query_of(1024, 1, 1 << 20, 1 << 14), 2, 0, 1, Stream::cpu(pool));
    ADD_FAILURE();
  } catch (const DeviceError& error) {
    for (const char* part : {"GiB", "available", "--shape", "--memory"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part;
    }
  }
}

TEST(BenchCall, RoutingsDrawDifferentExpertsForEveryToken) {
  ThreadPool pool(1);
  const ExpertsConfig config = query_of(16, 4, 8, 8).config;
  for (const Routing routing : {Routing::kUniform, Routing::kSkewed, Routing::kOne}) {
    SCOPED_TRACE(std::string(name_of(routing)));
    BenchCall call(config, DType::kF32, 300, 1, Stream::cpu(pool));
    const int64_t active = call.route(routing);
    const auto rows = experts_of(call);
    std::set<int32_t> hit;
    std::set<std::vector<int32_t>> distinct;
    for (const auto& row : rows) {
      EXPECT_EQ(std::set<int32_t>(row.begin(), row.end()).size(), 4u);
      hit.insert(row.begin(), row.end());
      distinct.insert(row);
    }
    EXPECT_EQ(active, static_cast<int64_t>(hit.size()));
    EXPECT_GE(*hit.begin(), 0);
    EXPECT_LT(*hit.rbegin(), 16);
    EXPECT_EQ(distinct.size() == 1, routing == Routing::kOne);
    call.route(routing);
    EXPECT_NE(experts_of(call), rows);  // another routing each time
  }
}

TEST(BenchCall, SkewedPrefersTheFirstExperts) {
  ThreadPool pool(1);
  BenchCall call(query_of(16, 1, 8, 8).config, DType::kF32, 3000, 1, Stream::cpu(pool));
  std::vector<int> counts(16);
  call.route(Routing::kSkewed);
  for (const auto& row : experts_of(call)) ++counts[static_cast<size_t>(row[0])];
  // 1 / (e + 1) over the harmonic sum of 16 = 3.3807.
  EXPECT_NEAR(counts[0] / 3000.0, 1 / 3.3807, 0.04);
  EXPECT_NEAR(counts[3] / 3000.0, 0.25 / 3.3807, 0.03);
}

}  // namespace
}  // namespace cadre::cli
