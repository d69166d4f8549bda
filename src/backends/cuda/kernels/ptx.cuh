// Hopper's own instructions: mbarriers, the tensor copy engine (TMA), warpgroup products (wgmma),
// clusters. For *_sm90a.cu files. Shared memory is addressed by 32-bit shared-window addresses.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace cadre::cuda::ptx {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Clusters ----

__device__ inline uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

/// The same place in the shared memory of CTA `rank` of the cluster.
__device__ inline uint32_t address_in_cta(uint32_t address, uint32_t rank) {
  uint32_t result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

/// Lets the next kernel of the stream start where it was launched as dependent.
__device__ inline void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- mbarriers ----

__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/// After barrier_init, before other CTAs of the cluster or the copy engine use the barriers.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void arrive_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// `barrier` as address_in_cta gives it.
__device__ inline void arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Stores 4 bytes in a CTA of the cluster and tells a barrier there; both as address_in_cta gives
/// them.
__device__ inline void store_in_cluster(uint32_t address, int32_t value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(
          address),
      "r"(value), "r"(barrier)
      : "memory");
}

/// Waits until the phase of that parity is complete.
__device__ inline void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni finished;\n"
      "bra.uni again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- Tensor copies ----

__device__ inline void load_2d(uint32_t to, const CUtensorMap* map, int32_t x, int32_t y,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

__device__ inline void load_3d(uint32_t to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

/// For a map that is about to be used.
__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Of what is read once: it leaves L2 before all else.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline void load_3d(uint32_t to, const CUtensorMap* map, int32_t x, int32_t y, int32_t z,
                               uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

/// To the same place in every CTA of `ctas` (a bit each), telling the same barrier of each.
__device__ inline void multicast_2d(uint32_t to, const CUtensorMap* map, int32_t x, int32_t y,
                                    uint32_t barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes."
      "multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(ctas)
      : "memory");
}

__device__ inline void multicast_3d(uint32_t to, const CUtensorMap* map, int32_t x, int32_t y,
                                    int32_t z, uint32_t barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes."
      "multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(ctas)
      : "memory");
}

/// A box from shared memory to global memory; commit_stores() after some of them.
__device__ inline void store_2d(const CUtensorMap* map, int32_t x, int32_t y, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// This thread's: shared memory may be written again.
__device__ inline void wait_until_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ inline int4 load_shared_16(uint32_t address) {
  int4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

/// 16 bytes; `bytes` 0 writes zeros and reads nothing.
__device__ inline void copy_16(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

/// 4 bytes.
__device__ inline void copy_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/// The 128 bytes around `from` to L2.
__device__ inline void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

/// One arrival when all earlier copy_16() and copy_4() of this thread are done; the barrier counts
/// on it.
__device__ inline void arrive_when_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// Between stores to shared memory (copy_16() too) and reads of it by wgmma or the copy engine.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Between ordinary stores to global memory and reads of it by the copy engine: by the writer
/// before it tells, and by the reader after it was told.
__device__ inline void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ inline void add_release(uint32_t* count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

__device__ inline uint32_t load_acquire(const uint32_t* count) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
  return value;
}

// ---- Warpgroups ----

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// A tile in shared memory with K along rows of 128 bytes in the 128-byte swizzle; the tile begins
/// at a multiple of 1024 bytes. 16 elements of K further on are 2 more in the low word.
__device__ inline uint64_t swizzled_tile(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | (uint64_t{1} << 16) | ((address & 0x3FFFF) >> 4);
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving uses of accumulators across a wait.
template <int kCount>
__device__ inline void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define CADRE_D8(o)                                                                           \
  "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), \
      "+f"(d[o + 6]), "+f"(d[o + 7])
#define CADRE_D32(o) CADRE_D8(o), CADRE_D8(o + 8), CADRE_D8(o + 16), CADRE_D8(o + 24)
#define CADRE_WGMMA_N256(types)                                                                    \
  asm volatile(                                                                                    \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." types                                         \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "    \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, " \
      "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
      "%55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, " \
      "%73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, " \
      "%91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, "    \
      "%107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, " \
      "%122, %123, %124, %125, %126, %127}, %128, %129, add, 1, 1, 0, 0;\n}"                       \
      : CADRE_D32(0), CADRE_D32(32), CADRE_D32(64), CADRE_D32(96)                                  \
      : "l"(a), "l"(b), "r"(add))

/// d (+)= a b^T: 64 rows of a, 256 of b, 16 of K; `add` 0 starts from zero.
template <typename T>
__device__ inline void wgmma_n256(float (&d)[128], uint64_t a, uint64_t b, int32_t add);
template <>
__device__ inline void wgmma_n256<__nv_bfloat16>(float (&d)[128], uint64_t a, uint64_t b,
                                                 int32_t add) {
  CADRE_WGMMA_N256("bf16.bf16");
}
template <>
__device__ inline void wgmma_n256<__half>(float (&d)[128], uint64_t a, uint64_t b, int32_t add) {
  CADRE_WGMMA_N256("f16.f16");
}

#define CADRE_WGMMA_E4M3                                                                       \
  "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "     \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, " \
  "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
  "%55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, "

/// d = a b^T: 64 rows of a, 128 of b, 32 of K in e4m3. What d held is an input, so that it has been
/// used before: as a mere output the compiler gives d other registers and lets old and new overlap.
__device__ inline void wgmma_e4m3_first(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 0, 0;\n" CADRE_WGMMA_E4M3 "add, 1, 1;\n}"
               : CADRE_D32(0), CADRE_D32(32)
               : "l"(a), "l"(b));
}
/// d += a b^T
__device__ inline void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n" CADRE_WGMMA_E4M3 "add, 1, 1;\n}"
               : CADRE_D32(0), CADRE_D32(32)
               : "l"(a), "l"(b));
}

/// d (+)= a b^T: 64 rows of a, kN of b, 32 of K in e4m3. The first of a sum starts from zero.
template <int kN>
__device__ inline void wgmma_e4m3_few_first(float (&d)[kN / 2], uint64_t a, uint64_t b);
template <int kN>
__device__ inline void wgmma_e4m3_few(float (&d)[kN / 2], uint64_t a, uint64_t b);

#define CADRE_WGMMA_FEW(n, list, a_at, b_at, out, in)                                          \
  template <>                                                                                  \
  __device__ inline void wgmma_e4m3_few_first<n>(float(&d)[n / 2], uint64_t a, uint64_t b) {   \
    asm volatile(                                                                              \
        "{\n.reg .pred add;\nsetp.ne.b32 add, 0, 0;\n"                                         \
        "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" list "}, " a_at ", " b_at \
        ", add, 1, 1;\n}"                                                                      \
        : out                                                                                  \
        : "l"(a), "l"(b));                                                                     \
  }                                                                                            \
  template <>                                                                                  \
  __device__ inline void wgmma_e4m3_few<n>(float(&d)[n / 2], uint64_t a, uint64_t b) {         \
    asm volatile(                                                                              \
        "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                         \
        "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" list "}, " a_at ", " b_at \
        ", add, 1, 1;\n}"                                                                      \
        : in                                                                                   \
        : "l"(a), "l"(b));                                                                     \
  }
#define CADRE_O4 "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
#define CADRE_O8(o)                                                                           \
  "=f"(d[o]), "=f"(d[o + 1]), "=f"(d[o + 2]), "=f"(d[o + 3]), "=f"(d[o + 4]), "=f"(d[o + 5]), \
      "=f"(d[o + 6]), "=f"(d[o + 7])
#define CADRE_D4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define CADRE_O16 CADRE_O8(0), CADRE_O8(8)
#define CADRE_D16 CADRE_D8(0), CADRE_D8(8)
#define CADRE_LIST8 "%0, %1, %2, %3, %4, %5, %6, %7"

CADRE_WGMMA_FEW(8, "%0, %1, %2, %3", "%4", "%5", CADRE_O4, CADRE_D4)
CADRE_WGMMA_FEW(16, CADRE_LIST8, "%8", "%9", CADRE_O8(0), CADRE_D8(0))
CADRE_WGMMA_FEW(32, CADRE_LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15", "%16", "%17", CADRE_O16,
                CADRE_D16)

#undef CADRE_LIST8
#undef CADRE_D16
#undef CADRE_O16
#undef CADRE_D4
#undef CADRE_O8
#undef CADRE_O4
#undef CADRE_WGMMA_FEW
#undef CADRE_WGMMA_E4M3
#undef CADRE_WGMMA_N256
#undef CADRE_D32
#undef CADRE_D8

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                      uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ inline uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ inline uint32_t pack(float low, float high, __half) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

/// The larger, or NaN where one is NaN.
__device__ inline float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// Of the special function unit, subnormals as 0: 2 ulp; 1 ulp.
__device__ inline float exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ inline float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Two e4m3 codes, nearest, ties to even, beyond the largest the largest.
__device__ inline uint16_t pack_e4m3(float low, float high) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

}  // namespace cadre::cuda::ptx
