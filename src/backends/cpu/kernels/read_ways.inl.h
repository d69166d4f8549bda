// The loops of read_ways.h with vectors of kVectorBytes, called CADRE_READ_VECTOR, which the
// including file defines. All is in the anonymous namespace: each including file is built for
// another instruction set.
#include <string.h>

#include "backends/cpu/kernels/read_ways.h"

namespace cadre::cpu {
namespace {

typedef uint64_t Words __attribute__((vector_size(kVectorBytes)));

constexpr int64_t kLineBytes = 64;
constexpr int64_t kStreamBytes = 64 << 10;  // of a stream in one go, before all move on
constexpr int kSums = 4;                    // enough that no sum waits for itself

// Adds a cache line to a sum. References: vectors by value would be part of the ABI.
inline void add_line(const char* line, Words& sum) {
  Words words[kLineBytes / kVectorBytes];
  memcpy(words, line, sizeof words);
  for (const Words& w : words) sum ^= w;
}

// kStreams streams side by side; of each the line `kAhead` bytes on is fetched (0: none).
template <int kStreams, int64_t kAhead>
uint64_t read(const uint64_t* words, int64_t count) {
  constexpr int64_t kGroupBytes = kStreams * kStreamBytes;
  Words sums[kSums] = {};
  const char* group = reinterpret_cast<const char*>(words);
  const char* const end = group + count * int64_t{sizeof(uint64_t)};
  for (; end - group >= kGroupBytes; group += kGroupBytes) {
    for (int64_t k = 0; k < kStreamBytes; k += kLineBytes) {
      // What a stream reads after its end lies in the next group.
      const int64_t ahead =
          k + kAhead < kStreamBytes ? k + kAhead : k + kAhead + kGroupBytes - kStreamBytes;
#pragma GCC unroll 8
      for (int s = 0; s < kStreams; ++s) {
        const char* stream = group + s * kStreamBytes;
        if constexpr (kAhead > 0) __builtin_prefetch(stream + ahead);
        add_line(stream + k, sums[s % kSums]);
      }
    }
  }
  uint64_t result = 0;
  for (const Words& sum : sums) {
    for (int64_t i = 0; i < kVectorBytes / 8; ++i) result ^= sum[i];
  }
  for (; group < end; group += sizeof(uint64_t)) {
    uint64_t word;
    memcpy(&word, group, sizeof word);
    result ^= word;
  }
  return result;
}

constexpr ReadWay kWays[] = {{"1 stream, " CADRE_READ_VECTOR, read<1, 0>},
                             {"1 stream, 2048 bytes ahead, " CADRE_READ_VECTOR, read<1, 2048>},
                             {"4 streams, 2048 bytes ahead, " CADRE_READ_VECTOR, read<4, 2048>},
                             {"8 streams, " CADRE_READ_VECTOR, read<8, 0>},
                             {"8 streams, 512 bytes ahead, " CADRE_READ_VECTOR, read<8, 512>}};
constexpr ReadWays kAllWays = {kWays, sizeof kWays / sizeof *kWays};

}  // namespace
}  // namespace cadre::cpu
