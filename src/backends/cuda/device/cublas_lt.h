// cuBLASLt, found at run time: Cadre needs nothing but the driver, and multiplies faster where the
// library is there. Only types, enums and function pointers of its header are used.
#pragma once

#include <cublasLt.h>

#include <string>

namespace cadre::cuda {

/// The functions that Cadre calls.
struct CublasLt {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtGetVersion) get_version = nullptr;
  decltype(&cublasLtGetStatusString) get_status_string = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;

  std::string file;     // where it was found
  std::string version;  // "13.1.0"
};

/// Looked for once: the file that CADRE_CUBLASLT names ("off": none at all), else
/// libcublasLt.so.13, .12 and unversioned by the system's search path (LD_LIBRARY_PATH, ldconfig),
/// then in /usr/local/cuda/lib64. Null when there is none. Throws InvalidArgument when the file
/// that the variable names cannot be used.
const CublasLt* find_cublas_lt();

/// Empty when it was found; else why not. Throws as find_cublas_lt().
const std::string& why_no_cublas_lt();

/// Throws DeviceError naming `call` and the device when `status` is a fault.
void check_cublas_lt(const CublasLt& lib, cublasStatus_t status, const char* call, int device);

}  // namespace cadre::cuda
