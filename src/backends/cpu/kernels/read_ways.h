// Ways of reading memory from its beginning to its end. Which one is fastest depends on the
// processor and on the pages: the ceilings try them all.
//
// Like kernel_table.h, this header is included where other instructions are allowed, so it has no
// inline functions.
#pragma once

#include <stdint.h>

namespace cadre::cpu {

struct ReadWay {
  const char* name;
  /// Reads all words; returns their exclusive or.
  uint64_t (*read)(const uint64_t* words, int64_t count);
};

struct ReadWays {
  const ReadWay* ways;
  int count;
};

/// With vectors of 16 bytes; the first is a plain loop.
ReadWays read_ways_128();
/// With vectors of 64 bytes: needs AVX-512.
ReadWays read_ways_512();

}  // namespace cadre::cpu
