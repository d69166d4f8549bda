// Bicubic resizing of RGB images.
#pragma once

#include "cadre/image.h"

namespace cadre {

/// Antialiased bicubic (a = -0.5), in 16-bit fixed point with a rounding between the two passes:
/// bit for bit what PyTorch's upsampling of uint8 images gives on CPUs with AVX2, which torchvision
/// calls. Pillow's resize uses finer weights and differs by one in places.
Image resize_bicubic(const Image& image, int64_t height, int64_t width);

}  // namespace cadre
