// What a device reaches at best, measured: how fast it reads memory and how fast it multiplies. A
// time means something only beside these, taken in the same minute: on a shared machine they move.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cadre/device.h"
#include "cadre/dtype.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"

namespace cadre {

class Ceilings {
 public:
  virtual ~Ceilings() = default;

  /// The device's name, as the system gives it.
  virtual std::string processor() const = 0;
  /// Names of the ways in which read_bandwidth() can read, the plainest first; one at least. The
  /// ceiling is what the best one reaches.
  virtual std::vector<std::string> ways_of_reading() const = 0;
  /// Bytes per second of reading `memory` (contiguous) once with all threads of the stream, in the
  /// way with this number. Memory beyond all caches, or not read lately, gives the ceiling of main
  /// memory.
  virtual double read_bandwidth(const TensorView& memory, size_t way,
                                const Stream& stream) const = 0;
  /// Floating-point operations per second of the products that `compute_dtype` runs on, operands in
  /// registers, all threads. Takes some milliseconds. Throws InvalidArgument for what is no compute
  /// dtype.
  virtual double peak_flops(DType compute_dtype, const Stream& stream) const = 0;
};

/// Throws Unsupported when the build has no backends for this kind of device.
const Ceilings& ceilings_of(DeviceType device);

}  // namespace cadre
