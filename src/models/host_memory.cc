#include "models/host_memory.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace cadre {
namespace {

std::optional<size_t> meminfo_available() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  size_t kib = 0;
  while (file >> key) {
    if (key == "MemAvailable:" && file >> kib) return kib * 1024;
    file.ignore(256, '\n');
  }
  return std::nullopt;
}

std::optional<size_t> read_number(const char* path) {
  std::ifstream file(path);
  size_t value = 0;
  if (!(file >> value)) return std::nullopt;  // "max", or no such file
  return value;
}

// Page cache counts as used there, but gives way.
std::optional<size_t> cgroup_available() {
  const std::optional<size_t> limit = read_number("/sys/fs/cgroup/memory.max");
  const std::optional<size_t> used = read_number("/sys/fs/cgroup/memory.current");
  if (!limit || !used) return std::nullopt;
  size_t cache = 0;
  std::ifstream stat("/sys/fs/cgroup/memory.stat");
  std::string key;
  size_t value = 0;
  while (stat >> key >> value) {
    if (key == "inactive_file" || key == "active_file") cache += value;
  }
  const size_t held = *used - std::min(*used, cache);
  return *limit - std::min(*limit, held);
}

}  // namespace

std::optional<size_t> available_host_memory() {
  const std::optional<size_t> system = meminfo_available();
  const std::optional<size_t> group = cgroup_available();
  if (!system || !group) return system ? system : group;
  return std::min(*system, *group);
}

}  // namespace cadre
