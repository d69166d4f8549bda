// Products of the packed form: its pairs of k are the second operand of the tiles as they are, rows
// of tokens the first. Included by isa_amx.cc after amx_in_place.inl.h; everything has internal
// linkage.
//
// Two tiles of rows times two of columns share their loads; an odd tile meets all four columns'
// tiles. The panel is one run of memory, fetched a chunk ahead.

namespace cadre::cpu {
namespace {

constexpr int kStepBytes = kTileK / 2 * kPanelRowBytes;  // of a panel
constexpr int kBlockFloats = 4 * kTileFloats;
constexpr int kChunkBytes = kChunk / 2 * kPanelRowBytes;

// Tiles 0 to 3: sums; 4 and 5: rows; 6 and 7: columns.
void configure_packed(int height) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 6 ? height : kTileRows);
  }
  publish(&config);
  _tile_loadconfig(&config);
}

// A chunk of two row tiles times two column tiles, or of one times four. By value so that all stays
// in registers.
struct PackedBlock {
  const uint16_t* rows;  // the second row tile is a kilobyte on
  int64_t row_step;      // elements from one step of k to the next
  const char* panel;     // its first column
  const char* fetch;     // a chunk to fetch meanwhile, from this line on
  int first_line;
  int quarters;  // of the tiles' rows that are in use
};

// Four tiles of sums that still have to be added to the running ones.
struct PendingBlock {
  const float* from = nullptr;
  float* to = nullptr;

  void add(int tile, int quarter) const { Pending{from, to, 4}.add(tile, quarter); }
  void finish() {
    if (to == nullptr) return;
    for (int i = 0; i < 16; ++i) add(i / 4, i % 4);
    to = nullptr;
  }
};

// What stands between two products. A loop's counting would fill the processor's window. Products
// that leave memory idle now and then are better served from four pages in turn.
template <int kLines, bool kAdd>
inline void meanwhile(const PackedBlock block, int step, int tile, const PendingBlock pending) {
  constexpr int kPages = kLines == kTileRows ? 1 : 4;
  const int first = block.first_line + kLines * (step * 4 + tile);
#pragma GCC unroll 16
  for (int i = 0; i < kLines; ++i) {
    const int line = first + i;
    prefetch(block.fetch + line % kPages * (kChunkBytes / kPages) + line / kPages * 64);
  }
  if constexpr (kAdd) {
    if (step < block.quarters) pending.add(tile, step);
  }
}

template <bool kTwoRowTiles, int kLines, bool kAdd>
inline void multiply_packed_step(const PackedBlock block, int step, const PendingBlock pending) {
  const uint16_t* rows = block.rows + step * block.row_step;
  const char* panel = block.panel + step * kStepBytes;
  _tile_loadd(4, rows, 64);
  _tile_loadd(6, panel, kPanelRowBytes);
  _tile_dpbf16ps(0, 4, 6);
  meanwhile<kLines, kAdd>(block, step, 0, pending);
  _tile_loadd(7, panel + 64, kPanelRowBytes);
  _tile_dpbf16ps(1, 4, 7);
  meanwhile<kLines, kAdd>(block, step, 1, pending);
  if constexpr (kTwoRowTiles) {
    _tile_loadd(5, rows + kTileRows * kTileK, 64);
    _tile_dpbf16ps(2, 5, 6);
    meanwhile<kLines, kAdd>(block, step, 2, pending);
    _tile_dpbf16ps(3, 5, 7);
  } else {
    _tile_loadd(6, panel + 128, kPanelRowBytes);
    _tile_dpbf16ps(2, 4, 6);
    meanwhile<kLines, kAdd>(block, step, 2, pending);
    _tile_loadd(7, panel + 192, kPanelRowBytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  meanwhile<kLines, kAdd>(block, step, 3, pending);
}

// What is left of K behind the last whole chunk, copied where zeros must follow.
template <bool kTwoRowTiles>
void multiply_packed_rest(const PackedBlock block, int k, bool single_row) {
  const int steps = k / kTileK;
  for (int step = 0; step < steps; ++step) {
    multiply_packed_step<kTwoRowTiles, 0, false>(block, step, {});
  }
  const int rest = k % kTileK;
  if (rest == 0) return;
  alignas(64) char panel[kStepBytes] = {};
  alignas(64) uint16_t row[kTileK] = {};
  // From the block's first column to its last, row of pairs by row of pairs.
  const int width = kTwoRowTiles ? kPanelRowBytes / 2 : kPanelRowBytes;
  for (int pair = 0; pair < (rest + 1) / 2; ++pair) {
    __builtin_memcpy(panel + pair * kPanelRowBytes,
                     block.panel + steps * kStepBytes + pair * kPanelRowBytes,
                     static_cast<unsigned>(width));
  }
  PackedBlock tail{block.rows + steps * block.row_step, 0, panel, nullptr, 0, 0};
  if (single_row) {
    __builtin_memcpy(row, tail.rows, static_cast<unsigned>(rest * 2));
    tail.rows = row;
  }
  publish(panel);
  multiply_packed_step<kTwoRowTiles, 0, false>(tail, 0, {});
}

// h of 16 columns of a tile's rows; out: the tile's first element.
template <GateKind kKind>
void gate_tile(const GateArgs& args, int column, const float* gate, const float* up, int rows,
               uint16_t* out) {
  const Floats gate_bias = load<Floats>(args.gate_bias + column);
  const Floats up_bias = load<Floats>(args.up_bias + column);
  for (int r = 0; r < rows; ++r) {
    const Floats h = gated<kKind>(args, load<Floats>(gate + r * 16) + gate_bias,
                                  load<Floats>(up + r * 16) + up_bias);
    store_rounded<Element::kBF16>(out + r * kTileK + column, h);
  }
}

class PackedProduct {
 public:
  explicit PackedProduct(const PackedArgs& args)
      : args_(args),
        tiles_(row_tiles(args.num_rows)),
        height_(tile_height(args.num_rows)),
        num_blocks_(tiles_ / 2 * 2 + tiles_ % 2),
        row_step_(int64_t{arranged_rows(args.num_rows)} * kTileK),
        panel_bytes_((args.k + 1) / 2 * kPanelRowBytes),
        fetch_lines_(lines_per_product(num_blocks_)) {}

  int height() const { return height_; }

  void run() {
    for (int64_t k = 0; k < args_.k; k += kChunk) {
      for (int block = 0; block < num_blocks_; ++block) {
        if (block / 2 * 2 + 1 < tiles_) {
          multiply<true>(k, block);
        } else {
          multiply<false>(k, block);
        }
      }
    }
    pending_.finish();
    if (args_.gate != nullptr) return write_gated();
    for (int block = 0; block < num_blocks_; ++block) write(block);
  }

 private:
  // A chunk's 256 lines over its products, 16 a block.
  static constexpr int lines_per_product(int num_blocks) {
    int lines = 16;
    while (lines > 2 && lines / 2 * num_blocks >= 16) lines /= 2;
    return lines;
  }

  // A chunk is far enough for memory to answer while others are multiplied.
  const char* chunk_to_fetch(int64_t k) const {
    const int64_t offset = k / kChunk * kChunkBytes + kChunkBytes;
    if (args_.next == nullptr || offset < panel_bytes_) {
      return static_cast<const char*>(args_.panel) + offset;
    }
    return static_cast<const char*>(args_.next) + (offset - panel_bytes_);
  }

  template <bool kTwoRowTiles>
  void multiply(int64_t k, int block) {
    const int column = kTwoRowTiles ? block % 2 * 128 : 0;  // bytes
    const PackedBlock work{
        static_cast<const uint16_t*>(args_.rows) + k / kTileK * row_step_ +
            block / 2 * (2 * kTileRows * kTileK),
        row_step_,
        static_cast<const char*>(args_.panel) + k * (kPanelRowBytes / 2) + column,
        chunk_to_fetch(k),
        block * fetch_lines_ * (kChunk / kTileK * 4),
        (height_ + 3) / 4};
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t left = args_.k - k;
    if (left < kChunk) {
      pending_.finish();
      multiply_packed_rest<kTwoRowTiles>(work, static_cast<int>(left), args_.num_rows == 1);
    } else if (pending_.to != nullptr) {
      multiply_chunk<kTwoRowTiles, true>(work);
    } else {
      multiply_chunk<kTwoRowTiles, false>(work);
    }
    float* running = args_.sums + block * kBlockFloats;
    pending_.to = nullptr;
    if (k == 0) return store_sums<4>(running);
    store_sums<4>(buffer_);
    pending_ = {buffer_, running};
  }

  template <bool kTwoRowTiles, bool kAdd>
  void multiply_chunk(const PackedBlock work) const {
    if (fetch_lines_ == 16) return multiply_chunk<kTwoRowTiles, 16, kAdd>(work);
    if (fetch_lines_ == 8) return multiply_chunk<kTwoRowTiles, 8, kAdd>(work);
    if (fetch_lines_ == 4) return multiply_chunk<kTwoRowTiles, 4, kAdd>(work);
    multiply_chunk<kTwoRowTiles, 2, kAdd>(work);
  }

  template <bool kTwoRowTiles, int kLines, bool kAdd>
  void multiply_chunk(const PackedBlock work) const {
    const PendingBlock pending = pending_;
#pragma GCC unroll 4
    for (int step = 0; step < kChunk / kTileK; ++step) {
      multiply_packed_step<kTwoRowTiles, kLines, kAdd>(work, step, pending);
    }
  }

  void write(int block) const {
    const bool two = block / 2 * 2 + 1 < tiles_;
    const float* sums = args_.sums + block * kBlockFloats;
    for (int i = 0; i < 4; ++i, sums += kTileFloats) {
      const int tile = block / 2 * 2 + (two ? i / 2 : 0);
      const int column = two ? (block % 2 * 2 + i % 2) * 16 : i * 16;
      const int first = tile * height_;
      const int count = args_.num_rows - first < height_ ? args_.num_rows - first : height_;
      for (int r = 0; r < count; ++r) {
        const Floats sum = load<Floats>(sums + r * 16);
        if (args_.finish == nullptr) {
          store(args_.acc + (first + r) * kPanelColumns + column, sum);
        } else if (column < args_.finish->columns) {
          finish_vector<Element::kF32>(*args_.finish, first + r, column, sum);
        }
      }
    }
  }

  // The sums of 16 columns for a tile of rows.
  const float* sums_of(int tile, int column) const {
    const bool two = tile / 2 * 2 + 1 < tiles_;
    const int block = two ? tile / 2 * 2 + column / 32 : tile;
    const int part = two ? tile % 2 * 2 + column / 16 % 2 : column / 16;
    return args_.sums + block * kBlockFloats + part * kTileFloats;
  }

  // h of the panel's columns, rows by tile as tile_rows arranges them.
  void write_gated() const {
    with_gate_kind(args_.gate->kind, [&]<GateKind kKind>() {
      for (int tile = 0; tile < tiles_; ++tile) {
        const int left = args_.num_rows - tile * height_;
        const int count = left < height_ ? left : height_;
        for (int column = 0; column < 32; column += 16) {
          gate_tile<kKind>(*args_.gate, column, sums_of(tile, column), sums_of(tile, 32 + column),
                           count,
                           static_cast<uint16_t*>(args_.gate->out) + tile * kTileRows * kTileK);
        }
      }
    });
  }

  const PackedArgs& args_;
  int tiles_;
  int height_;
  int num_blocks_;
  int64_t row_step_;
  int64_t panel_bytes_;
  int fetch_lines_;
  PendingBlock pending_;
  alignas(64) float buffer_[kBlockFloats];
};

void multiply_packed(const PackedArgs& args) {
  PackedProduct product(args);
  configure_packed(product.height());
  product.run();
  _tile_release();
}

// A lone tile is [steps][rows][kTileK]; of several each takes a kilobyte.
void tile_rows(const ArrangeArgs& args) {
  const int height = tile_height(args.num_rows);
  const int64_t row_step = int64_t{arranged_rows(args.num_rows)} * kTileK;
  for (int r = 0; r < args.num_rows; ++r) {
    const uint16_t* from = static_cast<const uint16_t*>(args.rows[r]) + args.row_offset;
    uint16_t* to =
        static_cast<uint16_t*>(args.out) + r / height * (kTileRows * kTileK) + r % height * kTileK;
    int64_t k = 0;
    for (; k + kTileK <= args.k; k += kTileK, to += row_step) store(to, load<Words>(from + k));
    if (k == args.k) continue;
    __builtin_memset(to, 0, 64);
    __builtin_memcpy(to, from + k, static_cast<unsigned>((args.k - k) * 2));
  }
}

}  // namespace
}  // namespace cadre::cpu
