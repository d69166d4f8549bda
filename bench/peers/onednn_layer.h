// An experts layer as a serial loop over the experts that were hit, each two oneDNN matrix
// products: what PyTorch's grouped_mm does on CPUs, without PyTorch. `kPlain` products read the
// checkpoint's [N, K] matrices, `kPacked` ones a copy in the layout that oneDNN asks for.
#pragma once

#include <cstdint>
#include <dnnl.hpp>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cadre/experts.h"

namespace cadre::peers {

enum class Form : uint8_t { kPlain, kPacked };

/// y = x W^T for a fixed [N, K] matrix size and any number of rows: bfloat16 in, float32 out.
class Product {
 public:
  Product(const dnnl::engine& engine, const dnnl::stream& stream, int64_t n, int64_t k, Form form);

  /// W as this product reads it; copies only when packed.
  dnnl::memory prepare(const void* matrix);
  void run(const void* x, int64_t num_rows, const dnnl::memory& weights, float* y);
  /// oneDNN's name for the code of a one-row product.
  std::string implementation();

 private:
  struct Rows {  // what depends on the number of rows, made when it first occurs
    dnnl::matmul matmul;
    dnnl::memory x;
    dnnl::memory y;
  };

  dnnl::matmul::primitive_desc describe(int64_t num_rows, const dnnl::memory::desc& weights) const;
  Rows& rows_of(int64_t num_rows);

  dnnl::engine engine_;
  dnnl::stream stream_;
  int64_t n_, k_;
  dnnl::memory::desc plain_;
  dnnl::memory::desc weights_;
  std::map<int64_t, Rows> by_rows_;
};

class OneDnnExperts {
 public:
  OneDnnExperts(const ExpertsConfig& config, Form form);

  /// `weights`: bfloat16, gate and up of an expert in one [2I, H] matrix.
  void add_layer(std::shared_ptr<const ExpertsWeights> weights);
  size_t num_layers() const { return layers_.size(); }
  /// `tokens`: contiguous, bfloat16, i32 ids within the experts, f32 weights.
  void forward(size_t layer, const RoutedTokens& tokens);
  std::string implementation() { return gate_up_.implementation(); }

 private:
  struct Layer {
    std::shared_ptr<const ExpertsWeights> owner;
    std::vector<dnnl::memory> gate_up;  // [E]
    std::vector<dnnl::memory> down;     // [E]
  };

  void sort_by_expert(const RoutedTokens& tokens);

  ExpertsConfig config_;
  dnnl::engine engine_;
  dnnl::stream stream_;
  Product gate_up_;
  Product down_;
  std::vector<Layer> layers_;
  std::vector<int64_t> begin_;      // [E + 1] first sorted row of an expert
  std::vector<int64_t> token_of_;   // [T * k] token of a sorted row
  std::vector<int64_t> positions_;  // [T, k] sorted row of a slot
  Tensor x_, gate_up_out_, h_, down_out_;
};

}  // namespace cadre::peers
