// One body, compiled for several instruction sets; the choice falls at run time.
#include "backends/cpu/dense/attend.h"

#include "backends/cpu/dense/attend.inl.h"
#include "backends/cpu/dense/widen.inl.h"

namespace cadre::cpu {
namespace {

#define CADRE_ATTEND_KERNELS(name, width, attribute)                                        \
  attribute void attend_##name(const AttendArgs& args) { attend_body<width>(args); }        \
  attribute void score_##name(const AttendArgs& args, float* scores) {                      \
    score_body<width>(args, scores);                                                        \
  }                                                                                         \
  attribute void widen_##name(const void* source, DType dtype, int64_t count, float* out) { \
    if (dtype == DType::kBF16) {                                                            \
      widen_bfloat16(source, count, out);                                                   \
    } else {                                                                                \
      widen_float16(source, count, out);                                                    \
    }                                                                                       \
  }

CADRE_ATTEND_KERNELS(generic, 4, )
#if defined(__x86_64__)
CADRE_ATTEND_KERNELS(avx2, 8, __attribute__((target("avx2,fma"))))
CADRE_ATTEND_KERNELS(avx512, 16,
                     __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))))
#endif

}  // namespace

std::span<const AttendKernels> attend_kernels() {
#if defined(__x86_64__)
  static constexpr AttendKernels kAll[] = {{attend_avx512, score_avx512, widen_avx512},
                                           {attend_avx2, score_avx2, widen_avx2},
                                           {attend_generic, score_generic, widen_generic}};
  static const size_t fastest = [] {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return size_t{avx512 ? 0u : avx2 ? 1u : 2u};
  }();
  return std::span(kAll).subspan(fastest);
#else
  static constexpr AttendKernels kAll[] = {{attend_generic, score_generic, widen_generic}};
  return kAll;
#endif
}

}  // namespace cadre::cpu
