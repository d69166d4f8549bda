// The exit status of the command, one per family of errors.
#pragma once

#include <exception>
#include <new>

#include "cadre/error.h"

namespace cadre::cli {

inline constexpr int kExitDone = 0;
inline constexpr int kExitOther = 1;     // cannot write, or a bug
inline constexpr int kExitUsage = 2;     // unknown option or name, a value that can never be right
inline constexpr int kExitBadInput = 3;  // the checkpoint or an input file
inline constexpr int kExitUnsupported =
    4;                                   // backend, device, dtype or architecture not served here
inline constexpr int kExitDevice = 5;    // a device failed or memory ran out
inline constexpr int kExitSignal = 128;  // + the signal that stopped the command

inline int exit_code_of(const std::exception& error) {
  if (dynamic_cast<const InvalidArgument*>(&error) != nullptr) return kExitUsage;
  if (dynamic_cast<const CheckpointError*>(&error) != nullptr) return kExitBadInput;
  if (dynamic_cast<const Unsupported*>(&error) != nullptr) return kExitUnsupported;
  if (dynamic_cast<const DeviceError*>(&error) != nullptr) return kExitDevice;
  if (dynamic_cast<const CommunicationError*>(&error) != nullptr) return kExitDevice;
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return kExitDevice;
  return kExitOther;
}

}  // namespace cadre::cli
