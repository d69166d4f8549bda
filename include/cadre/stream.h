// What a forward runs on: a device and its order of work. On the CPU that is a thread pool and
// every call has finished when it returns; on a GPU it is a stream of that device.
#pragma once

#include "cadre/device.h"

namespace cadre {

class ThreadPool;

struct Stream {
  Device device;
  ThreadPool* threads = nullptr;  // the CPU's pool; host work of GPU backends uses it too
  void* handle = nullptr;         // cudaStream_t on a GPU

  /// A CPU stream over `pool`, which must outlive it.
  static Stream cpu(ThreadPool& pool) { return {Device{}, &pool, nullptr}; }
};

}  // namespace cadre
