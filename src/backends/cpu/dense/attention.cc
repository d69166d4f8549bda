// Attention over the cache. A piece of work is a few query heads that share a KV head, for a few
// rows of one sequence: each block of keys is widened to float once and serves all of them. How the
// work is cut has no influence on results (attend.h).
#include <algorithm>
#include <cstring>
#include <limits>

#include "backends/cpu/dense/attend.h"
#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "cadre/thread_pool.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

constexpr int64_t kRowTile = 16;  // rows of a piece
constexpr int64_t kMaxHeads = 8;  // query heads of a piece

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One thread's memory.
struct Scratch {
  float* keys;         // [kKeyBlock, head_dim]
  float* values;       // [kKeyBlock, head_dim]
  float* queries;      // [rows, heads, head_dim]
  float* accumulator;  // [rows, heads, head_dim]
  SoftmaxState* states;

  static size_t bytes(int64_t head_dim) {
    const auto dim = static_cast<size_t>(head_dim);
    return Workspace::padded((2 * kKeyBlock + 2 * kRowTile * kMaxHeads) * dim * sizeof(float) +
                             kRowTile * kMaxHeads * sizeof(SoftmaxState));
  }

  Scratch(std::byte* memory, int64_t head_dim) {
    keys = reinterpret_cast<float*>(memory);
    values = keys + kKeyBlock * head_dim;
    queries = values + kKeyBlock * head_dim;
    accumulator = queries + kRowTile * kMaxHeads * head_dim;
    states = reinterpret_cast<SoftmaxState*>(accumulator + kRowTile * kMaxHeads * head_dim);
  }
};

struct Piece {
  SequenceSpan sequence;
  int64_t first_head;
  int64_t num_heads;
  int64_t row_begin;  // of the sequence's new rows
  int64_t row_end;
};

// How all work is cut, so that piece i can be found from i alone.
struct Cut {
  Cut(const AttentionArgs& args, int threads) : args(args) {
    group = args.q.dim(1) / args.keys.dim(1);
    heads = std::min(group, kMaxHeads);
    // Few pieces (decoding one sequence on many cores): a head each.
    if (count() < 2 * threads) heads = 1;
  }
  int64_t heads_per_group() const { return ceil_div(group, heads); }
  int64_t head_pieces() const { return args.keys.dim(1) * heads_per_group(); }
  int64_t count() const {
    int64_t tiles = 0;
    for (const SequenceSpan& s : args.tokens.sequences) tiles += ceil_div(s.num_tokens, kRowTile);
    return tiles * head_pieces();
  }
  Piece piece(int64_t index) const {
    const int64_t head_piece = index % head_pieces();
    int64_t tile = index / head_pieces();
    size_t s = 0;
    while (tile >= ceil_div(args.tokens.sequences[s].num_tokens, kRowTile)) {
      tile -= ceil_div(args.tokens.sequences[s++].num_tokens, kRowTile);
    }
    const int64_t in_group = head_piece % heads_per_group() * heads;
    const int64_t kv_head = head_piece / heads_per_group();
    return {args.tokens.sequences[s], kv_head * group + in_group, std::min(heads, group - in_group),
            tile * kRowTile, std::min((tile + 1) * kRowTile, args.tokens.sequences[s].num_tokens)};
  }

  const AttentionArgs& args;
  int64_t group;
  int64_t heads;
};

class PieceRun {
 public:
  PieceRun(const AttentionArgs& args, const Piece& piece, const Scratch& scratch,
           const AttendKernels& kernels)
      : args_(args), piece_(piece), scratch_(scratch), kernels_(kernels), dim_(args.q.dim(2)) {}

  void run() {
    begin();
    const int64_t kv_head = piece_.first_head / (args_.q.dim(1) / args_.keys.dim(1));
    const int64_t last = piece_.sequence.past + piece_.row_end;  // one past the last position
    int64_t first = first_key(piece_.row_begin) / kKeyBlock * kKeyBlock;
    for (; first < last; first += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, last - first);
      block(first, first + count, cache_rows(args_.keys, kv_head, first, count, scratch_.keys),
            cache_rows(args_.values, kv_head, first, count, scratch_.values));
    }
    finish();
  }

 private:
  int64_t position(int64_t row) const { return piece_.sequence.past + row; }
  int64_t first_key(int64_t row) const {
    const int64_t window = args_.sliding_window;
    return window > 0 ? std::max<int64_t>(0, position(row) - window + 1) : 0;
  }
  // Element offset of (row, head) in q and out.
  int64_t offset(int64_t row, int64_t head) const {
    return ((piece_.sequence.first_row + row) * args_.q.dim(1) + piece_.first_head + head) * dim_;
  }
  int64_t local(int64_t row, int64_t head) const {
    return (row - piece_.row_begin) * piece_.num_heads + head;
  }

  template <typename Fn>
  void each(const Fn& fn) const {
    for (int64_t row = piece_.row_begin; row < piece_.row_end; ++row) {
      for (int64_t head = 0; head < piece_.num_heads; ++head) fn(row, head, local(row, head));
    }
  }

  // `count` rows of one head of the cache as floats: in place when they are, else through scratch.
  const float* cache_rows(const TensorView& cache, int64_t kv_head, int64_t first, int64_t count,
                          float* scratch) const {
    const int64_t head = piece_.sequence.slot * cache.dim(1) + kv_head;
    const int64_t offset = (head * cache.dim(2) + first) * dim_;
    const std::byte* source = at(cache.data(), cache.dtype(), offset);
    if (cache.dtype() == DType::kF32) return reinterpret_cast<const float*>(source);
    kernels_.widen(source, cache.dtype(), count * dim_, scratch);
    return scratch;
  }

  void begin() {
    each([&](int64_t row, int64_t head, int64_t i) {
      float* query = scratch_.queries + i * dim_;
      const DType dtype = args_.q.dtype();
      load_floats(at(args_.q.data(), dtype, offset(row, head)), dtype, dim_, query);
      for (int64_t d = 0; d < dim_; ++d) query[d] *= args_.scale;
      std::fill_n(scratch_.accumulator + i * dim_, dim_, 0.0f);
      scratch_.states[i] = {-std::numeric_limits<float>::infinity(), 0.0f};
    });
  }

  // The heads of a row see the same keys and go together.
  void block(int64_t first, int64_t last, const float* keys, const float* values) {
    for (int64_t row = piece_.row_begin; row < piece_.row_end; ++row) {
      const int64_t begin = std::max(first, first_key(row));
      const int64_t end = std::min(last, position(row) + 1);
      if (begin >= end) continue;
      const int64_t i = local(row, 0);
      kernels_.attend({scratch_.queries + i * dim_, keys + (begin - first) * dim_,
                       values + (begin - first) * dim_, end - begin, dim_,
                       scratch_.accumulator + i * dim_, scratch_.states + i, piece_.num_heads});
    }
  }

  void finish() {
    each([&](int64_t row, int64_t head, int64_t i) {
      float* result = scratch_.accumulator + i * dim_;
      const float factor = 1.0f / scratch_.states[i].sum;
      for (int64_t d = 0; d < dim_; ++d) result[d] *= factor;
      const DType dtype = args_.out.dtype();
      store_floats(result, dim_, dtype, at(args_.out.mutable_data(), dtype, offset(row, head)));
    });
  }

  const AttentionArgs& args_;
  const Piece& piece_;
  const Scratch& scratch_;
  const AttendKernels& kernels_;
  int64_t dim_;
};

}  // namespace

void CpuDenseOps::store_kv(const TensorView& x, const StepTokens& tokens, MutableTensorView cache,
                           const Stream& stream) {
  CADRE_ASSERT(x.dtype() == cache.dtype() && x.dim(1) == cache.dim(1) && x.dim(2) == cache.dim(3));
  const int64_t heads = x.dim(1);
  const int64_t dim = x.dim(2);
  const size_t row_bytes = static_cast<size_t>(dim) * size_of(x.dtype());
  for (const SequenceSpan& s : tokens.sequences) {
    for_row_ranges(stream, s.num_tokens, heads * dim, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t head = 0; head < heads; ++head) {
          const int64_t from = ((s.first_row + t) * heads + head) * dim;
          const int64_t to = ((s.slot * heads + head) * cache.dim(2) + s.past + t) * dim;
          std::memcpy(at(cache.mutable_data(), cache.dtype(), to), at(x.data(), x.dtype(), from),
                      row_bytes);
        }
      }
    });
  }
}

void CpuDenseOps::attention(const AttentionArgs& args, Workspace& workspace, const Stream& stream) {
  CADRE_ASSERT(args.q.dim(1) % args.keys.dim(1) == 0 && args.q.dim(2) == args.keys.dim(3));
  const int threads = stream.threads->num_threads();
  const Cut cut(args, threads);
  const Workspace::Scope scope(workspace);
  const size_t stride = Scratch::bytes(args.q.dim(2));
  auto* memory = static_cast<std::byte*>(workspace.allocate(stride * static_cast<size_t>(threads)));
  const AttendKernels& kernels = attend_kernels().front();
  stream.threads->parallel_for(cut.count(), [&](int64_t index, int thread) {
    const Piece piece = cut.piece(index);
    const Scratch scratch(memory + stride * static_cast<size_t>(thread), args.q.dim(2));
    PieceRun(args, piece, scratch, kernels).run();
  });
}

size_t CpuDenseOps::attention_workspace_bytes(const AttentionShape& shape, int64_t /*max_tokens*/,
                                              int num_threads) const {
  return Scratch::bytes(shape.head_dim) * static_cast<size_t>(num_threads);
}

}  // namespace cadre::cpu
