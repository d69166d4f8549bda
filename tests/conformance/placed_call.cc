#include "conformance/placed_call.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "cadre/allocator.h"
#include "cadre/thread_pool.h"
#include "core/str_cat.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

constexpr int kGuardByte = 0xa5;

// Device memory with guards around each block, for what allocates on its own (the workspace).
class GuardedAllocator final : public Allocator {
 public:
  static constexpr size_t kGuard = 64 * 1024;

  static GuardedAllocator& instance() {
    static GuardedAllocator& allocator = *new GuardedAllocator;
    return allocator;
  }
  void* allocate(Device device, size_t bytes) override {
    const size_t all = bytes + 2 * kGuard;
    char* memory = static_cast<char*>(device_runtime(device).allocator().allocate(device, all));
    sizes_[memory + kGuard] = bytes;
    return memory + kGuard;
  }
  void deallocate(Device device, void* memory) noexcept override {
    sizes_.erase(static_cast<char*>(memory));
    device_runtime(device).allocator().deallocate(device, static_cast<char*>(memory) - kGuard);
  }
  // The whole block around an address, guards included.
  std::pair<char*, size_t> block_of(void* inside) const {
    const auto above = sizes_.upper_bound(static_cast<char*>(inside));
    const auto& [begin, bytes] = *std::prev(above);
    return {begin - kGuard, bytes + 2 * kGuard};
  }

 private:
  std::map<char*, size_t> sizes_;
};

// Index of the first byte that is not the guard's; -1: none.
int64_t first_changed(const char* begin, const char* end) {
  const auto* found =
      std::find_if(begin, end, [](char c) { return static_cast<unsigned char>(c) != kGuardByte; });
  return found == end ? -1 : found - begin;
}

void add_view(DeviceCopies& copies, const TensorView& view) {
  if (view.numel() == 0) return;
  int64_t last = 0;
  for (int i = 0; i < view.rank(); ++i) last += (view.dim(i) - 1) * view.stride(i);
  copies.add(view.data(), static_cast<size_t>(last + 1) * size_of(view.dtype()));
}

TensorView moved(const DeviceCopies& copies, const TensorView& view, Device device) {
  const void* data = view.numel() == 0 ? nullptr : copies.on_device(view.data());
  return {data, view.dtype(), view.shape(), view.strides(), device};
}

int64_t block_of(int64_t index, int64_t block) { return block == 0 ? 0 : index / block; }

// Bytes from the first to the last value of a matrix, and to the last of its scales.
int64_t bytes_of_values(StorageFormat format, const ExpertMatrix& m, int64_t n, int64_t k) {
  if (format == StorageFormat::kFp4) return (n - 1) * m.row_stride + row_bytes(format, k);
  return ((n - 1) * m.row_stride + (k - 1) * m.col_stride + 1) * row_bytes(format, 1);
}
int64_t bytes_of_scales(const ScaleLayout& layout, const ExpertMatrix& m, int64_t n, int64_t k) {
  const int64_t last =
      block_of(n - 1 + m.scale_row_offset, layout.block_rows) * m.scale_row_stride +
      block_of(k - 1, layout.block_cols) * m.scale_col_stride;
  return (last + 1) * static_cast<int64_t>(size_of(layout.dtype));
}

// Visits every address of the weights with the bytes behind it.
template <typename Weights, typename Visit>
void visit_addresses(const ExpertsConfig& config, Weights& weights, Visit visit) {
  const auto matrices = [&](auto& list, int64_t n, int64_t k) {
    for (auto& m : list) {
      const int64_t values = bytes_of_values(weights.format, m, n, k);
      const int64_t scales = bytes_of_scales(weights.scale_layout, m, n, k);
      visit(m.data, static_cast<size_t>(values));
      if (is_quantized(weights.format)) visit(m.scales, static_cast<size_t>(scales));
    }
  };
  const auto vectors = [&](auto& list, int64_t n) {
    for (auto& v : list) {
      visit(v.data, static_cast<size_t>((n - 1) * v.stride + 1) * size_of(weights.bias_dtype));
    }
  };
  matrices(weights.gate, config.intermediate_size, config.hidden_size);
  matrices(weights.up, config.intermediate_size, config.hidden_size);
  matrices(weights.down, config.hidden_size, config.intermediate_size);
  vectors(weights.gate_bias, config.intermediate_size);
  vectors(weights.up_bias, config.intermediate_size);
  vectors(weights.down_bias, config.hidden_size);
}

}  // namespace

// ---- copies ------------------------------------------------------------------------------------

void DeviceCopies::add(const void* begin, size_t bytes) {
  char* first = static_cast<char*>(const_cast<void*>(begin));
  if (bytes != 0) pieces_.push_back({first, first + bytes, nullptr, nullptr, {}});
}

void DeviceCopies::place() {
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  std::vector<Piece> merged;
  for (const Piece& piece : pieces_) {
    // Tensors of one buffer lie a few bytes apart; buffers of their own at least a page.
    if (!merged.empty() && piece.begin <= merged.back().end + 256) {
      merged.back().end = std::max(merged.back().end, piece.end);
    } else {
      merged.push_back(piece);
    }
  }
  pieces_ = std::move(merged);
  for (Piece& piece : pieces_) {
    piece.memory = allocate_shared_memory(stream_.device, guarded_bytes(piece) + 256);
    const auto base = reinterpret_cast<uintptr_t>(piece.memory.get()) + kGuard;
    const auto offset = reinterpret_cast<uintptr_t>(piece.begin) % 256;
    piece.device = reinterpret_cast<char*>((base + 255) / 256 * 256 + offset);
  }
  update();
}

size_t DeviceCopies::guarded_bytes(const Piece& piece) const {
  return static_cast<size_t>(piece.end - piece.begin) + 2 * kGuard + 256;
}

void DeviceCopies::update() {
  DeviceRuntime& runtime = device_runtime(stream_.device);
  for (Piece& piece : pieces_) {
    const auto bytes = static_cast<size_t>(piece.end - piece.begin);
    piece.image.assign(piece.begin, piece.end);
    runtime.fill(guarded_begin(piece), kGuardByte, kGuard, stream_);
    runtime.fill(piece.device + bytes, kGuardByte, kGuard, stream_);
    runtime.copy(piece.device, piece.image.data(), bytes, stream_);
  }
  runtime.synchronize(stream_);
}

void* DeviceCopies::on_device(const void* host) const {
  const char* at = static_cast<const char*>(host);
  for (const Piece& piece : pieces_) {
    if (piece.begin <= at && at < piece.end) return piece.device + (at - piece.begin);
  }
  throw std::logic_error("DeviceCopies: an address that was not added");
}

std::string DeviceCopies::read_back(bool to_host) const {
  DeviceRuntime& runtime = device_runtime(stream_.device);
  std::string report;
  for (const Piece& piece : pieces_) {
    const auto bytes = static_cast<size_t>(piece.end - piece.begin);
    std::vector<char> image(bytes + 2 * kGuard);
    runtime.copy(image.data(), guarded_begin(piece), image.size(), stream_);
    runtime.synchronize(stream_);
    const char* data = image.data() + kGuard;
    const int64_t before = first_changed(image.data(), data);
    const int64_t behind = first_changed(data + bytes, data + bytes + kGuard);
    if (before >= 0)
      report += str_cat("byte ", before, " of ", kGuard, " before a tensor changed; ");
    if (behind >= 0) report += str_cat("byte ", behind, " behind a tensor changed; ");
    if (to_host) {
      std::memcpy(piece.begin, data, bytes);
      continue;
    }
    const auto changed = std::mismatch(piece.image.begin(), piece.image.end(), data).first;
    if (changed != piece.image.end()) {
      report += str_cat("byte ", changed - piece.image.begin(), " of ", bytes, " changed; ");
    }
  }
  return report;
}

// ---- a call ------------------------------------------------------------------------------------

PlacedCall::PlacedCall(ExpertsBackend& backend, const ExpertsQuery& asked,
                       const std::shared_ptr<const ExpertsWeights>& weights,
                       const RoutedTokens& tokens, const Stream& stream)
    : backend_(backend),
      stream_(stream),
      host_(tokens),
      tokens_(tokens),
      weight_copies_(stream),
      input_copies_(stream),
      output_copy_(stream) {
  ExpertsQuery query = asked;
  query.device = stream.device;
  const int threads = stream.threads == nullptr ? 1 : stream.threads->num_threads();
  workspace_bytes_ = backend.workspace_bytes(query, tokens.hidden_states.dim(0), threads);
  if (is_cpu()) {
    prepared_ = backend.prepare(query, weights);
    workspace_ = std::make_unique<Workspace>(query.device, workspace_bytes_);
    return;
  }
  auto on_device = std::make_shared<ExpertsWeights>(*weights);
  on_device->device = stream.device;
  on_device->packed = nullptr;
  visit_addresses(query.config, *on_device,
                  [&](const void* data, size_t bytes) { weight_copies_.add(data, bytes); });
  weight_copies_.place();
  visit_addresses(query.config, *on_device,
                  [&](const void*& data, size_t) { data = weight_copies_.on_device(data); });
  for (const TensorView* view : {static_cast<const TensorView*>(&tokens.hidden_states),
                                 static_cast<const TensorView*>(&tokens.top_k_index),
                                 static_cast<const TensorView*>(&tokens.top_k_weights)}) {
    add_view(input_copies_, *view);
  }
  add_view(output_copy_, tokens.output);
  input_copies_.place();
  output_copy_.place();
  tokens_.hidden_states = moved(input_copies_, tokens.hidden_states, stream.device);
  tokens_.top_k_index = moved(input_copies_, tokens.top_k_index, stream.device);
  tokens_.top_k_weights = moved(input_copies_, tokens.top_k_weights, stream.device);
  const TensorView output = moved(output_copy_, tokens.output, stream.device);
  tokens_.output = MutableTensorView(const_cast<void*>(output.data()), output.dtype(),
                                     output.shape(), output.strides(), stream.device);
  prepared_ = backend.prepare(query, on_device);
  register_allocator(stream.device.type, &GuardedAllocator::instance());
  workspace_ = std::make_unique<Workspace>(stream.device, workspace_bytes_);
  register_allocator(stream.device.type, nullptr);
}

PlacedCall::~PlacedCall() = default;

// The output's rows, not what lies between them.
void PlacedCall::poison() {
  const MutableTensorView& out = host_.output;
  for (int64_t t = 0; t < out.dim(0); ++t) {
    const auto offset = static_cast<size_t>(t * out.stride(0)) * size_of(out.dtype());
    std::memset(static_cast<char*>(out.mutable_data()) + offset, 0xff,
                static_cast<size_t>(out.dim(1)) * size_of(out.dtype()));
  }
  const Workspace::Scope scope(*workspace_);
  if (is_cpu()) {
    if (workspace_bytes_ != 0) {
      std::memset(workspace_->allocate(workspace_bytes_), 0xff, workspace_bytes_);
    }
    return;
  }
  output_copy_.update();
  if (workspace_bytes_ == 0) return;
  DeviceRuntime& runtime = device_runtime(stream_.device);
  workspace_begin_ = workspace_->allocate(workspace_bytes_);
  const auto [block, bytes] = GuardedAllocator::instance().block_of(workspace_begin_);
  runtime.fill(block, kGuardByte, bytes, stream_);
  runtime.fill(workspace_begin_, 0xff, workspace_bytes_, stream_);
}

// What lies between the output's rows is compared with the host's before it is taken over.
std::vector<double> PlacedCall::result() {
  if (is_cpu()) return to_doubles(host_.output);
  DeviceRuntime& runtime = device_runtime(stream_.device);
  runtime.synchronize(stream_);
  std::vector<char> gaps;
  const MutableTensorView& out = host_.output;
  const auto visit_gaps = [&](auto visit) {
    for (int64_t t = 0; t + 1 < out.dim(0); ++t) {
      const auto size = static_cast<int64_t>(size_of(out.dtype()));
      char* row = static_cast<char*>(out.mutable_data()) + t * out.stride(0) * size;
      for (char* at = row + out.dim(1) * size; at < row + out.stride(0) * size; ++at) visit(*at);
    }
  };
  visit_gaps([&](char c) { gaps.push_back(c); });
  EXPECT_EQ(output_copy_.fetch(), "") << "around the output";
  size_t i = 0;
  bool same = true;
  visit_gaps([&](char c) { same = same && c == gaps[i++]; });
  EXPECT_TRUE(same) << "between the rows of the output";
  EXPECT_EQ(input_copies_.changes(), "") << "around the inputs";
  EXPECT_EQ(weight_copies_.changes(), "") << "around the weights";
  if (workspace_bytes_ != 0) {
    const auto [block, bytes] = GuardedAllocator::instance().block_of(workspace_begin_);
    char* begin = static_cast<char*>(workspace_begin_);
    std::vector<char> before(static_cast<size_t>(begin - block));
    std::vector<char> behind(bytes - before.size() - workspace_bytes_);
    runtime.copy(before.data(), block, before.size(), stream_);
    runtime.copy(behind.data(), begin + workspace_bytes_, behind.size(), stream_);
    runtime.synchronize(stream_);
    EXPECT_EQ(first_changed(before.data(), before.data() + before.size()), -1)
        << "before the workspace";
    EXPECT_EQ(first_changed(behind.data(), behind.data() + behind.size()), -1)
        << "behind the workspace of " << workspace_bytes_ << " bytes";
  }
  return to_doubles(host_.output);
}

std::vector<double> PlacedCall::run() {
  poison();
  backend_.forward(*prepared_, tokens_, *workspace_, stream_);
  return result();
}

void PlacedCall::capture() {
  graph_ = device_runtime(stream_.device).capture(stream_, [&] {
    backend_.forward(*prepared_, tokens_, *workspace_, stream_);
  });
}

std::vector<double> PlacedCall::replay() {
  input_copies_.update();
  poison();
  graph_->launch(stream_);
  return result();
}

}  // namespace cadre::test
