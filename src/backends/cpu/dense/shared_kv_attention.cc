// Attention over rows that are key and value at once. A piece of work is one token and some of its
// heads: its rows are gathered as floats, a block at a time, for all of them. Blocks of the window
// lie at multiples of kKeyBlock of the position, those of entries at multiples of their number, so
// the order of summation depends on the token's position alone.
#include <algorithm>
#include <cstring>
#include <limits>

#include "backends/cpu/dense/attend.h"
#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/ring.h"
#include "backends/cpu/dense/rows.h"
#include "cadre/thread_pool.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

constexpr int64_t kMaxHeads = 64;  // of a piece

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One thread's memory.
struct Scratch {
  float* rows;          // [kKeyBlock, head_dim]
  float* queries;       // [heads, head_dim]
  float* accumulators;  // [heads, head_dim]
  SoftmaxState* states;

  static int64_t heads(int64_t num_heads) { return std::min(num_heads, kMaxHeads); }
  static size_t bytes(int64_t num_heads, int64_t head_dim) {
    const int64_t floats = (kKeyBlock + 2 * heads(num_heads)) * head_dim;
    return Workspace::padded(static_cast<size_t>(floats) * sizeof(float) +
                             static_cast<size_t>(heads(num_heads)) * sizeof(SoftmaxState));
  }
  Scratch(std::byte* memory, int64_t num_heads, int64_t head_dim) {
    rows = reinterpret_cast<float*>(memory);
    queries = rows + kKeyBlock * head_dim;
    accumulators = queries + heads(num_heads) * head_dim;
    states = reinterpret_cast<SoftmaxState*>(accumulators + heads(num_heads) * head_dim);
  }
};

// Heads [first_head, first_head + num_heads) of the token at `position` of a sequence.
struct Piece {
  SequenceSpan sequence;
  int64_t position;
  int64_t first_head;
  int64_t num_heads;
};

class PieceRun {
 public:
  PieceRun(const SharedKvAttentionArgs& args, const Piece& piece, const Scratch& scratch,
           const AttendKernels& kernels)
      : args_(args),
        piece_(piece),
        scratch_(scratch),
        kernels_(kernels),
        dim_(args.q.dim(2)),
        row_(piece.sequence.first_row + piece.position - piece.sequence.past) {}

  void run() const {
    begin();
    attend_window();
    if (args_.entries) attend_entries();
    finish();
  }

 private:
  // Element offset of the piece's first head in q and out.
  int64_t offset() const { return (row_ * args_.q.dim(1) + piece_.first_head) * dim_; }

  // A sink is a row of its own that has come first: score, and nothing to add.
  void begin() const {
    const int64_t count = piece_.num_heads * dim_;
    const DType dtype = args_.q.dtype();
    load_floats(at(args_.q.data(), dtype, offset()), dtype, count, scratch_.queries);
    for (int64_t i = 0; i < count; ++i) scratch_.queries[i] *= args_.scale;
    std::fill_n(scratch_.accumulators, count, 0.0f);
    for (int64_t head = 0; head < piece_.num_heads; ++head) {
      float sink;
      load_floats(at(args_.sinks.data(), args_.sinks.dtype(), piece_.first_head + head),
                  args_.sinks.dtype(), 1, &sink);
      scratch_.states[head] = {sink, 1.0f};
    }
  }

  void gather(const std::byte* row, DType dtype, int64_t i) const {
    float* to = scratch_.rows + i * dim_;
    if (dtype == DType::kF32) {
      std::memcpy(to, row, static_cast<size_t>(dim_) * sizeof(float));
    } else {
      kernels_.widen(row, dtype, dim_, to);
    }
  }

  void attend(int64_t count) const {
    if (count == 0) return;
    kernels_.attend({scratch_.queries, scratch_.rows, scratch_.rows, count, dim_, dim_, dim_,
                     scratch_.accumulators, scratch_.states, piece_.num_heads});
  }

  void attend_window() const {
    const int64_t end = piece_.position + 1;
    int64_t next = std::max<int64_t>(0, end - args_.sliding_window);
    while (next < end) {
      const int64_t last = std::min(end, (next / kKeyBlock + 1) * kKeyBlock);
      for (int64_t p = next; p < last; ++p) {
        gather(row_at(p, args_.kv, args_.kv_ring, piece_.sequence), args_.kv.dtype(), p - next);
      }
      attend(last - next);
      next = last;
    }
  }

  void attend_entries() const {
    const TensorView& cache = args_.entries;
    const int64_t closed = (piece_.position + 1) / args_.rate;
    const int64_t most = args_.picks ? args_.picks.dim(1) : closed;
    const int32_t* picks = args_.picks ? args_.picks.as<int32_t>() + row_ * most : nullptr;
    int64_t count = 0;
    for (int64_t i = 0; i < most && (picks == nullptr || picks[i] >= 0); ++i) {
      const int64_t entry = picks != nullptr ? picks[i] : i;
      const int64_t row = piece_.sequence.slot * cache.dim(2) + entry;
      gather(at(cache.data(), cache.dtype(), row * dim_), cache.dtype(), count++);
      if (count == kKeyBlock) {
        attend(count);
        count = 0;
      }
    }
    attend(count);
  }

  void finish() const {
    for (int64_t head = 0; head < piece_.num_heads; ++head) {
      float* result = scratch_.accumulators + head * dim_;
      const float factor = 1.0f / scratch_.states[head].sum;
      for (int64_t d = 0; d < dim_; ++d) result[d] *= factor;
    }
    const DType dtype = args_.out.dtype();
    store_floats(scratch_.accumulators, piece_.num_heads * dim_, dtype,
                 at(args_.out.mutable_data(), dtype, offset()));
  }

  const SharedKvAttentionArgs& args_;
  const Piece& piece_;
  const Scratch& scratch_;
  const AttendKernels& kernels_;
  int64_t dim_;
  int64_t row_;  // of q
};

// Heads of a piece: all that fit, fewer when there is little work (decoding on many cores).
int64_t heads_of_piece(int64_t num_tokens, int64_t num_heads, int64_t threads) {
  int64_t heads = Scratch::heads(num_heads);
  while (heads > 4 && num_tokens * ceil_div(num_heads, heads) < 2 * threads) heads /= 2;
  return heads;
}

}  // namespace

void CpuDenseOps::shared_kv_attention(const SharedKvAttentionArgs& args, Workspace& workspace,
                                      const Stream& stream) {
  const int64_t num_heads = args.q.dim(1);
  const int64_t dim = args.q.dim(2);
  CADRE_ASSERT(args.kv_ring.dim(3) == dim && args.kv_ring.dim(2) >= args.sliding_window - 1 &&
               (!args.entries || args.entries.dim(3) == dim));
  const int threads = stream.threads->num_threads();
  const int64_t heads = heads_of_piece(args.q.dim(0), num_heads, threads);
  const int64_t pieces = ceil_div(num_heads, heads);
  const Workspace::Scope scope(workspace);
  const size_t stride = Scratch::bytes(num_heads, dim);
  auto* memory = static_cast<std::byte*>(workspace.allocate(stride * static_cast<size_t>(threads)));
  const AttendKernels& kernels = attend_kernels().front();
  stream.threads->parallel_for(args.q.dim(0) * pieces, [&](int64_t index, int thread) {
    const int64_t row = index / pieces;
    const SequenceSpan& s = sequence_of(args.tokens, row);
    const int64_t first_head = index % pieces * heads;
    const Piece piece{s, s.past + row - s.first_row, first_head,
                      std::min(heads, num_heads - first_head)};
    const Scratch scratch(memory + stride * static_cast<size_t>(thread), num_heads, dim);
    PieceRun(args, piece, scratch, kernels).run();
  });
}

size_t CpuDenseOps::shared_kv_attention_workspace_bytes(int64_t num_heads, int64_t head_dim,
                                                        int num_threads) const {
  return Workspace::padded(Scratch::bytes(num_heads, head_dim) * static_cast<size_t>(num_threads));
}

}  // namespace cadre::cpu
