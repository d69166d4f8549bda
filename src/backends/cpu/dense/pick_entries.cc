// The indexer of compressed sparse attention: the k best entries of every token. Which they are
// does not depend on the order in which entries are looked at, so they may be shared out to threads
// in any pieces; memory is a few times k, whatever the length of the context.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "backends/cpu/dense/attend.h"
#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "cadre/thread_pool.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Candidate {
  float score;
  int32_t entry;

  bool operator<(const Candidate& other) const {  // the better one is first
    return score > other.score || (score == other.score && entry < other.entry);
  }
};

// The best `k` of what was added, and now and then some more.
class Best {
 public:
  static int64_t capacity(int64_t k) { return 2 * k + kKeyBlock; }

  Best(Candidate* memory, int64_t k, int64_t size = 0) : items_(memory), k_(k), size_(size) {}

  int64_t size() const { return size_; }
  std::span<Candidate> items() const { return {items_, static_cast<size_t>(size_)}; }

  void add(const Candidate& candidate) {
    if (size_ >= k_ && candidate.score < worst_) return;
    items_[size_++] = candidate;
    if (size_ == capacity(k_)) shrink();
  }
  void shrink() {
    if (size_ <= k_) return;
    std::nth_element(items_, items_ + k_ - 1, items_ + size_);
    size_ = k_;
    worst_ = items_[k_ - 1].score;
  }

 private:
  Candidate* items_;
  int64_t k_;
  int64_t size_;
  float worst_ = -std::numeric_limits<float>::infinity();  // below it nothing is among the best
};

// One piece's memory.
struct Scratch {
  float* queries;  // [num_heads, width]
  float* keys;     // [kKeyBlock, width]
  float* scores;   // [num_heads, kKeyBlock]
  Candidate* candidates;
  int64_t* size;  // of these, when the piece is done

  static size_t bytes(int64_t heads, int64_t width, int64_t k) {
    const int64_t floats = (heads + kKeyBlock) * width + heads * kKeyBlock;
    return Workspace::padded(sizeof(int64_t) +
                             static_cast<size_t>(Best::capacity(k)) * sizeof(Candidate) +
                             static_cast<size_t>(floats) * sizeof(float));
  }
  Scratch(std::byte* memory, int64_t heads, int64_t width, int64_t k) {
    size = reinterpret_cast<int64_t*>(memory);
    candidates = reinterpret_cast<Candidate*>(size + 1);
    queries = reinterpret_cast<float*>(candidates + Best::capacity(k));
    keys = queries + heads * width;
    scores = keys + kKeyBlock * width;
  }
};

class Picker {
 public:
  Picker(const PickEntriesArgs& args, Workspace& workspace, ThreadPool& threads)
      : args_(args),
        threads_(threads),
        kernels_(attend_kernels().front()),
        rows_(args.queries.dim(0)),
        heads_(args.queries.dim(1)),
        width_(args.queries.dim(2)),
        k_(args.picks.dim(1)),
        pieces_(pieces_of(rows_, threads.num_threads())),
        stride_(Scratch::bytes(heads_, width_, k_)),
        memory_(static_cast<std::byte*>(
            workspace.allocate(stride_ * num_scratches(threads.num_threads())))) {}

  static size_t num_scratches(int threads) { return 2 * static_cast<size_t>(threads); }

  void run() const {
    threads_.parallel_for(rows_ * pieces_, [&](int64_t index, int thread) {
      const Scratch mine = scratch(pieces_ == 1 ? thread : index);
      look(index / pieces_, index % pieces_, mine);
      if (pieces_ == 1) write(index, {mine.candidates, k_, *mine.size});
    });
    for (int64_t row = 0; pieces_ > 1 && row < rows_; ++row) merge(row);
  }

 private:
  // Pieces of the entries of each row: several when there are few rows.
  static int64_t pieces_of(int64_t rows, int64_t threads) {
    return rows == 0 || rows >= threads ? 1 : ceil_div(threads, rows);
  }
  Scratch scratch(int64_t i) const {
    return {memory_ + stride_ * static_cast<size_t>(i), heads_, width_, k_};
  }
  int64_t num_closed(int64_t row) const {
    return (args_.tokens.positions.as<int32_t>()[row] + 1) / args_.rate;
  }

  // The best entries of one piece of a row's.
  void look(int64_t row, int64_t piece, const Scratch& mine) const {
    *mine.size = 0;
    const int64_t closed = num_closed(row);
    if (closed <= k_) return;
    const int64_t share = ceil_div(ceil_div(closed, kKeyBlock), pieces_) * kKeyBlock;
    const int64_t end = std::min(closed, (piece + 1) * share);
    load_floats(at(args_.queries.data(), args_.queries.dtype(), row * heads_ * width_),
                args_.queries.dtype(), heads_ * width_, mine.queries);
    Best best(mine.candidates, k_);
    for (int64_t first = piece * share; first < end; first += kKeyBlock) {
      score_block(row, first, std::min(kKeyBlock, end - first), mine, best);
    }
    best.shrink();
    *mine.size = best.size();
  }

  void score_block(int64_t row, int64_t first, int64_t count, const Scratch& mine,
                   Best& best) const {
    const TensorView& cache = args_.keys;
    const int64_t slot = args_.tokens.slots.as<int32_t>()[row];
    load_floats(at(cache.data(), cache.dtype(), (slot * cache.dim(2) + first) * width_),
                cache.dtype(), count * width_, mine.keys);
    AttendArgs block{};
    block.queries = mine.queries;
    block.keys = mine.keys;
    block.count = count;
    block.head_dim = width_;
    block.num_queries = heads_;
    kernels_.score(block, mine.scores);
    const float* weights = args_.weights.as<float>() + row * heads_;
    for (int64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int64_t head = 0; head < heads_; ++head) {
        const float score = mine.scores[head * kKeyBlock + i];
        sum += (score < 0.0f ? 0.0f : score) * (weights[head] * args_.weight_scale);
      }
      if (std::isnan(sum)) sum = -std::numeric_limits<float>::infinity();
      best.add({sum, static_cast<int32_t>(first + i)});
    }
  }

  void merge(int64_t row) const {
    const Scratch first = scratch(row * pieces_);
    Best best(first.candidates, k_, *first.size);
    for (int64_t piece = 1; piece < pieces_; ++piece) {
      const Scratch other = scratch(row * pieces_ + piece);
      for (int64_t i = 0; i < *other.size; ++i) best.add(other.candidates[i]);
    }
    best.shrink();
    write(row, best);
  }

  void write(int64_t row, const Best& best) const {
    int32_t* picks = args_.picks.as<int32_t>() + row * k_;
    const int64_t closed = num_closed(row);
    if (closed <= k_) {
      for (int64_t i = 0; i < k_; ++i) picks[i] = i < closed ? static_cast<int32_t>(i) : -1;
      return;
    }
    CADRE_DCHECK(best.size() == k_);
    for (const Candidate& candidate : best.items()) *picks++ = candidate.entry;
    std::sort(picks - k_, picks);
  }

  const PickEntriesArgs& args_;
  ThreadPool& threads_;
  const AttendKernels& kernels_;
  int64_t rows_;
  int64_t heads_;
  int64_t width_;
  int64_t k_;
  int64_t pieces_;
  size_t stride_;
  std::byte* memory_;
};

}  // namespace

void CpuDenseOps::pick_entries(const PickEntriesArgs& args, Workspace& workspace,
                               const Stream& stream) {
  CADRE_ASSERT(args.keys.dim(3) == args.queries.dim(2) &&
               args.weights.numel() == args.queries.dim(0) * args.queries.dim(1));
  const Workspace::Scope scope(workspace);
  Picker(args, workspace, *stream.threads).run();
}

size_t CpuDenseOps::pick_entries_workspace_bytes(int64_t num_heads, int64_t width, int64_t k,
                                                 int num_threads) const {
  return Workspace::padded(Scratch::bytes(num_heads, width, k) *
                           Picker::num_scratches(num_threads));
}

}  // namespace cadre::cpu
