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

// A piece has at most kPieceRows (row, head) pairs. With many query heads over a KV head a piece
// takes more of them and fewer rows, so that each block of keys is widened less often.
constexpr int64_t kPieceRows = 128;
constexpr int64_t kFewHeads = 8;
constexpr int64_t kManyHeads = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Widths of a row of keys and of what is summed.
struct Widths {
  int64_t key;
  int64_t value;
};

// One thread's memory.
struct Scratch {
  float* keys;         // [kKeyBlock, key]
  float* values;       // [kKeyBlock, value]
  float* queries;      // [rows, heads, key]
  float* accumulator;  // [rows, heads, value]
  SoftmaxState* states;

  static size_t bytes(Widths widths) {
    const auto both = static_cast<size_t>(widths.key + widths.value);
    return Workspace::padded((kKeyBlock + kPieceRows) * both * sizeof(float) +
                             kPieceRows * sizeof(SoftmaxState));
  }

  Scratch(std::byte* memory, Widths widths) {
    keys = reinterpret_cast<float*>(memory);
    values = keys + kKeyBlock * widths.key;
    queries = values + kKeyBlock * widths.value;
    accumulator = queries + kPieceRows * widths.key;
    states = reinterpret_cast<SoftmaxState*>(accumulator + kPieceRows * widths.value);
  }
};

// Plain attention, or with q in two tensors and values inside the rows of keys.
struct Call {
  const AttentionArgs& args;  // values may have any row stride
  TensorView q_rest;          // [num_tokens, num_heads, rest]: elements behind those of q; may be
                              // absent, and strided like q
  Widths widths() const { return {args.keys.dim(3), args.values.dim(3)}; }
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
    const int64_t most = group < kManyHeads ? kFewHeads : kManyHeads;
    rows = kPieceRows / most;
    heads = std::min(group, most);
    // Few pieces (decoding one sequence on many cores): fewer heads each.
    while (heads > 1 && count() < 2 * threads) heads = ceil_div(heads, 2);
  }
  int64_t heads_per_group() const { return ceil_div(group, heads); }
  int64_t head_pieces() const { return args.keys.dim(1) * heads_per_group(); }
  int64_t count() const {
    int64_t tiles = 0;
    for (const SequenceSpan& s : args.tokens.sequences) tiles += ceil_div(s.num_tokens, rows);
    return tiles * head_pieces();
  }
  Piece piece(int64_t index) const {
    const int64_t head_piece = index % head_pieces();
    int64_t tile = index / head_pieces();
    size_t s = 0;
    while (tile >= ceil_div(args.tokens.sequences[s].num_tokens, rows)) {
      tile -= ceil_div(args.tokens.sequences[s++].num_tokens, rows);
    }
    const int64_t in_group = head_piece % heads_per_group() * heads;
    const int64_t kv_head = head_piece / heads_per_group();
    return {args.tokens.sequences[s], kv_head * group + in_group, std::min(heads, group - in_group),
            tile * rows, std::min((tile + 1) * rows, args.tokens.sequences[s].num_tokens)};
  }

  const AttentionArgs& args;
  int64_t group;
  int64_t heads;  // of a piece
  int64_t rows;   // of a piece
};

class PieceRun {
 public:
  PieceRun(const Call& call, const Piece& piece, const Scratch& scratch,
           const AttendKernels& kernels)
      : call_(call),
        args_(call.args),
        piece_(piece),
        scratch_(scratch),
        kernels_(kernels),
        widths_(call.widths()) {}

  void run() {
    begin();
    const int64_t kv_head = piece_.first_head / (args_.q.dim(1) / args_.keys.dim(1));
    const int64_t last = last_key(piece_.row_end - 1) + 1;
    const bool one_row = args_.values.data() == args_.keys.data();
    int64_t first = first_key(piece_.row_begin) / kKeyBlock * kKeyBlock;
    for (; first < last; first += kKeyBlock) {
      const int64_t count = std::min(kKeyBlock, last - first);
      const float* keys = cache_rows(args_.keys, kv_head, first, count, scratch_.keys);
      const float* values =
          one_row ? keys : cache_rows(args_.values, kv_head, first, count, scratch_.values);
      block(first, first + count, keys, values);
    }
    finish();
  }

 private:
  int64_t position(int64_t row) const { return piece_.sequence.past + row; }
  int64_t first_key(int64_t row) const {
    const int64_t window = args_.sliding_window;
    return window > 0 ? std::max<int64_t>(0, position(row) - window + 1) : 0;
  }
  int64_t last_key(int64_t row) const {
    return position(args_.is_causal ? row : piece_.sequence.num_tokens - 1);
  }
  // Element offset of (row, head) in q, its rest or out.
  int64_t offset(const TensorView& x, int64_t row, int64_t head) const {
    return (piece_.sequence.first_row + row) * x.stride(0) +
           (piece_.first_head + head) * x.stride(1);
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
    const int64_t offset = piece_.sequence.slot * cache.stride(0) + kv_head * cache.stride(1) +
                           first * cache.stride(2);
    const std::byte* source = at(cache.data(), cache.dtype(), offset);
    if (cache.dtype() == DType::kF32) return reinterpret_cast<const float*>(source);
    kernels_.widen(source, cache.dtype(), count * cache.dim(3), scratch);
    return scratch;
  }

  void load(const TensorView& x, int64_t row, int64_t head, float* query) const {
    load_floats(at(x.data(), x.dtype(), offset(x, row, head)), x.dtype(), x.dim(2), query);
  }

  // A sink is what a key with a value of zeros would leave behind.
  SoftmaxState first_state(int64_t head) const {
    if (!args_.sinks) return {-std::numeric_limits<float>::infinity(), 0.0f};
    return {args_.sinks.as<float>()[head], 1.0f};
  }

  void begin() {
    each([&](int64_t row, int64_t head, int64_t i) {
      float* query = scratch_.queries + i * widths_.key;
      load(args_.q, row, head, query);
      if (call_.q_rest) load(call_.q_rest, row, head, query + args_.q.dim(2));
      for (int64_t d = 0; d < widths_.key; ++d) query[d] *= args_.scale;
      std::fill_n(scratch_.accumulator + i * widths_.value, widths_.value, 0.0f);
      scratch_.states[i] = first_state(piece_.first_head + head);
    });
  }

  // The heads of a row see the same keys and go together.
  void block(int64_t first, int64_t last, const float* keys, const float* values) {
    const int64_t value_stride = values == keys ? widths_.key : widths_.value;
    for (int64_t row = piece_.row_begin; row < piece_.row_end; ++row) {
      const int64_t begin = std::max(first, first_key(row));
      const int64_t end = std::min(last, last_key(row) + 1);
      if (begin >= end) continue;
      const int64_t i = local(row, 0);
      kernels_.attend({scratch_.queries + i * widths_.key, keys + (begin - first) * widths_.key,
                       values + (begin - first) * value_stride, end - begin, widths_.key,
                       widths_.value, value_stride, scratch_.accumulator + i * widths_.value,
                       scratch_.states + i, piece_.num_heads});
    }
  }

  void finish() {
    each([&](int64_t row, int64_t head, int64_t i) {
      float* result = scratch_.accumulator + i * widths_.value;
      const float factor = 1.0f / scratch_.states[i].sum;
      for (int64_t d = 0; d < widths_.value; ++d) result[d] *= factor;
      const DType dtype = args_.out.dtype();
      store_floats(result, widths_.value, dtype,
                   at(args_.out.mutable_data(), dtype, offset(args_.out, row, head)));
    });
  }

  const Call& call_;
  const AttentionArgs& args_;
  const Piece& piece_;
  const Scratch& scratch_;
  const AttendKernels& kernels_;
  Widths widths_;
};

void run_attention(const Call& call, Workspace& workspace, const Stream& stream) {
  const int threads = stream.threads->num_threads();
  const Cut cut(call.args, threads);
  const Workspace::Scope scope(workspace);
  const Widths widths = call.widths();
  const size_t stride = Scratch::bytes(widths);
  auto* memory = static_cast<std::byte*>(workspace.allocate(stride * static_cast<size_t>(threads)));
  const AttendKernels& kernels = attend_kernels().front();
  stream.threads->parallel_for(cut.count(), [&](int64_t index, int thread) {
    const Piece piece = cut.piece(index);
    const Scratch scratch(memory + stride * static_cast<size_t>(thread), widths);
    PieceRun(call, piece, scratch, kernels).run();
  });
}

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
  CADRE_ASSERT(!args.sinks || args.sinks.numel() == args.q.dim(1));
  run_attention({args, {}}, workspace, stream);
}

size_t CpuDenseOps::attention_workspace_bytes(const AttentionShape& shape, int64_t /*max_tokens*/,
                                              int num_threads) const {
  return Scratch::bytes({shape.head_dim, shape.head_dim}) * static_cast<size_t>(num_threads);
}

void CpuDenseOps::latent_attention(const LatentAttentionArgs& args, Workspace& workspace,
                                   const Stream& stream) {
  const TensorView& rows = args.rows;
  const int64_t rank = args.q_latent.dim(2);
  CADRE_ASSERT(rows.dim(1) == 1 && rank + args.q_rope.dim(2) == rows.dim(3) &&
               args.q_rope.dim(1) == args.q_latent.dim(1) && args.out.dim(2) == rank);
  const TensorView values(rows.data(), rows.dtype(), {rows.dim(0), 1, rows.dim(2), rank},
                          rows.strides());
  const AttentionArgs plain{args.q_latent, rows, values, args.tokens, args.scale, 0, args.out};
  run_attention({plain, args.q_rope}, workspace, stream);
}

size_t CpuDenseOps::latent_attention_workspace_bytes(const LatentShape& shape, int64_t /*max_rows*/,
                                                     int num_threads) const {
  return Scratch::bytes({shape.rank + shape.rope_dim, shape.rank}) *
         static_cast<size_t>(num_threads);
}

}  // namespace cadre::cpu
