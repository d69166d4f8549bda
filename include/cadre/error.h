// The error families of Cadre. Every message answers five questions: which operation, what was
// expected, what came (name, shape, dtype, bytes), where (file, tensor, rank, device) and what to
// do about it.
#pragma once

#include <stdexcept>
#include <string>

namespace cadre {

/// Base of everything Cadre throws on purpose. Thrown itself for what fits no family below (a file
/// that cannot be written).
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller passed a value that can never be right: a wrong shape, an unknown name, a prompt
/// longer than the context.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// A checkpoint or input file is missing, damaged or inconsistent.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// The request is sensible but not served here: this backend, device, dtype, format or
/// architecture. Says what is.
class Unsupported : public Error {
 public:
  using Error::Error;
};

/// A device failed or ran out of memory.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// A collective operation failed or ranks disagree.
class CommunicationError : public Error {
 public:
  using Error::Error;
};

}  // namespace cadre
