#include "backends/cuda/device/cublas_lt.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <string_view>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

constexpr const char* kVariable = "CADRE_CUBLASLT";
constexpr size_t kOldestVersion = 120000;  // 12.0; the header's types have not changed since

struct Search {
  std::unique_ptr<CublasLt> found;
  std::string why_not;
};

template <typename Function>
bool resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool resolve_all(void* library, CublasLt& lt) {
  return resolve(library, "cublasLtCreate", lt.create) &&
         resolve(library, "cublasLtGetVersion", lt.get_version) &&
         resolve(library, "cublasLtGetStatusString", lt.get_status_string) &&
         resolve(library, "cublasLtMatmul", lt.matmul) &&
         resolve(library, "cublasLtMatmulAlgoGetHeuristic", lt.get_heuristic) &&
         resolve(library, "cublasLtMatmulDescCreate", lt.desc_create) &&
         resolve(library, "cublasLtMatmulDescDestroy", lt.desc_destroy) &&
         resolve(library, "cublasLtMatmulDescSetAttribute", lt.desc_set) &&
         resolve(library, "cublasLtMatrixLayoutCreate", lt.layout_create) &&
         resolve(library, "cublasLtMatrixLayoutDestroy", lt.layout_destroy) &&
         resolve(library, "cublasLtMatmulPreferenceCreate", lt.preference_create) &&
         resolve(library, "cublasLtMatmulPreferenceDestroy", lt.preference_destroy) &&
         resolve(library, "cublasLtMatmulPreferenceSetAttribute", lt.preference_set);
}

// 120103 is 12.1.3.
std::string version_text(size_t version) {
  return str_cat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

// Tries one file; empty when it serves, else why it does not.
std::string open(const char* file, CublasLt& lt) {
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  std::string why;
  if (!resolve_all(library, lt)) {
    why = str_cat(file, ": not all functions of cuBLASLt are there");
  } else if (const size_t version = lt.get_version(); version < kOldestVersion) {
    why = str_cat(file, ": expected version 12 or later, got ", version);
  } else {
    Dl_info info = {};
    const bool known = dladdr(reinterpret_cast<const void*>(lt.matmul), &info) != 0;
    lt.file = known && info.dli_fname != nullptr ? info.dli_fname : file;
    lt.version = version_text(version);
    return {};
  }
  dlclose(library);
  return why;
}

Search search_named(const char* file) {
  if (std::string_view(file) == "off") return {nullptr, str_cat(kVariable, " is off")};
  Search search{std::make_unique<CublasLt>(), {}};
  const std::string why = open(file, *search.found);
  if (!why.empty()) {
    throw InvalidArgument(str_cat(kVariable, "=", file,
                                  ": expected the cuBLASLt library (libcublasLt.so.13), or off; ",
                                  why));
  }
  return search;
}

Search search_everywhere() {
  Search search{std::make_unique<CublasLt>(), {}};
  for (const char* file :
       {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so",
        "/usr/local/cuda/lib64/libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.12"}) {
    if (open(file, *search.found).empty()) return search;
  }
  return {nullptr, str_cat("no libcublasLt.so.13 or .12 on the library path or in "
                           "/usr/local/cuda/lib64; put its folder into LD_LIBRARY_PATH or its "
                           "file into ",
                           kVariable)};
}

// A search that throws is made anew by the next call.
const Search& search() {
  static const Search kResult = [] {
    const char* named = std::getenv(kVariable);
    return named != nullptr && *named != '\0' ? search_named(named) : search_everywhere();
  }();
  return kResult;
}

}  // namespace

const CublasLt* find_cublas_lt() { return search().found.get(); }

const std::string& why_no_cublas_lt() { return search().why_not; }

void check_cublas_lt(const CublasLt& lib, cublasStatus_t status, const char* call, int device) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw DeviceError(str_cat("cuda:", device, ": ", call, " of cuBLASLt ", lib.version, " (",
                            lib.file, ") failed: ", lib.get_status_string(status), "; ", kVariable,
                            "=off runs without it"));
}

}  // namespace cadre::cuda
