#include <algorithm>
#include <mutex>

#include "cadre/error.h"
#include "cadre/experts.h"
#include "core/check.h"
#include "core/str_cat.h"
#include "experts/compiled_backends.h"

namespace cadre {
namespace {

// Entries are only ever added; the objects live until the program ends, for models hold pointers.
class Registry {
 public:
  static Registry& instance() {
    static Registry registry;
    return registry;
  }

  std::vector<BackendEntry> entries() {
    const std::lock_guard lock(mutex_);
    return entries_;
  }

  void add(const std::string& name, DeviceType device, std::unique_ptr<ExpertsBackend> backend) {
    const std::lock_guard lock(mutex_);
    const bool is_taken = std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
      return entry.name == name && entry.device == device;
    });
    if (is_taken) {
      throw InvalidArgument(str_cat("register_backend: expected a new name, got \"", name,
                                    "\", which is taken on ", name_of(device)));
    }
    entries_.push_back({name, device, backend.get(), ""});
    owned_.push_back(std::move(backend));
  }

 private:
  Registry() {
    for (const CompiledBackend& compiled : compiled_backends()) {
      std::unique_ptr<ExpertsBackend> backend;
      if (compiled.make != nullptr) {
        backend = compiled.make();
        CADRE_ASSERT(backend != nullptr);
      }
      entries_.push_back(
          {compiled.name, compiled.device, backend.get(), compiled.not_built_reason});
      owned_.push_back(std::move(backend));
    }
  }

  std::mutex mutex_;
  std::vector<BackendEntry> entries_;
  std::vector<std::unique_ptr<ExpertsBackend>> owned_;
};

// The entry, or one that says why there is none. Throws for an unknown name.
BackendEntry find_entry(std::string_view name, DeviceType device) {
  bool is_known = false;
  for (const BackendEntry& entry : list_backends()) {
    if (entry.name != name) continue;
    if (entry.device == device) return entry;
    is_known = true;
  }
  if (!is_known) {
    throw InvalidArgument(str_cat("experts backend: expected one of ", join(backend_names()),
                                  ", got \"", name, "\""));
  }
  return {std::string(name), device, nullptr,
          str_cat("it is not registered for ", name_of(device))};
}

}  // namespace

std::vector<BackendEntry> list_backends() { return Registry::instance().entries(); }

std::vector<std::string> backend_names() {
  std::vector<std::string> names;
  for (const BackendEntry& entry : list_backends()) {
    if (std::find(names.begin(), names.end(), entry.name) == names.end()) {
      names.push_back(entry.name);
    }
  }
  return names;
}

ExpertsBackend& find_backend(std::string_view name, DeviceType device) {
  const BackendEntry entry = find_entry(name, device);
  if (entry.backend != nullptr) return *entry.backend;
  std::vector<std::string> others;
  for (const BackendEntry& other : list_backends()) {
    if (other.device == device && other.backend != nullptr) others.push_back(other.name);
  }
  throw Unsupported(str_cat("experts backend \"", name, "\" on ", name_of(device), ": ",
                            entry.not_built_reason, "; available on ", name_of(device), ": ",
                            others.empty() ? "none" : join(others)));
}

Support supports(std::string_view name, const ExpertsQuery& query) {
  const BackendEntry entry = find_entry(name, query.device.type);
  if (entry.backend != nullptr) return entry.backend->supports(query);
  return {{entry.not_built_reason}};
}

void register_backend(const std::string& name, const BackendFactory& factory, DeviceType device) {
  if (name.empty()) {
    throw InvalidArgument("register_backend: expected a name, got an empty string");
  }
  std::unique_ptr<ExpertsBackend> backend = factory ? factory() : nullptr;
  if (backend == nullptr) {
    throw InvalidArgument(str_cat("register_backend: \"", name,
                                  "\": expected a factory that makes a backend, got nothing"));
  }
  Registry::instance().add(name, device, std::move(backend));
}

}  // namespace cadre
