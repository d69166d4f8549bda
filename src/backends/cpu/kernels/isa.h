// Which instruction set the CPU kernels use: chosen once, at run time, from what the processor and
// the operating system offer, or by the environment variable CADRE_CPU_ISA.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "backends/cpu/kernels/kernel_table.h"
#include "cadre/dtype.h"
#include "cadre/storage_format.h"

namespace cadre::cpu {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx };

inline constexpr Isa kAllIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16,
                                   Isa::kAmx};

/// "portable", "avx2", "avx512", "avx512_bf16", "amx"
std::string_view name_of(Isa isa);

/// True when the processor has the instructions and the operating system keeps their registers.
bool is_available(Isa isa);

/// The choice for a value of CADRE_CPU_ISA; null = not set, the fastest one. Throws InvalidArgument
/// for an unknown name and Unsupported for one that this machine lacks, listing those it has.
Isa choose_isa(const char* requested);

/// choose_isa of the environment, made once and kept.
Isa active_isa();

/// The kernels of an instruction set for a compute dtype. Throws InvalidArgument when the dtype is
/// no compute dtype.
const KernelTable& kernels_for(Isa isa, DType compute_dtype);

/// The kernels for weights of a format: quantised ones are multiplied as values of float32 where
/// the dtype's own kernels do not read them (amx).
const KernelTable& kernels_for(Isa isa, DType compute_dtype, StorageFormat format);

/// Throws InvalidArgument for a dtype that kernels do not read.
Element element_of(DType dtype);

}  // namespace cadre::cpu
