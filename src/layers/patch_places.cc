#include "layers/patch_places.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace cadre {
namespace {

// The two neighbours in a line of the table.
struct Neighbours {
  std::array<int64_t, 2> at;
  std::array<float, 2> weights;
};

Neighbours neighbours(int64_t index, int64_t count, int64_t side) {
  const float place = static_cast<float>(index) * static_cast<float>(side - 1) /
                      static_cast<float>(std::max<int64_t>(count - 1, 1));
  const float floor = std::floor(place);
  const auto first = static_cast<int64_t>(floor);
  return {{first, std::min(first + 1, side - 1)}, {1 - (place - floor), place - floor}};
}

}  // namespace

PatchPlaces patch_places(int64_t height, int64_t width, int64_t merge_size, int64_t table_side) {
  const int64_t count = height * width;
  PatchPlaces places;
  places.positions.resize(static_cast<size_t>(2 * count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t in_group = i % (merge_size * merge_size);
    const int64_t group = i / (merge_size * merge_size);
    const int64_t groups_per_line = width / merge_size;
    const int64_t y = group / groups_per_line * merge_size + in_group / merge_size;
    const int64_t x = group % groups_per_line * merge_size + in_group % merge_size;
    places.positions[static_cast<size_t>(i)] = static_cast<int32_t>(y);
    places.positions[static_cast<size_t>(count + i)] = static_cast<int32_t>(x);
    const Neighbours vertical = neighbours(y, height, table_side);
    const Neighbours horizontal = neighbours(x, width, table_side);
    for (size_t a = 0; a < 2; ++a) {
      for (size_t b = 0; b < 2; ++b) {
        places.rows.push_back(static_cast<int32_t>(vertical.at[a] * table_side + horizontal.at[b]));
        places.weights.push_back(vertical.weights[a] * horizontal.weights[b]);
      }
    }
  }
  return places;
}

}  // namespace cadre
