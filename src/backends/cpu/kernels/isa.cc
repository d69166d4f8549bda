#include "backends/cpu/kernels/isa.h"

#include <cstdlib>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace cadre::cpu {
namespace {

struct Features {
  bool avx2 = false;         // with FMA and F16C
  bool avx512 = false;       // F, BW, VL, DQ
  bool avx512_vbmi = false;  // as well
  bool avx512_bf16 = false;  // beside avx512
  bool amx = false;          // beside avx512_bf16: tiles and their bfloat16 products
  bool slow_bf16_dot = false;
};

#if defined(__x86_64__)
struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}

bool bit(unsigned word, int i) { return ((word >> i) & 1u) != 0; }

bool is_intel() {
  const Registers vendor = cpuid(0, 0);
  return vendor.b == 0x756e6547 && vendor.d == 0x49656e69 &&
         vendor.c == 0x6c65746e;  // GenuineIntel
}

// The register states that the operating system saves.
unsigned saved_states() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Linux gives tile registers only to processes that ask for them.
bool request_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features detect() {
  Features f;
  const Registers basic = cpuid(1, 0);
  if (!bit(basic.c, 27)) return f;  // no OSXSAVE: xgetbv would fault
  const unsigned states = saved_states();
  const Registers extended = cpuid(7, 0);
  const bool ymm = (states & 0x06u) == 0x06u;
  const bool zmm = (states & 0xe6u) == 0xe6u;
  f.avx2 = ymm && bit(basic.c, 28) && bit(basic.c, 12) && bit(basic.c, 29) && bit(extended.b, 5);
  f.avx512 = f.avx2 && zmm && bit(extended.b, 16) && bit(extended.b, 17) && bit(extended.b, 30) &&
             bit(extended.b, 31);
  f.avx512_vbmi = f.avx512 && bit(extended.c, 1);
  f.avx512_bf16 = f.avx512 && extended.a >= 1 && bit(cpuid(7, 1).a, 5);
  // Sapphire Rapids issues one vdpbf16ps in two cycles but two FMAs in one: measured 95 against 190
  // GFLOP/s a core. The float32 path is the faster one there. Told by the maker: a hypervisor may
  // hide the tiles, by which such a core could be known.
  f.slow_bf16_dot = is_intel();
  constexpr unsigned kTileStates = 0x60000u;
  f.amx = f.avx512_bf16 && (states & kTileStates) == kTileStates && bit(extended.d, 22) &&
          bit(extended.d, 24) && request_tiles();
  return f;
}
#else
Features detect() { return {}; }
#endif

const Features& features() {
  static const Features kFeatures = detect();
  return kFeatures;
}

std::string available_names() {
  std::vector<std::string_view> names;
  for (const Isa isa : kAllIsas) {
    if (is_available(isa)) names.push_back(name_of(isa));
  }
  return join(names);
}

Isa fastest_isa() {
  const Features& f = features();
  if (f.amx) return Isa::kAmx;
  if (f.avx512_bf16 && !f.slow_bf16_dot) return Isa::kAvx512Bf16;
  if (f.avx512) return Isa::kAvx512;
  return f.avx2 ? Isa::kAvx2 : Isa::kPortable;
}

#if defined(__x86_64__)
// The results are the same bits with and without VBMI.
const KernelTable& avx512_kernels() {
  static const KernelTable kFull = [] {
    KernelTable table = kAvx512Kernels;
    if (features().avx512_vbmi) {
      table.decode = kAvx512VbmiCodes.decode;
      table.multiply_codes = kAvx512VbmiCodes.multiply_codes;
    }
    return table;
  }();
  return kFull;
}
#endif

}  // namespace

std::string_view name_of(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return "portable";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kAmx:
      return "amx";
  }
  return "?";
}

bool is_available(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return features().avx2;
    case Isa::kAvx512:
      return features().avx512;
    case Isa::kAvx512Bf16:
      return features().avx512_bf16;
    case Isa::kAmx:
      return features().amx;
  }
  return false;
}

Isa choose_isa(const char* requested) {
  if (requested == nullptr) return fastest_isa();
  for (const Isa isa : kAllIsas) {
    if (name_of(isa) != requested) continue;
    if (is_available(isa)) return isa;
    throw Unsupported(str_cat("CADRE_CPU_ISA=", requested, ": this processor has only ",
                              available_names(), "; choose one of these or unset the variable"));
  }
  throw InvalidArgument(str_cat("CADRE_CPU_ISA: expected one of portable, avx2, avx512, ",
                                "avx512_bf16, amx, got \"", requested, "\" (this processor has ",
                                available_names(), ")"));
}

Isa active_isa() {
  static const Isa kIsa = choose_isa(std::getenv("CADRE_CPU_ISA"));
  return kIsa;
}

Element element_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return Element::kF32;
    case DType::kF16:
      return Element::kF16;
    case DType::kBF16:
      return Element::kBF16;
    default:
      throw InvalidArgument(
          str_cat("CPU kernels: expected float32, float16 or bfloat16, got ", name_of(dtype)));
  }
}

const KernelTable& kernels_for(Isa isa, DType compute_dtype) {
  const Element compute = element_of(compute_dtype);
  CADRE_ASSERT(is_available(isa));
#if defined(__x86_64__)
  if (isa == Isa::kAmx && compute == Element::kBF16) return kAmxKernels;
  if (isa == Isa::kAvx512Bf16 && compute == Element::kBF16) return kAvx512Bf16Kernels;
  if (isa >= Isa::kAvx512) return avx512_kernels();
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#else
  static_cast<void>(compute);
#endif
  return kPortableKernels;
}

const KernelTable& kernels_for(Isa isa, DType compute_dtype, StorageFormat format) {
  const KernelTable& kernels = kernels_for(isa, compute_dtype);
  if (!is_quantized(format) || kernels.multiply_codes != nullptr) return kernels;
  return kernels_for(isa, DType::kF32);
}

}  // namespace cadre::cpu
