#include "backends/cpu/kernels/matmul.h"

#include <algorithm>

#include "backends/cpu/kernels/experts_memory.h"
#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/panel_product.h"
#include "backends/cpu/kernels/scalars.h"
#include "backends/cpu/kernels/weight_matrix.h"
#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"
#include "quant/activations.h"

namespace cadre::cpu {
namespace {

[[noreturn]] void fail(const MatmulArgs& args, std::string_view expected) {
  throw InvalidArgument(str_cat("matmul: expected ", expected, ", got ", describe("x", args.x),
                                ", ", describe("weight", args.weight), ", ",
                                describe("bias", args.bias), ", ", describe("out", args.out)));
}

StorageFormat format_of(const MatmulArgs& args) {
  if (!args.scales) return plain_format(args.weight.dtype()).value();
  if (args.weight.dtype() == DType::kI8) return StorageFormat::kFp4;
  const ScaleLayout& layout = args.scale_layout;
  if (layout == ScaleLayout{DType::kF8E8M0, 1, 32}) return StorageFormat::kMxFp8;
  return layout.block_rows == 0 && layout.block_cols == 0 ? StorageFormat::kFp8Tensor
                                                          : StorageFormat::kFp8Block;
}

void check_quantized(const MatmulArgs& args) {
  const DType dtype = args.weight.dtype();
  if (dtype != DType::kF8E4M3 && dtype != DType::kI8) {
    fail(args, "a float8_e4m3 or int8 (fp4) weight beside scales");
  }
  const std::string fault = scale_layout_fault(format_of(args), args.scale_layout);
  if (!fault.empty()) fail(args, fault);
  if (args.scales.dtype() != args.scale_layout.dtype || args.scales.rank() != 2) {
    fail(args, str_cat("scales [rows, cols] of ", name_of(args.scale_layout.dtype)));
  }
  const auto blocks = [](int64_t n, int64_t block) {
    return block == 0 ? 1 : (n + block - 1) / block;
  };
  if (args.scales.dim(0) != blocks(args.weight.dim(0), args.scale_layout.block_rows) ||
      args.scales.dim(1) != blocks(args.x.dim(1), args.scale_layout.block_cols)) {
    fail(args, str_cat("a scale for each block of ", args.scale_layout.block_rows, " x ",
                       args.scale_layout.block_cols, ", not ", describe("scales", args.scales)));
  }
  if (dtype == DType::kI8 && args.weight.dim(1) > 1 && args.weight.stride(1) != 1) {
    fail(args, "fp4 rows with stride 1");
  }
  if (args.activations == ActivationScheme::kStatic && !(args.input_scale > 0)) {
    fail(args, "a positive input scale of static activations");
  }
}

void check(const MatmulArgs& args) {
  const bool is_fp4 = args.scales && args.weight.dtype() == DType::kI8;
  const int64_t k = args.x.rank() == 2 ? args.x.dim(1) : 0;
  if (args.x.rank() != 2 || args.weight.rank() != 2 || args.out.rank() != 2 ||
      (is_fp4 ? (k + 1) / 2 : k) != args.weight.dim(1) || args.x.dim(0) != args.out.dim(0) ||
      args.weight.dim(0) != args.out.dim(1)) {
    fail(args, "x [T, K], weight [N, K] and out [T, N]");
  }
  if (args.bias && (args.bias.rank() != 1 || args.bias.dim(0) != args.weight.dim(0))) {
    fail(args, "bias [N]");
  }
  if (!is_compute_dtype(args.x.dtype()) ||
      (!args.scales && !is_compute_dtype(args.weight.dtype())) ||
      (args.bias && !is_compute_dtype(args.bias.dtype()))) {
    fail(args, "float32, bfloat16 or float16 tensors");
  }
  if (args.out.dtype() != DType::kF32 && args.out.dtype() != args.x.dtype()) {
    fail(args, "out in float32 or the dtype of x");
  }
  if ((args.x.dim(1) > 1 && args.x.stride(1) != 1) ||
      (args.out.dim(1) > 1 && args.out.stride(1) != 1)) {
    fail(args, "x and out with stride 1 in the last dimension");
  }
  if (args.scales) check_quantized(args);
}

WeightMatrix matrix_of(const MatmulArgs& args) {
  const ExpertMatrix matrix{args.weight.data(),
                            args.weight.stride(0),
                            args.weight.stride(1),
                            args.scales.data(),
                            args.scales ? args.scales.stride(0) : 0,
                            args.scales ? args.scales.stride(1) : 1};
  return weight_matrix(matrix, format_of(args), args.scale_layout);
}

// Rows that are quantised together, in a few megabytes of memory.
int64_t quantized_rows(int64_t rows, int64_t k) {
  constexpr int64_t kCodeBudget = int64_t{4} << 20;
  return std::min(rows, std::max<int64_t>(1, kCodeBudget / (std::max<int64_t>(k, 1) * 2)));
}

class Product {
 public:
  Product(const MatmulArgs& args, const KernelTable& kernels)
      : args_(args),
        kernels_(kernels),
        weight_(matrix_of(args)),
        x_type_(element_of(args.x.dtype())),
        out_type_(element_of(args.out.dtype())),
        blocks_(split_rows(args.x.dim(0))),
        in_place_(reads_in_place(kernels, x_type_, weight_, args.weight.dim(0))) {}

  // The rows side by side, where more than one meets weights in place.
  void pair_rows(Workspace& workspace, ThreadPool& threads) {
    if (!in_place_ || args_.x.dim(0) <= 1) return;
    pairs_ = static_cast<char*>(workspace.allocate(pair_bytes(args_.x.dim(0), args_.x.dim(1))));
    const int64_t slices = (args_.x.dim(1) + kSlice - 1) / kSlice;
    threads.parallel_for(blocks_.count * slices, [&](int64_t task, int) {
      pair_slice(task / slices, task % slices * kSlice);
    });
  }
  // The same on the calling thread, for one block of rows into `memory`.
  void pair_rows(char* memory) {
    if (!in_place_ || args_.x.dim(0) <= 1) return;
    pairs_ = memory;
    for (int64_t k = 0; k < args_.x.dim(1); k += kSlice) pair_slice(0, k);
  }

  // Codes and scales of all rows, where the weight wants them.
  void quantize_rows(Workspace& workspace, ThreadPool& threads) {
    if (args_.activations == ActivationScheme::kNone) return;
    const int64_t k = args_.x.dim(1);
    const bool is_static = args_.activations == ActivationScheme::kStatic;
    const int64_t group = activation_group(format_of(args_));
    const int64_t groups = (k + group - 1) / group;
    codes_ = static_cast<char*>(workspace.allocate(code_bytes(args_.x.dim(0), k)));
    float* scales = static_cast<float*>(workspace.allocate(scale_bytes(args_.x.dim(0), k)));
    row_scales_ = is_static ? &args_.input_scale : scales;
    scale_stride_ = is_static ? 0 : groups;
    scale_group_ = is_static ? k : group;
    threads.parallel_ranges(args_.x.dim(0), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        kernels_.quantize({x_row(row), x_type_, k, group, is_static ? args_.input_scale : 0,
                           codes_ + row * k * 2, scales + row * groups});
      }
    });
  }
  static size_t code_bytes(int64_t rows, int64_t k) { return static_cast<size_t>(rows * k) * 2; }
  static size_t scale_bytes(int64_t rows, int64_t k) {
    constexpr int64_t kGroup = kFp4ActivationGroup;  // the smallest
    return static_cast<size_t>(rows * ((k + kGroup - 1) / kGroup)) * sizeof(float);
  }

  static size_t pair_bytes(int64_t rows, int64_t k) {
    const RowBlocks blocks = split_rows(rows);
    return static_cast<size_t>(blocks.count * arranged_bytes(blocks.rows_per_block, k));
  }

  int64_t num_tasks() const {
    return blocks_.count * ((args_.weight.dim(0) + kPanelColumns - 1) / kPanelColumns);
  }

  // Row blocks of one panel follow each other, so the panel's weights stay in cache.
  void run(int64_t begin, int64_t end, const PanelScratch& scratch) const {
    for (int64_t task = begin; task < end; ++task) {
      const PanelPart part = part_of(task);
      const PanelPart next = task + 1 == end ? part : part_of(task + 1);
      const bool moves = next.begin != part.begin;
      run(task % blocks_.count, {&part, 1, moves ? &next : nullptr}, scratch);
    }
  }

  void run(int64_t block, const PanelParts& panel, const PanelScratch& scratch) const {
    const int64_t first_row = block * blocks_.rows_per_block;
    const int64_t first_column = panel.parts->begin;
    const int columns = panel.parts->count;
    const int rows = rows_of(block);
    const void* x[kMaxBlockRows];
    void* out[kMaxBlockRows];
    const float* scales[kMaxBlockRows];
    for (int r = 0; r < rows; ++r) {
      x[r] = x_row(first_row + r);
      if (codes_ != nullptr) {
        x[r] = codes_ + (first_row + r) * args_.x.dim(1) * 2;
        scales[r] = row_scales_ + (first_row + r) * scale_stride_;
      }
      out[r] = static_cast<char*>(args_.out.mutable_data()) +
               ((first_row + r) * args_.out.stride(0) + first_column) * bytes_of(out_type_);
    }
    RowSet row_set{x, rows, x_type_, pairs_of(block), args_.x.stride(0) != 0 ? x[0] : nullptr};
    if (codes_ != nullptr) {
      row_set.type = Element::kBF16;
      row_set.scales = scales;
      row_set.scale_group = scale_group_;
    }
    panel_product(kernels_, row_set, args_.x.dim(1), panel, scratch);
    float bias[kPanelColumns] = {};
    if (args_.bias) {
      read_floats(args_.bias.data(), args_.bias.stride(0), element_of(args_.bias.dtype()),
                  first_column, columns, bias);
    }
    kernels_.finish(
        {scratch.acc, rows, columns, args_.bias ? bias : nullptr, nullptr, out_type_, out});
  }

 private:
  PanelPart part_of(int64_t task) const {
    const int64_t first = task / blocks_.count * kPanelColumns;
    const int64_t columns = std::min<int64_t>(kPanelColumns, args_.weight.dim(0) - first);
    return {weight_, first, static_cast<int>(columns), 0, kPanelColumns};
  }

  static constexpr int64_t kSlice = 512;  // k in a task of pairing

  int rows_of(int64_t block) const {
    const int64_t left = args_.x.dim(0) - block * blocks_.rows_per_block;
    return static_cast<int>(std::min(blocks_.rows_per_block, left));
  }

  const void* x_row(int64_t row) const {
    return static_cast<const char*>(args_.x.data()) + row * args_.x.stride(0) * bytes_of(x_type_);
  }

  char* paired_block(int64_t block) const {
    return pairs_ + block * arranged_bytes(blocks_.rows_per_block, args_.x.dim(1));
  }

  const void* pairs_of(int64_t block) const {
    if (!in_place_) return nullptr;
    return args_.x.dim(0) == 1 ? x_row(0) : paired_block(block);
  }

  void pair_slice(int64_t block, int64_t k) const {
    const void* rows[kMaxBlockRows];
    const int count = rows_of(block);
    for (int r = 0; r < count; ++r) rows[r] = x_row(block * blocks_.rows_per_block + r);
    kernels_.pair({rows, k, count, std::min(kSlice, args_.x.dim(1) - k),
                   paired_block(block) + k * arranged_rows(count) * 2});
  }

  const MatmulArgs& args_;
  const KernelTable& kernels_;
  WeightMatrix weight_;
  Element x_type_;
  Element out_type_;
  RowBlocks blocks_;
  bool in_place_;
  char* pairs_ = nullptr;  // of each block
  char* codes_ = nullptr;  // bfloat16 [T, K]
  const float* row_scales_ = nullptr;
  int64_t scale_stride_ = 0;
  int64_t scale_group_ = 0;
};

}  // namespace

namespace {

void multiply(const MatmulArgs& args, Workspace& workspace, ThreadPool& threads) {
  const Workspace::Scope scope(workspace);
  Product product(args, kernels_for(active_isa(), args.x.dtype(), format_of(args)));
  product.pair_rows(workspace, threads);
  product.quantize_rows(workspace, threads);
  const PerThreadScratch scratch(workspace, threads.num_threads());
  threads.parallel_runs(product.num_tasks(), [&](int64_t begin, int64_t end, int thread) {
    product.run(begin, end, scratch[thread]);
  });
}

}  // namespace

void matmul(const MatmulArgs& args, Workspace& workspace, ThreadPool& threads) {
  check(args);
  const int64_t rows = args.x.dim(0);
  const int64_t k = args.x.dim(1);
  if (k == 0) fail(args, "K of at least 1");
  if (args.activations == ActivationScheme::kNone) return multiply(args, workspace, threads);
  const int64_t step = quantized_rows(rows, k);
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(rows, begin + step);
    MatmulArgs some = args;
    some.x = args.x.slice(begin, end);
    some.out = args.out.slice(begin, end);
    multiply(some, workspace, threads);
  }
}

namespace {

// Rows [begin, end) of matrix `b` of a batch.
MatmulArgs rows_of_matrix(const BatchedMatmulArgs& args, int64_t b, int64_t begin, int64_t end) {
  const TensorView x = args.x.slice(begin, end);
  const MutableTensorView out = args.out.slice(begin, end);
  const TensorView& w = args.weight;
  const Element x_type = element_of(x.dtype());
  const Element out_type = element_of(out.dtype());
  return {{static_cast<const char*>(x.data()) + b * x.stride(1) * bytes_of(x_type),
           x.dtype(),
           {x.dim(0), x.dim(2)},
           {x.stride(0), 1}},
          {static_cast<const char*>(w.data()) + b * w.stride(0) * bytes_of(element_of(w.dtype())),
           w.dtype(),
           {w.dim(1), w.dim(2)},
           {w.stride(1), w.stride(2)}},
          {},
          {static_cast<char*>(out.mutable_data()) + b * out.stride(1) * bytes_of(out_type),
           out.dtype(),
           {out.dim(0), out.dim(2)},
           {out.stride(0), 1}}};
}

}  // namespace

// A task is one block of rows of one matrix, whose weights stay in cache meanwhile.
void batched_matmul(const BatchedMatmulArgs& args, Workspace& workspace, ThreadPool& threads) {
  const int64_t rows = args.x.dim(0);
  const int64_t k = args.x.dim(2);
  CADRE_ASSERT(args.out.dim(0) == rows && args.x.dim(1) == args.weight.dim(0) &&
               args.out.dim(1) == args.weight.dim(0));
  if (rows == 0) return;
  const RowBlocks blocks = split_rows(rows);
  const KernelTable& kernels = kernels_for(active_isa(), args.x.dtype());
  const Workspace::Scope scope(workspace);
  const PerThreadScratch scratch(workspace, threads.num_threads());
  const size_t pair_bytes = Workspace::padded(Product::pair_bytes(blocks.rows_per_block, k));
  char* const pairs = static_cast<char*>(
      workspace.allocate(pair_bytes * static_cast<size_t>(threads.num_threads())));
  threads.parallel_runs(
      args.weight.dim(0) * blocks.count, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t task = begin; task < end; ++task) {
          const int64_t first = task % blocks.count * blocks.rows_per_block;
          const MatmulArgs one = rows_of_matrix(args, task / blocks.count, first,
                                                std::min(rows, first + blocks.rows_per_block));
          check(one);
          Product product(one, kernels);
          product.pair_rows(pairs + static_cast<size_t>(thread) * pair_bytes);
          product.run(0, product.num_tasks(), scratch[thread]);
        }
      });
}

size_t batched_matmul_workspace_bytes(int64_t num_rows, int64_t k, DType /*compute_dtype*/,
                                      int num_threads) {
  // Fewer rows may make a larger block.
  const size_t pair_bytes = Product::pair_bytes(std::min(num_rows, kMaxBlockRows), k);
  return PerThreadScratch::bytes(num_threads) +
         Workspace::padded(Workspace::padded(pair_bytes) * static_cast<size_t>(num_threads));
}

size_t matmul_workspace_bytes(int64_t num_rows, int64_t k, DType compute_dtype, int num_threads) {
  const bool pairs =
      num_rows > 1 && kernels_for(active_isa(), compute_dtype).multiply_in_place != nullptr;
  const int64_t codes = quantized_rows(num_rows, k);
  return PerThreadScratch::bytes(num_threads) +
         (pairs ? Workspace::padded(Product::pair_bytes(num_rows, k)) : 0) +
         Workspace::padded(Product::code_bytes(codes, k)) +
         Workspace::padded(Product::scale_bytes(codes, k));
}

}  // namespace cadre::cpu
