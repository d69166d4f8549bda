#include "backends/cuda/kernels/matmul_plans.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>

#include "backends/cuda/device/check.h"
#include "core/check.h"

namespace cadre::cuda {
namespace {

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    default:
      CADRE_ASSERT(dtype == DType::kF32);
      return CUDA_R_32F;
  }
}

uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const uintptr_t lowest = address & (~address + 1);
  return address == 0 ? 256 : static_cast<uint32_t>(std::min<uintptr_t>(lowest, 256));
}

// All that decides which algorithm is taken.
struct Key {
  std::array<int64_t, 6> sizes;  // m, n, k, strides of x, W and out
  std::array<uint32_t, 4> alignments;
  DType dtype;
  DType out_dtype;
  bool w_transposed;  // [k, n] in memory
  bool bias;
  bool accumulate;

  auto operator<=>(const Key&) const = default;
};

// A plan's descriptors; the library's opaque objects.
struct Plan {
  explicit Plan(const CublasLt& lib) : lib(lib) {}
  ~Plan() {
    if (desc != nullptr) lib.desc_destroy(desc);
    for (cublasLtMatrixLayout_t layout : {w, x, out}) {
      if (layout != nullptr) lib.layout_destroy(layout);
    }
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  const CublasLt& lib;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr;
  cublasLtMatrixLayout_t x = nullptr;
  cublasLtMatrixLayout_t out = nullptr;
  bool taken = false;  // the library computes this shape
  cublasLtMatmulAlgo_t algo = {};
};

class Preference {
 public:
  explicit Preference(const CublasLt& lib, int device) : lib_(lib), device_(device) {
    check_cublas_lt(lib, lib.preference_create(&handle_), "cublasLtMatmulPreferenceCreate", device);
  }
  ~Preference() { lib_.preference_destroy(handle_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;

  template <typename T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    check_cublas_lt(lib_, lib_.preference_set(handle_, attribute, &value, sizeof value),
                    "cublasLtMatmulPreferenceSetAttribute", device_);
  }
  cublasLtMatmulPreference_t get() const { return handle_; }

 private:
  const CublasLt& lib_;
  int device_;
  cublasLtMatmulPreference_t handle_ = nullptr;
};

// The library counts columns first. Its product is out^T [n, m] = W [n, k] x^T [k, m].
class Products {
 public:
  Products(const CublasLt& lib, int device) : lib_(lib), device_(device) {
    const DeviceGuard guard(device);
    // A stream that is being recorded must not keep the library from allocating what is its own.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    CADRE_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    const cublasStatus_t status = lib.create(&handle_);
    CADRE_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
    check(status, "cublasLtCreate");
  }

  bool takes(const Matmul& args) {
    const std::lock_guard lock(mutex_);
    return plan_of(args, /*bias=*/false).taken;
  }

  bool run(const Matmul& args, bool bias, void* scratch, cudaStream_t stream) {
    const std::lock_guard lock(mutex_);
    const Plan& plan = plan_of(args, bias);
    if (!plan.taken) return false;
    if (bias) set(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
    const float one = 1;
    const float beta = args.accumulate ? 1 : 0;
    const DeviceGuard guard(device_);
    check(
        lib_.matmul(handle_, plan.desc, &one, args.w.data, plan.w, args.x, plan.x, &beta, args.out,
                    plan.out, args.out, plan.out, &plan.algo, scratch, kCublasLtScratch, stream),
        "cublasLtMatmul");
    return true;
  }

 private:
  // Prompts come in many lengths; what is captured in graphs needs no plan any more.
  static constexpr size_t kMaxPlans = 4096;

  void check(cublasStatus_t status, const char* call) const {
    check_cublas_lt(lib_, status, call, device_);
  }

  template <typename T>
  void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, T value) const {
    const auto* address = static_cast<const void*>(std::addressof(value));
    check(lib_.desc_set(desc, attribute, address, sizeof value), "cublasLtMatmulDescSetAttribute");
  }

  cublasLtMatrixLayout_t layout(DType dtype, int64_t rows, int64_t columns, int64_t stride) const {
    cublasLtMatrixLayout_t result = nullptr;
    check(lib_.layout_create(&result, data_type(dtype), static_cast<uint64_t>(rows),
                             static_cast<uint64_t>(columns), stride),
          "cublasLtMatrixLayoutCreate");
    return result;
  }

  const Plan& plan_of(const Matmul& args, bool bias) {
    const bool w_transposed = args.w.col_stride != 1;
    const int64_t w_stride = w_transposed ? args.w.col_stride : args.w.row_stride;
    const bool one_row = args.m == 1;  // its strides mean nothing
    const Key key{{args.m, args.n, args.k, one_row ? args.k : args.x_stride, w_stride,
                   one_row ? args.n : args.out_stride},
                  {alignment_of(args.w.data), alignment_of(args.x), alignment_of(args.out),
                   bias ? alignment_of(args.bias) : 256},
                  args.dtype,
                  args.out_dtype,
                  w_transposed,
                  bias,
                  args.accumulate};
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      if (plans_.size() >= kMaxPlans) plans_.clear();
      found = plans_.emplace(key, make_plan(args, key)).first;
    }
    return *found->second;
  }

  std::unique_ptr<Plan> make_plan(const Matmul& args, const Key& key) const {
    auto plan = std::make_unique<Plan>(lib_);
    check(lib_.desc_create(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, key.w_transposed ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    if (key.bias) {
      set(plan->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, args.bias);
      set(plan->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(args.dtype));
    }
    const int64_t w_stride = key.sizes[4];
    plan->w = key.w_transposed ? layout(args.dtype, args.n, args.k, w_stride)
                               : layout(args.dtype, args.k, args.n, w_stride);
    plan->x = layout(args.dtype, args.k, args.m, key.sizes[3]);
    plan->out = layout(args.out_dtype, args.n, args.m, key.sizes[5]);
    choose_algorithm(key, *plan);
    return plan;
  }

  void choose_algorithm(const Key& key, Plan& plan) const {
    Preference preference(lib_, device_);
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kCublasLtScratch);
    // Parts of a sum meet in float32 and in a fixed order.
    preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.alignments[0]);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.alignments[1]);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.alignments[2]);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.alignments[2]);
    const DeviceGuard guard(device_);
    cublasLtMatmulHeuristicResult_t result = {};
    int count = 0;
    const cublasStatus_t status =
        lib_.get_heuristic(handle_, plan.desc, plan.w, plan.x, plan.out, plan.out, preference.get(),
                           1, &result, &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return;
    check(status, "cublasLtMatmulAlgoGetHeuristic");
    plan.taken = count > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    plan.algo = result.algo;
  }

  const CublasLt& lib_;
  int device_;
  cublasLtHandle_t handle_ = nullptr;  // lives as long as the process
  std::mutex mutex_;  // of the plans, and of a plan's bias until it is in the stream
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

Products& products_of(const CublasLt& lib, int device) {
  static std::mutex mutex;
  static auto& all = *new std::map<int, std::unique_ptr<Products>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<Products>& products = all[device];
  if (products == nullptr) products = std::make_unique<Products>(lib, device);
  return *products;
}

// Strides that the library can express: rows of one piece, not overlapping.
bool is_plain(const Matmul& args) {
  const bool by_rows = args.w.col_stride == 1 && args.w.row_stride >= args.k;
  const bool by_columns = args.w.row_stride == 1 && args.w.col_stride >= args.n;
  const bool rows_apart = args.x_stride >= args.k && args.out_stride >= args.n;
  return args.k > 0 && (by_rows || by_columns) && (rows_apart || args.m == 1);
}

}  // namespace

void prepare_cublas_lt(const CublasLt& lib, int device) { products_of(lib, device); }

bool cublas_lt_matmul(const CublasLt& lib, const Matmul& args, bool epilogue_bias, void* scratch,
                      const Stream& stream) {
  if (!is_plain(args)) return false;
  return products_of(lib, stream.device.index).run(args, epilogue_bias, scratch, stream_of(stream));
}

bool cublas_lt_takes(const CublasLt& lib, const Matmul& args, const Stream& stream) {
  return is_plain(args) && products_of(lib, stream.device.index).takes(args);
}

}  // namespace cadre::cuda
