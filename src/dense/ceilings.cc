#include "dense/ceilings.h"

#include <string_view>
#include <vector>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "dense/compiled_dense_ops.h"

namespace cadre {

const Ceilings& ceilings_of(DeviceType device) {
  std::vector<std::string_view> built;
  for (const CompiledDenseOps& entry : compiled_dense_ops()) {
    if (entry.device == device) return entry.ceilings();
    built.push_back(name_of(entry.device));
  }
  throw Unsupported(str_cat("device ", name_of(device),
                            ": this build cannot measure its ceilings; available: ", join(built)));
}

}  // namespace cadre
