// Products of weights where they lie: 16 weight rows are a tile as they are, so the sums come out
// transposed, a weight row in each tile row and a token in each column. Included by isa_amx.cc
// after its other parts; everything has internal linkage.
//
// Two groups of 16 rows take turns chunk by chunk: 32 streams of memory are what the hardware's
// prefetcher follows. A chunk's sums leave the tiles for a buffer and are added to the running sums
// while the next products are under way. The gate function takes the sums as they are: two of its
// rows make a row of pairs for down.

namespace cadre::cpu {
namespace {

constexpr int kTileFloats = kTileRows * 16;
constexpr int kMaxTokenTiles = 5;  // 5 of sums, one of weights, two of tokens

// Tiles 0 to 4: sums; 5: weights; 6 and 7: tokens.
void configure_in_place(int tokens) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = static_cast<uint16_t>(i == 5 ? 64 : tokens * 4);
    config.rows[i] = kTileRows;
  }
  publish(&config);
  _tile_loadconfig(&config);
}

// Sums of one chunk that still have to be added to the running ones, tile by tile.
struct Pending {
  const float* from = nullptr;  // [tiles][kTileRows][16]
  float* to = nullptr;          // as from
  int tiles = 0;

  // Rows [4 * quarter, 4 * quarter + 4) of a tile.
  void add(int tile, int quarter) const {
    const float* sums = from + tile * kTileFloats + quarter * 64;
    float* running = to + tile * kTileFloats + quarter * 64;
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      store(running + r * 16, load<Floats>(running + r * 16) + load<Floats>(sums + r * 16));
    }
  }
  void finish() {
    for (int i = 0; i < tiles * 4; ++i) add(i / 4, i % 4);
    tiles = 0;
  }
};

// One chunk of 16 weight rows times some tiles of tokens, by value so that all stays in registers.
struct Block {
  const uint16_t* weights;
  int64_t weight_stride;   // bytes
  const uint32_t* tokens;  // the first tile; the others follow it
  int64_t token_row;       // bytes from one pair of k to the next in a tile
  int64_t token_step;      // words from one step of k to the next
  const char* fetch;       // weights to fetch meanwhile, a chunk of 16 rows; null = none
  int64_t fetch_stride;    // bytes
};

// A step's lines, spread over its products: as many at once would hold all of the L1 cache's fill
// buffers until memory answers.
template <int kTile, int kTiles>
inline void fetch_rows(const Block block, int step) {
  if (block.fetch == nullptr) return;
  const char* at = block.fetch + step * kTileK * 2;
#pragma GCC unroll 16
  for (int r = kTile * kTileRows / kTiles; r < (kTile + 1) * kTileRows / kTiles; ++r) {
    prefetch(at + r * block.fetch_stride);
  }
}

// g++ 12 wants tile numbers as literals.
template <int kTile>
inline void multiply_token_tile(const Block block, int step) {
  const uint32_t* tokens = block.tokens + step * block.token_step + kTile * kTileFloats;
  if constexpr (kTile % 2 == 0) {
    _tile_loadd(6, tokens, block.token_row);
  } else {
    _tile_loadd(7, tokens, block.token_row);
  }
  if constexpr (kTile == 0) _tile_dpbf16ps(0, 5, 6);
  if constexpr (kTile == 1) _tile_dpbf16ps(1, 5, 7);
  if constexpr (kTile == 2) _tile_dpbf16ps(2, 5, 6);
  if constexpr (kTile == 3) _tile_dpbf16ps(3, 5, 7);
  if constexpr (kTile == 4) _tile_dpbf16ps(4, 5, 6);
}

template <int kTile, int kTiles, bool kAdd>
inline void multiply_tile_of(const Block block, int step, const Pending pending) {
  if constexpr (kTile < kTiles) {
    multiply_token_tile<kTile>(block, step);
    fetch_rows<kTile, kTiles>(block, step);
    if constexpr (kAdd) pending.add(kTile, step);
  }
}

template <int kTiles, bool kAdd>
inline void multiply_step(const Block block, int step, const Pending pending) {
  _tile_loadd(5, block.weights + step * kTileK, block.weight_stride);
  multiply_tile_of<0, kTiles, kAdd>(block, step, pending);
  multiply_tile_of<1, kTiles, kAdd>(block, step, pending);
  multiply_tile_of<2, kTiles, kAdd>(block, step, pending);
  multiply_tile_of<3, kTiles, kAdd>(block, step, pending);
  multiply_tile_of<4, kTiles, kAdd>(block, step, pending);
}

template <int kTiles>
inline void zero_tiles() {
  _tile_zero(0);
  if constexpr (kTiles > 1) _tile_zero(1);
  if constexpr (kTiles > 2) _tile_zero(2);
  if constexpr (kTiles > 3) _tile_zero(3);
  if constexpr (kTiles > 4) _tile_zero(4);
}

template <int kTiles>
inline void store_sums(float* to) {
  _tile_stored(0, to, 64);
  if constexpr (kTiles > 1) _tile_stored(1, to + kTileFloats, 64);
  if constexpr (kTiles > 2) _tile_stored(2, to + 2 * kTileFloats, 64);
  if constexpr (kTiles > 3) _tile_stored(3, to + 3 * kTileFloats, 64);
  if constexpr (kTiles > 4) _tile_stored(4, to + 4 * kTileFloats, 64);
  publish(to);
}

// A whole chunk, with another chunk's sums added meanwhile.
template <int kTiles, bool kAdd>
inline void multiply_chunk(const Block block, const Pending pending) {
  zero_tiles<kTiles>();
#pragma GCC unroll 4
  for (int step = 0; step < kChunk / kTileK; ++step) {
    multiply_step<kTiles, kAdd>(block, step, pending);
  }
}

// What is left of K behind the last whole chunk, copied where it must not be read on.
struct LastChunk {
  alignas(64) uint16_t weights[kTileRows * kTileK] = {};
  alignas(64) uint32_t tokens[kTileK / 2] = {};
};

template <int kTiles>
void multiply_last_chunk(const Block block, int k, bool single_row) {
  zero_tiles<kTiles>();
  const int steps = k / kTileK;
  for (int step = 0; step < steps; ++step) multiply_step<kTiles, false>(block, step, {});
  const int rest = k % kTileK;
  if (rest == 0) return;
  LastChunk last;
  const auto bytes = static_cast<unsigned>(rest * 2);
  for (int r = 0; r < kTileRows; ++r) {
    const char* row =
        reinterpret_cast<const char*>(block.weights + steps * kTileK) + r * block.weight_stride;
    __builtin_memcpy(last.weights + r * kTileK, row, bytes);
  }
  Block tail = block;
  tail.weights = last.weights;
  tail.weight_stride = kTileK * 2;
  tail.tokens += steps * block.token_step;
  tail.fetch = nullptr;
  if (single_row) {
    __builtin_memcpy(last.tokens, tail.tokens, bytes);
    tail.tokens = last.tokens;
  }
  publish(&last);
  multiply_step<kTiles, false>(tail, 0, {});
}

// h of 16 columns from their transposed sums, [tiles][16 columns][16 tokens] each, as pair_rows
// would arrange it: `out` is the step's first word, `column` 0 or 16 of its 32.
template <GateKind kKind>
void gate_transposed(const GateArgs& args, int column, const float* gate, const float* up,
                     uint32_t* out) {
  const auto h = [&](int i) {
    const int n = column + i % kTileRows;
    return gated<kKind>(args, load<Floats>(gate + i * 16) + args.gate_bias[n],
                        load<Floats>(up + i * 16) + args.up_bias[n]);
  };
  for (int i = 0; i < row_tiles(args.num_rows) * kTileRows; i += 2) {
    const Words pair = (round_bf16(h(i)) >> 16) | round_bf16(h(i + 1));
    const int row = i / kTileRows * kTileRows + (column + i % kTileRows) / 2;
    store(out + row * 16, pair);
  }
}

// Running sums of two groups of weight rows, [2][token tiles][kTileRows][16].
class InPlaceProduct {
 public:
  explicit InPlaceProduct(const InPlaceArgs& args)
      : args_(args), tiles_((args.num_rows + 15) / 16), tiles_per_pass_(args.num_rows) {
    const int passes = (tiles_ + kMaxTokenTiles - 1) / kMaxTokenTiles;
    tiles_per_pass_ = (tiles_ + passes - 1) / passes;
  }

  /// One or two groups; `next` as in InPlaceArgs.
  void run(const WeightRows* groups, int count, const WeightRows* next) {
    next_ = next;
    for (int64_t k = 0; k < args_.k; k += kChunk) {
      for (int first = 0; first < tiles_; first += tiles_per_pass_) {
        for (int g = 0; g < count; ++g) chunk(groups[g], g, k, first);
      }
    }
    pending_.finish();
    if (args_.gate != nullptr) return write_gated(groups[0].column);
    for (int g = 0; g < count; ++g) write(groups[g], sums(g, 0));
  }

 private:
  float* sums(int group, int tile) const {
    return args_.sums + (group * tiles_ + tile) * kTileFloats;
  }

  void chunk(const WeightRows& rows, int group, int64_t k, int first) {
    const int count = tiles_ - first < tiles_per_pass_ ? tiles_ - first : tiles_per_pass_;
    if (count == 1) return multiply<1>(rows, group, k, first);
    if (count == 2) return multiply<2>(rows, group, k, first);
    if (count == 3) return multiply<3>(rows, group, k, first);
    if (count == 4) return multiply<4>(rows, group, k, first);
    multiply<kMaxTokenTiles>(rows, group, k, first);
  }

  // The chunk two chunks ahead, beyond the rows' end in those that come next: where short rows end,
  // the hardware's prefetcher has to begin anew.
  WeightRows rows_to_fetch(const WeightRows& rows, int group, int64_t k) const {
    const int64_t kAhead = tiles_ > 1 ? kChunk : 2 * kChunk;
    const auto at = [](const WeightRows& of, int64_t from) {
      return WeightRows{static_cast<const uint16_t*>(of.first) + from, of.stride, 0};
    };
    if (k + kAhead < args_.k) return at(rows, k + kAhead);
    const int64_t chunks_end = (args_.k + kChunk - 1) / kChunk * kChunk;
    if (next_ == nullptr || k + kAhead < chunks_end) return {};
    return at(next_[group], k + kAhead - chunks_end);
  }

  template <int kTiles>
  void multiply(const WeightRows& rows, int group, int64_t k, int first) {
    const WeightRows fetch = first == 0 ? rows_to_fetch(rows, group, k) : WeightRows{};
    const int columns = tiles_ > 1 ? 16 : args_.num_rows;
    const int64_t step_words = int64_t{16} * columns * tiles_;
    const Block block{
        static_cast<const uint16_t*>(rows.first) + k,
        rows.stride * 2,
        static_cast<const uint32_t*>(args_.rows) + k / kTileK * step_words + first * kTileFloats,
        columns * 4,
        step_words,
        static_cast<const char*>(fetch.first),
        fetch.stride * 2};
    const int64_t left = args_.k - k;
    if (left < kChunk) {
      pending_.finish();
      multiply_last_chunk<kTiles>(block, static_cast<int>(left), args_.num_rows == 1);
    } else if (pending_.tiles == kTiles) {
      multiply_chunk<kTiles, true>(block, pending_);
    } else {
      pending_.finish();
      multiply_chunk<kTiles, false>(block, pending_);
    }
    float* running = sums(group, first);
    pending_.tiles = 0;
    if (k == 0) return store_sums<kTiles>(running);
    store_sums<kTiles>(buffer_);
    pending_ = {buffer_, running, kTiles};
  }

  // Sums to acc or to the results, a token in each row again.
  void write(const WeightRows& rows, const float* sums) const {
    for (int first = 0; first < args_.num_rows; first += 16) {
      const unsigned char* columns[kTileRows];
      for (int i = 0; i < kTileRows; ++i) {
        columns[i] = reinterpret_cast<const unsigned char*>(sums + first * 16 + i * 16);
      }
      Words transposed[16];
      load_transposed_lines(columns, 0, transposed);
      const int count = args_.num_rows - first < 16 ? args_.num_rows - first : 16;
      if (args_.finish != nullptr) {
        for (int r = 0; r < count; ++r) {
          finish_vector<Element::kF32>(*args_.finish, first + r, rows.column,
                                       (Floats)transposed[r]);
        }
        continue;
      }
      float* to = args_.acc + first * kPanelColumns + rows.column;
      for (int r = 0; r < count; ++r, to += kPanelColumns) store(to, transposed[r]);
    }
  }

  // The sums of a group of gate and of the same columns of up.
  void write_gated(int column) const {
    const GateArgs& gate = *args_.gate;
    auto* out = static_cast<uint32_t*>(gate.out);
    with_gate_kind(gate.kind, [&]<GateKind kKind>() {
      gate_transposed<kKind>(gate, column, sums(0, 0), sums(1, 0), out);
    });
    if (gate.columns > 16) return;
    for (int tile = 0; tile < tiles_; ++tile) {  // the step's other 16 columns
      __builtin_memset(out + tile * kTileFloats + kTileFloats / 2, 0, kTileFloats / 2 * 4);
    }
  }

  const InPlaceArgs& args_;
  int tiles_;
  int tiles_per_pass_;
  const WeightRows* next_ = nullptr;
  Pending pending_;
  alignas(64) float buffer_[kMaxTokenTiles * kTileFloats];
};

void multiply_in_place(const InPlaceArgs& args) {
  configure_in_place(args.num_rows < 16 ? args.num_rows : 16);
  InPlaceProduct product(args);
  for (int g = 0; g < args.num_groups; g += 2) {
    const int left = args.num_groups - g;
    product.run(args.groups + g, left < 2 ? 1 : 2, left < 4 ? args.next : args.groups + g + 2);
  }
  _tile_release();
}

void pair_rows(const ArrangeArgs& args) {
  const int columns = args.num_rows < 16 ? args.num_rows : 16;
  const int64_t step_words = int64_t{16} * arranged_rows(args.num_rows);
  for (int first = 0; first < args.num_rows; first += 16) {
    const int count = args.num_rows - first < 16 ? args.num_rows - first : 16;
    for (int64_t k = 0; k < args.k; k += kStepK) {
      alignas(64) unsigned char tail[16][64];
      const unsigned char* at[16];
      const bool whole = args.k - k >= kStepK;
      for (int r = 0; r < 16; ++r) {
        at[r] = kZeros;
        if (r >= count) continue;
        at[r] = static_cast<const unsigned char*>(args.rows[first + r]) + (args.row_offset + k) * 2;
        if (whole) continue;
        __builtin_memset(tail[r], 0, 64);
        __builtin_memcpy(tail[r], at[r], static_cast<unsigned>((args.k - k) * 2));
        at[r] = tail[r];
      }
      Words words[16];
      load_transposed_lines(at, 0, words);
      uint32_t* out = static_cast<uint32_t*>(args.out) + k / kStepK * step_words + first * 16;
      const auto lanes = static_cast<__mmask16>((1u << columns) - 1);
      for (int i = 0; i < kStepK / 2; ++i) {
        _mm512_mask_storeu_epi32(out + i * columns, lanes, (__m512i)words[i]);
      }
    }
  }
}

}  // namespace
}  // namespace cadre::cpu
