// A random layer and call for the tests of batched_mm, on the host for the reference and on the
// GPU, in all layouts.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cadre/allocator.h"
#include "cadre/experts.h"
#include "cadre/float16.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"
#include "quant/float8.h"

namespace cadre {

inline constexpr Device kGpu = {DeviceType::kCuda, 0};

enum class Layout { kRows, kPadded, kInterleaved, kTransposed, kShifted, kUneven };
inline constexpr Layout kLayouts[] = {Layout::kRows,       Layout::kPadded,  Layout::kInterleaved,
                                      Layout::kTransposed, Layout::kShifted, Layout::kUneven};

struct Case {
  int64_t tokens = 1;
  ExpertsConfig config = {};
  DType dtype = DType::kBF16;
  Layout layout = Layout::kRows;
  DType bias_dtype = DType::kF32;
  DType id_dtype = DType::kI64;
  bool weights_in_dtype = false;
  bool output_f32 = true;
  int64_t row_gap = 0;       // of hidden states and output
  double invalid = 0;        // share of ids that name no expert
  bool duplicates = false;   // an expert may stand twice in a row
  int64_t used_experts = 0;  // ids are below; 0: all
  uint32_t seed = 1;
  std::optional<StorageFormat> quantized = {};  // else plain weights of `dtype`
  ScaleLayout scales = {};
  ActivationScheme activations = ActivationScheme::kNone;
  bool aligned_scales = false;  // of each expert, at multiples of 16 bytes
};

inline std::string describe(const Case& c) {
  return str_cat(
      "T=", c.tokens, " E=", c.config.num_experts, " k=", c.config.top_k,
      " H=", c.config.hidden_size, " I=", c.config.intermediate_size, " ", name_of(c.dtype),
      " layout ", static_cast<int>(c.layout), " gate ", c.config.has_gate, " bias ",
      c.config.has_bias, " ", name_of(c.bias_dtype), " ids ", name_of(c.id_dtype), " row gap ",
      c.row_gap, " seed ", c.seed, " ", name_of(c.quantized.value_or(*plain_format(c.dtype))),
      " scales ", name_of(c.scales.dtype), " ", c.scales.block_rows, " x ", c.scales.block_cols,
      " activations ", static_cast<int>(c.activations), " aligned scales ", c.aligned_scales);
}

inline void write_value(char* at, DType dtype, float value) {
  if (dtype == DType::kF32) {
    std::memcpy(at, &value, 4);
  } else if (dtype == DType::kBF16) {
    const BFloat16 v(value);
    std::memcpy(at, &v, 2);
  } else {
    const Float16 v(value);
    std::memcpy(at, &v, 2);
  }
}

inline double read_value(const char* at, DType dtype) {
  float f = 0;
  if (dtype == DType::kF32) {
    std::memcpy(&f, at, 4);
  } else if (dtype == DType::kBF16) {
    BFloat16 v;
    std::memcpy(&v, at, 2);
    f = static_cast<float>(v);
  } else {
    Float16 v;
    std::memcpy(&v, at, 2);
    f = static_cast<float>(v);
  }
  return f;
}

// Host memory with a copy of it on the GPU.
class Mirror {
 public:
  Mirror(size_t bytes, const Stream& stream) : host(bytes, '\xff'), stream_(stream) {
    device_ = allocate_shared_memory(kGpu, bytes);
  }
  void upload() {
    device_runtime(kGpu).copy(device_.get(), host.data(), host.size(), stream_);
    device_runtime(kGpu).synchronize(stream_);
  }
  void download() {
    device_runtime(kGpu).copy(host.data(), device_.get(), host.size(), stream_);
    device_runtime(kGpu).synchronize(stream_);
  }
  char* on_gpu() const { return static_cast<char*>(device_.get()); }

  std::vector<char> host;

 private:
  const Stream& stream_;
  std::shared_ptr<void> device_;
};

// A layer and a call, on the host for the reference and on the GPU.
class Data {
 public:
  Data(const Case& c, const Stream& stream) : c_(c), stream_(stream), random_(c.seed) {
    make_weights();
    make_tokens();
  }

  ExpertsQuery query(Device device = kGpu) const {
    ExpertsQuery q;
    q.config = c_.config;
    q.device = device;
    q.compute_dtype = c_.dtype;
    q.format = format();
    q.scale_layout = c_.scales;
    q.activation_scheme = c_.activations;
    return q;
  }
  const std::shared_ptr<const ExpertsWeights>& weights() const { return gpu_weights_; }
  /// E8M0 scales of up times 2^shift, of down by it: results keep their size.
  void shift_exponents(int shift) {
    const auto add = [](const std::vector<ExpertMatrix>& experts, int64_t rows, int64_t cols,
                        int n) {
      for (const ExpertMatrix& m : experts) {
        auto* scales = static_cast<uint8_t*>(const_cast<void*>(m.scales));
        for (int64_t i = 0; i < rows * ((cols + 31) / 32); ++i) {
          scales[i] = static_cast<uint8_t>(scales[i] + n);
        }
      }
    };
    const ExpertsConfig& f = c_.config;
    add(host_weights_.up, f.intermediate_size, f.hidden_size, shift);
    add(host_weights_.down, f.hidden_size, f.intermediate_size, -shift);
    for (const auto& memory : memory_) memory->upload();
  }
  /// The smallest scale of up and down, as E8M0.
  int lowest_exponent() const {
    int lowest = 255;
    const auto look = [&](const std::vector<ExpertMatrix>& experts, int64_t rows, int64_t cols) {
      for (const ExpertMatrix& m : experts) {
        const auto* scales = static_cast<const uint8_t*>(m.scales);
        for (int64_t i = 0; i < rows * ((cols + 31) / 32); ++i) {
          lowest = std::min(lowest, static_cast<int>(scales[i]));
        }
      }
    };
    const ExpertsConfig& f = c_.config;
    look(host_weights_.up, f.intermediate_size, f.hidden_size);
    look(host_weights_.down, f.hidden_size, f.intermediate_size);
    return lowest;
  }
  /// The first scale of an expert's down matrix.
  void set_down_scale(size_t expert, uint8_t code) {
    *static_cast<uint8_t*>(const_cast<void*>(host_weights_.down[expert].scales)) = code;
    for (const auto& memory : memory_) memory->upload();
  }

  void make_routing() {
    const int64_t k = c_.config.top_k;
    std::uniform_real_distribution<double> unit(0, 1);
    for (int64_t t = 0; t < c_.tokens; ++t) {
      std::set<int64_t> seen;
      for (int64_t s = 0; s < k; ++s) {
        int64_t id = pick(seen);
        const bool is_invalid = unit(random_) < c_.invalid;
        if (is_invalid) id = kInvalid[random_() % 4] == 1 ? c_.config.num_experts : -1;
        char* at = ids_->host.data() + (t * k + s) * id_bytes();
        if (c_.id_dtype == DType::kI64) {
          std::memcpy(at, &id, 8);
        } else {
          const auto narrow = static_cast<int32_t>(id);
          std::memcpy(at, &narrow, 4);
        }
        write_value(routing_->host.data() + (t * k + s) * element_of(weight_dtype()),
                    weight_dtype(), is_invalid ? NAN : static_cast<float>(0.1 + unit(random_)));
      }
    }
    ids_->upload();
    routing_->upload();
  }

  RoutedTokens tokens(bool on_gpu) const {
    const int64_t h = c_.config.hidden_size;
    const int64_t k = c_.config.top_k;
    const Device device = on_gpu ? kGpu : Device{};
    const auto at = [&](const Mirror& m) {
      return on_gpu ? m.on_gpu() : const_cast<char*>(m.host.data());
    };
    const Dims rows = {h + c_.row_gap, 1};
    return {TensorView(at(*x_), c_.dtype, {c_.tokens, h}, rows, device),
            TensorView(at(*ids_), c_.id_dtype, {c_.tokens, k}, device),
            TensorView(at(*routing_), weight_dtype(), {c_.tokens, k}, device),
            MutableTensorView(at(*out_), out_dtype(), {c_.tokens, h}, rows, device)};
  }

  // The GPU's output, of memory that was all NaN before; the gaps between rows must still be.
  std::vector<double> output() {
    out_->download();
    std::vector<double> values;
    const int64_t h = c_.config.hidden_size;
    for (int64_t t = 0; t < c_.tokens; ++t) {
      for (int64_t i = 0; i < h + c_.row_gap; ++i) {
        const double v = read_value(
            out_->host.data() + (t * (h + c_.row_gap) + i) * element_of(out_dtype()), out_dtype());
        if (i < h) {
          values.push_back(v);
        } else {
          EXPECT_TRUE(std::isnan(v)) << "a gap was written";
        }
      }
    }
    return values;
  }
  void poison_output() {
    device_runtime(kGpu).fill(out_->on_gpu(), 0xff, out_->host.size(), stream_);
  }
  std::vector<double> reference() const {
    std::vector<double> y(static_cast<size_t>(c_.tokens * c_.config.hidden_size));
    reference_forward(c_.config, host_weights_, tokens(false), y.data(), c_.activations);
    return y;
  }

 private:
  static constexpr int kInvalid[] = {0, 1, 0, 1};
  static size_t element_of(DType dtype) { return size_of(dtype); }
  DType weight_dtype() const { return c_.weights_in_dtype ? c_.dtype : DType::kF32; }
  DType out_dtype() const { return c_.output_f32 ? DType::kF32 : c_.dtype; }
  size_t id_bytes() const { return c_.id_dtype == DType::kI64 ? 8 : 4; }

  int64_t pick(std::set<int64_t>& seen) {
    const int64_t below = c_.used_experts > 0 ? c_.used_experts : c_.config.num_experts;
    for (;;) {
      const int64_t id = static_cast<int64_t>(random_() % static_cast<uint64_t>(below));
      if (c_.duplicates || below < c_.config.top_k || seen.insert(id).second) return id;
    }
  }

  StorageFormat format() const { return c_.quantized.value_or(*plain_format(c_.dtype)); }

  // Codes whose values have about the size of 1 / unit, and scales with a deviation of that unit
  // over it; up's blocks begin somewhere in a block where rows share one, as behind gate.
  void add_quantized(int64_t n, int64_t k, float deviation, std::vector<ExpertMatrix>& host,
                     std::vector<ExpertMatrix>& gpu) {
    const int64_t e = c_.config.num_experts;
    const bool is_fp4 = format() == StorageFormat::kFp4;
    const bool transposed = c_.layout == Layout::kTransposed;
    const int64_t row =
        transposed ? 1 : row_bytes(format(), k) + (c_.layout == Layout::kPadded ? 16 : 0);
    const int64_t col = transposed ? n : 1;
    const int64_t each = (n * std::max(row, row_bytes(format(), k)) + 31) / 16 * 16;
    const int64_t offset = c_.scales.block_rows > 1 ? static_cast<int64_t>(random_() % 7) : 0;
    const int64_t blocks_down =
        c_.scales.block_rows == 0 ? 1
                                  : (n + offset + c_.scales.block_rows - 1) / c_.scales.block_rows;
    const int64_t blocks_along =
        c_.scales.block_cols == 0 ? 1 : (k + c_.scales.block_cols - 1) / c_.scales.block_cols;
    const auto scale_bytes = static_cast<int64_t>(size_of(c_.scales.dtype));
    // Scales of experts and rows of them begin anywhere, else.
    const int64_t blocks = blocks_down * blocks_along;
    const int64_t each_scales = c_.aligned_scales ? (blocks + 15) / 16 * 16 : blocks + 1;
    auto codes = std::make_unique<Mirror>(static_cast<size_t>(e * each + 16), stream_);
    auto scales =
        std::make_unique<Mirror>(static_cast<size_t>(e * each_scales * scale_bytes), stream_);
    std::normal_distribution<float> normal(0, is_fp4 ? 2.0F : 30.0F);
    const float unit = deviation / (is_fp4 ? 2.0F : 30.0F);
    for (int64_t i = 0; i < e; ++i) {
      const int64_t place = c_.layout == Layout::kUneven && (i ^ 1) < e ? i ^ 1 : i;
      char* const data =
          codes->host.data() + place * each + (c_.layout == Layout::kShifted ? 1 : 0);
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t q = 0; q < k; ++q) {
          char& at = data[r * row + (is_fp4 ? q / 2 : q * col)];
          if (!is_fp4) {
            at = static_cast<char>(float_to_e4m3(normal(random_)));
          } else {
            const auto kept = static_cast<uint8_t>(q % 2 == 0 ? 0 : at & 0xf);
            at = static_cast<char>(kept | float_to_e2m1(normal(random_)) << q % 2 * 4);
          }
        }
      }
      char* const scale = scales->host.data() + i * each_scales * scale_bytes;
      for (int64_t s = 0; s < each_scales; ++s) {
        const float value = unit * static_cast<float>(1 + random_() % 4) * 0.4F;
        if (c_.scales.dtype == DType::kF32) {
          write_value(scale + s * 4, DType::kF32, value);
        } else {
          scale[s] = static_cast<char>(127 + std::lround(std::log2(value)));
        }
      }
      ExpertMatrix m;
      m.data = data;
      m.row_stride = row;
      m.col_stride = col;
      m.scales = scale;
      m.scale_row_stride = blocks_along;
      m.scale_row_offset = offset;
      host.push_back(m);
      m.data = codes->on_gpu() + (data - codes->host.data());
      m.scales = scales->on_gpu() + (scale - scales->host.data());
      gpu.push_back(m);
    }
    codes->upload();
    scales->upload();
    memory_.push_back(std::move(codes));
    memory_.push_back(std::move(scales));
  }

  // Rows of all experts of one projection; in the padded layout rows lie 8 elements apart more.
  void add_matrix(int64_t n, int64_t k, float deviation, std::vector<ExpertMatrix>& host,
                  std::vector<ExpertMatrix>& gpu) {
    if (c_.quantized) return add_quantized(n, k, deviation, host, gpu);
    const int64_t e = c_.config.num_experts;
    const bool transposed = c_.layout == Layout::kTransposed;
    const int64_t row = transposed ? 1 : (c_.layout == Layout::kPadded ? k + 8 : k);
    const int64_t col = transposed ? n : 1;
    const int64_t each = n * (c_.layout == Layout::kPadded ? k + 8 : k) + 24;
    const int64_t shift = c_.layout == Layout::kShifted ? 1 : 0;
    const auto element = static_cast<int64_t>(size_of(c_.dtype));
    auto memory = std::make_unique<Mirror>(static_cast<size_t>((e * each + 64) * element), stream_);
    std::normal_distribution<float> normal(0, deviation);
    for (int64_t i = 0; i < e; ++i) {
      int64_t at = i * each / 8 * 8 + shift;
      if (c_.layout == Layout::kUneven) at = (i ^ 1) < e ? (i ^ 1) * each / 8 * 8 : at;
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t q = 0; q < k; ++q) {
          write_value(memory->host.data() + (at + r * row + q * col) * element, c_.dtype,
                      normal(random_));
        }
      }
      host.push_back({memory->host.data() + at * element, row, col});
      gpu.push_back({memory->on_gpu() + at * element, row, col});
    }
    memory->upload();
    memory_.push_back(std::move(memory));
  }

  void add_bias(int64_t n, std::vector<ExpertVector>& host, std::vector<ExpertVector>& gpu) {
    if (!c_.config.has_bias) return;
    const int64_t e = c_.config.num_experts;
    const auto element = static_cast<int64_t>(size_of(c_.bias_dtype));
    auto memory = std::make_unique<Mirror>(static_cast<size_t>(e * n * element), stream_);
    std::normal_distribution<float> normal(0, 0.5F);
    for (int64_t i = 0; i < e * n; ++i) {
      write_value(memory->host.data() + i * element, c_.bias_dtype, normal(random_));
    }
    for (int64_t i = 0; i < e; ++i) {
      host.push_back({memory->host.data() + i * n * element, 1});
      gpu.push_back({memory->on_gpu() + i * n * element, 1});
    }
    memory->upload();
    memory_.push_back(std::move(memory));
  }

  static void interleave(std::vector<ExpertMatrix>& gate, std::vector<ExpertMatrix>& up, int64_t k,
                         int64_t element) {
    for (size_t e = 0; e < gate.size(); ++e) {  // `up` held 2I rows
      gate[e] = {up[e].data, 2 * k, 1};
      up[e] = {static_cast<const char*>(up[e].data) + k * element, 2 * k, 1};
    }
  }

  void make_weights() {
    const ExpertsConfig& c = c_.config;
    const int64_t h = c.hidden_size;
    const int64_t i = c.intermediate_size;
    auto gpu = std::make_shared<ExpertsWeights>();
    gpu->device = kGpu;
    gpu->format = host_weights_.format = format();
    gpu->scale_layout = host_weights_.scale_layout = c_.scales;
    gpu->bias_dtype = host_weights_.bias_dtype = c_.bias_dtype;
    const float first = 1.0F / std::sqrt(static_cast<float>(h));
    const float second = 1.0F / std::sqrt(static_cast<float>(i));
    ExpertsWeights& host = host_weights_;
    if (c.has_gate && c_.layout == Layout::kInterleaved && !c_.quantized) {
      add_matrix(2 * i, h, first, host.up, gpu->up);
      host.gate = host.up;
      gpu->gate = gpu->up;
      const auto element = static_cast<int64_t>(size_of(c_.dtype));
      interleave(host.gate, host.up, h, element);
      interleave(gpu->gate, gpu->up, h, element);
    } else {
      if (c.has_gate) add_matrix(i, h, first, host.gate, gpu->gate);
      add_matrix(i, h, first, host.up, gpu->up);
    }
    add_matrix(h, i, second, host.down, gpu->down);
    if (c.has_gate) add_bias(i, host.gate_bias, gpu->gate_bias);
    add_bias(i, host.up_bias, gpu->up_bias);
    add_bias(h, host.down_bias, gpu->down_bias);
    gpu_weights_ = gpu;
  }

  void make_tokens() {
    const int64_t row = c_.config.hidden_size + c_.row_gap;
    const auto pairs = static_cast<size_t>(c_.tokens * c_.config.top_k);
    x_ = std::make_unique<Mirror>(static_cast<size_t>(c_.tokens * row) * size_of(c_.dtype) + 16,
                                  stream_);
    out_ = std::make_unique<Mirror>(
        static_cast<size_t>(c_.tokens * row) * size_of(out_dtype()) + 16, stream_);
    ids_ = std::make_unique<Mirror>(pairs * id_bytes() + 16, stream_);
    routing_ = std::make_unique<Mirror>(pairs * size_of(weight_dtype()) + 16, stream_);
    std::normal_distribution<float> normal(0, 1);
    for (int64_t t = 0; t < c_.tokens; ++t) {
      for (int64_t i = 0; i < c_.config.hidden_size; ++i) {
        write_value(x_->host.data() + (t * row + i) * static_cast<int64_t>(size_of(c_.dtype)),
                    c_.dtype, normal(random_));
      }
    }
    x_->upload();
    make_routing();
  }

  Case c_;
  const Stream& stream_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Mirror>> memory_;
  ExpertsWeights host_weights_;
  std::shared_ptr<const ExpertsWeights> gpu_weights_;
  std::unique_ptr<Mirror> x_, out_, ids_, routing_;
};

}  // namespace cadre
