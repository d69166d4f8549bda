// Tensors from host memory (files mapped into it, mostly) to a GPU, converted on their way.
#pragma once

#include <cstdint>
#include <span>

#include "core/device_runtime.h"

namespace cadre::cuda {

/// What DeviceRuntime::upload() says. Each thread fills pinned buffers of its own and sends each
/// one off while it fills the next, so the bus never waits for a single thread that reads pages.
void upload(std::span<const Upload> uploads, int index, ThreadPool& threads,
            FunctionRef<void(int64_t bytes)> on_bytes);

}  // namespace cadre::cuda
