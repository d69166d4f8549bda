// bfloat16 compute on AMX tiles: 16 rows x 16 columns x 32 k in one instruction, with sums of even
// and odd k kept apart inside it. Denormals count as zero. Everything but the panel's padding and
// multiply is the AVX-512 tables'.
//
// A tile load takes rows at one distance, so rows that were gathered by token are copied together
// first: 256 bytes a row and chunk, next to 64 columns of products.
#define CADRE_LANES 16
#include "backends/cpu/kernels/lanes.inl.h"
// The order matters: each of these builds on those before it.
#include "backends/cpu/kernels/epilogue.inl.h"
#include "backends/cpu/kernels/multiply.inl.h"
#include "backends/cpu/kernels/pack.inl.h"
#include "backends/cpu/kernels/pack_as_stored.inl.h"
#include "backends/cpu/kernels/pack_pairs.inl.h"

namespace cadre::cpu {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileK = 32;
constexpr int kPanelRowBytes = kPanelColumns * 4;  // one pair of k for all columns

// A step takes kTileK of k whole: what the chunk lacks must be zero.
void clear_rest(int k, int width, uint32_t* panel) {
  const int end = (k + kTileK - 1) / kTileK * kTileK / 2;
  for (int pair = (k + 1) / 2; pair < end; ++pair) {
    __builtin_memset(panel + pair * kPanelColumns, 0, static_cast<unsigned>(width) * 4);
  }
}

void pack_tiles(const PackArgs& args) {
  pack_pairs(args);
  clear_rest(args.k, args.width, static_cast<uint32_t*>(args.panel) + args.first_column);
}

void unpack_tiles(const UnpackArgs& args) {
  unpack_pairs(args);
  clear_rest(args.k, kPanelColumns, static_cast<uint32_t*>(args.panel));
}

// g++ 12 does not tell its optimiser what the tile instructions read and write.
inline void publish(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums of 16 columns each; 4: rows; 5 and 6: the panel.
void configure_tiles(int rows) {
  TileConfig config;
  for (int i = 0; i < 7; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i < 5 ? rows : kTileRows);
  }
  publish(&config);
  _tile_loadconfig(&config);
}

struct TileRows {
  const uint16_t* first;
  int64_t stride_bytes;
};

// The rows of a tile at one distance: where they lie, or copied to `copy` [kTileRows, kChunk], zero
// behind the chunk's end.
TileRows rows_of_tile(const MultiplyArgs& args, int first_row, int count, uint16_t* copy) {
  const auto row = [&](int r) {
    return static_cast<const uint16_t*>(args.rows[first_row + r]) + args.row_offset;
  };
  const int64_t stride =
      count > 1 ? reinterpret_cast<intptr_t>(row(1)) - reinterpret_cast<intptr_t>(row(0)) : 64;
  bool in_place = args.k % kTileK == 0;
  for (int r = 2; r < count; ++r) {
    in_place =
        in_place &&
        reinterpret_cast<intptr_t>(row(r)) - reinterpret_cast<intptr_t>(row(r - 1)) == stride;
  }
  if (in_place) return {row(0), stride};
  for (int r = 0; r < count; ++r) {
    uint16_t* to = copy + r * kChunk;
    int k = 0;
    for (; k + 32 <= args.k; k += 32) store(to + k, load<Words>(row(r) + k));
    if (k == args.k) continue;
    __builtin_memset(to + k, 0, 64);
    __builtin_memcpy(to + k, row(r) + k, static_cast<unsigned>(args.k - k) * 2);
  }
  publish(copy);
  return {copy, kChunk * 2};
}

void multiply_step(const TileRows& rows, const unsigned char* panel, int step) {
  const unsigned char* w = panel + step * (kTileK / 2) * kPanelRowBytes;
  _tile_loadd(4, rows.first + step * kTileK, rows.stride_bytes);
  _tile_loadd(5, w, kPanelRowBytes);
  _tile_loadd(6, w + 64, kPanelRowBytes);
  _tile_dpbf16ps(0, 4, 5);
  _tile_loadd(5, w + 128, kPanelRowBytes);
  _tile_dpbf16ps(1, 4, 6);
  _tile_loadd(6, w + 192, kPanelRowBytes);
  _tile_dpbf16ps(2, 4, 5);
  _tile_dpbf16ps(3, 4, 6);
}

void store_tiles(float* to) {
  _tile_stored(0, to, kPanelRowBytes);
  _tile_stored(1, to + 16, kPanelRowBytes);
  _tile_stored(2, to + 32, kPanelRowBytes);
  _tile_stored(3, to + 48, kPanelRowBytes);
  publish(to);
}

void add_sums(const float* sums, int rows, float* acc) {
  for (int i = 0; i < rows * kPanelColumns; i += kLanes) {
    store(acc + i, load<Floats>(acc + i) + load<Floats>(sums + i));
  }
}

void multiply_tiles(const MultiplyArgs& args) {
  alignas(64) uint16_t copy[kTileRows * kChunk];
  alignas(64) float sums[kTileRows * kPanelColumns];
  const int steps = (args.k + kTileK - 1) / kTileK;
  const int tiles = num_tiles(args.num_rows, kTileRows);
  const int lines_per_step = (args.num_prefetch + tiles * steps - 1) / (tiles * steps);
  const void* const* next = args.prefetch;
  const void* const* end = args.prefetch + args.num_prefetch;
  int configured = 0;
  for (int first_row = 0; first_row < args.num_rows; first_row += kTileRows) {
    const int left = args.num_rows - first_row;
    const int count = left < kTileRows ? left : kTileRows;
    if (count != configured) configure_tiles(count);
    configured = count;
    const TileRows rows = rows_of_tile(args, first_row, count, copy);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < steps; ++step) {
      multiply_step(rows, static_cast<const unsigned char*>(args.panel), step);
      for (int i = 0; i < lines_per_step && next < end; ++i) prefetch(*next++);
    }
    float* acc = args.acc + first_row * kPanelColumns;
    store_tiles(args.first ? acc : sums);
    if (!args.first) add_sums(sums, count, acc);
  }
  _tile_release();
}

}  // namespace
}  // namespace cadre::cpu

#include "backends/cpu/kernels/amx_in_place.inl.h"
#include "backends/cpu/kernels/amx_packed.inl.h"

namespace cadre::cpu {

const KernelTable kAmxKernels = {
    .name = "amx",
    .row_type = Element::kBF16,
    .row_tile = kTileRows,
    .pack = pack_tiles,
    .multiply = multiply_tiles,
    .widen = widen_rows,
    .gate = gate_function,
    .finish = finish_rows,
    .combine = combine_parts,
    .pair = pair_rows,
    .multiply_in_place = multiply_in_place,
    .pack_stored = pack_stored,
    .unpack = unpack_tiles,
    .tile = tile_rows,
    .multiply_packed = multiply_packed,
};

}  // namespace cadre::cpu
