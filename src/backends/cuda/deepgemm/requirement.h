// What `deepgemm` asks of a GPU, as far as it can be said without one.
#pragma once

#include <string>

#include "cadre/storage_format.h"

namespace cadre::cuda {

/// Why a GPU of this compute capability (90 is 9.0) cannot run weights of this format; empty when
/// it can. From 10.0 on FP8 weights need E8M0 scales: its tensor cores take no others, and float32
/// scales would be read as something else.
std::string unmet_by_gpu(int compute_capability, StorageFormat format,
                         const ScaleLayout& scale_layout);

}  // namespace cadre::cuda
