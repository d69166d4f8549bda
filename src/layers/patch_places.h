// Where the patches of a picture lie, for rotary and for learned positions.
#pragma once

#include <cstdint>
#include <vector>

namespace cadre {

struct PatchPlaces {
  std::vector<int32_t> positions;  // [2, num_patches] row and column of each patch
  std::vector<int32_t> rows;       // [num_patches, 4] of the table of learned positions
  std::vector<float> weights;      // [num_patches, 4] of these
};

/// Of height x width patches in the order of the pixel values: the merge_size^2 patches of a token
/// after each other. The table has table_side^2 rows for a square that is stretched over the
/// picture, corner on corner, and interpolated bilinearly.
PatchPlaces patch_places(int64_t height, int64_t width, int64_t merge_size, int64_t table_side);

}  // namespace cadre
