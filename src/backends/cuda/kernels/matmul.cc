#include "backends/cuda/kernels/matmul.h"

#include "backends/cuda/kernels/matmul_bias.h"
#include "backends/cuda/kernels/matmul_plans.h"
#include "backends/cuda/kernels/portable_gemm.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

// The library adds a bias in the dtype of the output alone. Another one is put into the output
// first, and the product is added to it.
bool try_cublas_lt(const CublasLt& lib, const Matmul& args, Workspace& workspace,
                   const Stream& stream) {
  const Workspace::Scope scope(workspace);
  void* scratch = workspace.allocate(kCublasLtScratch);
  const bool has_bias = args.bias != nullptr;
  if (!has_bias || args.out_dtype == args.dtype) {
    return cublas_lt_matmul(lib, args, has_bias, scratch, stream);
  }
  Matmul onto_bias = args;
  onto_bias.bias = nullptr;
  onto_bias.accumulate = true;
  if (!cublas_lt_takes(lib, onto_bias, stream)) return false;
  add_bias(static_cast<float*>(args.out), args.out_stride, args.m, args.n, args.bias, args.dtype,
           args.accumulate, stream);
  return cublas_lt_matmul(lib, onto_bias, /*epilogue_bias=*/false, scratch, stream);
}

void own_gemm(const Matmul& args, const Stream& stream) {
  PortableGemm gemm;
  gemm.dtype = args.dtype;
  gemm.max_rows = args.m;
  gemm.n = args.n;
  gemm.k = args.k;
  gemm.x = args.x;
  gemm.x_stride = args.x_stride;
  gemm.w.first = args.w;
  gemm.bias_dtype = args.dtype;
  gemm.bias.first.data = args.bias;
  gemm.out = args.out;
  gemm.out_dtype = args.out_dtype;
  gemm.out_stride = args.out_stride;
  gemm.accumulate = args.accumulate;
  portable_gemm(gemm, stream);
}

}  // namespace

size_t matmul_workspace_bytes() {
  return find_cublas_lt() == nullptr ? 0 : Workspace::padded(kCublasLtScratch);
}

void matmul(const Matmul& args, Workspace& workspace, const Stream& stream) {
  CADRE_ASSERT(args.out_dtype == args.dtype || args.out_dtype == DType::kF32);
  CADRE_ASSERT(!args.accumulate || args.out_dtype == DType::kF32);
  if (args.m == 0 || args.n == 0) return;
  const CublasLt* lib = find_cublas_lt();
  if (lib != nullptr && try_cublas_lt(*lib, args, workspace, stream)) return;
  own_gemm(args, stream);
}

void prepare_matmul(Device device) {
  if (const CublasLt* lib = find_cublas_lt()) prepare_cublas_lt(*lib, device.index);
}

std::string matmul_library() {
  const CublasLt* lib = find_cublas_lt();
  return lib == nullptr ? "own GEMM" : str_cat("cuBLASLt ", lib->version);
}

}  // namespace cadre::cuda
