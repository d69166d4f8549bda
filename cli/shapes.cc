#include "shapes.h"

#include "options.h"
#include "suggest.h"

namespace cadre::cli {

namespace {

constexpr int64_t kMaxDimension = int64_t{1} << 24;

NamedShape shape(std::string name, int64_t num_experts, int64_t top_k, int64_t hidden_size,
                 int64_t intermediate_size) {
  NamedShape result;
  result.name = std::move(name);
  result.config.num_experts = num_experts;
  result.config.top_k = top_k;
  result.config.hidden_size = hidden_size;
  result.config.intermediate_size = intermediate_size;
  return result;
}

}  // namespace

const std::vector<NamedShape>& named_shapes() {
  static const std::vector<NamedShape> kShapes = {
      shape("qwen1.5-moe-a2.7b", 60, 4, 2048, 1408),  shape("qwen3-30b-a3b", 128, 8, 2048, 768),
      shape("mixtral-8x7b", 8, 2, 4096, 14336),       shape("deepseek-v3", 256, 8, 7168, 2048),
      shape("deepseek-v4-flash", 256, 6, 4096, 2048), shape("gpt-oss-20b", 32, 4, 2880, 2880),
      shape("olmoe-1b-7b", 64, 8, 2048, 1024),
  };
  return kShapes;
}

NamedShape parse_shape(std::string_view option, const std::string& text) {
  std::vector<std::string> names;
  for (const NamedShape& known : named_shapes()) {
    if (known.name == text) return known;
    names.push_back(known.name);
  }
  const std::vector<std::string> items = split_list(text);
  if (items.size() != 4) {
    throw InvalidArgument(str_cat(option, ": expected a name (", join(names),
                                  ") or E,k,H,I (experts, experts per token, hidden size, ",
                                  "intermediate size), got \"", text, "\"",
                                  did_you_mean(text, names)));
  }
  std::vector<int64_t> sizes;
  for (const std::string& item : items) {
    sizes.push_back(parse_number<int64_t>(option, item, 1, kMaxDimension));
  }
  NamedShape result = shape(text, sizes[0], sizes[1], sizes[2], sizes[3]);
  validate(result.config);
  return result;
}

}  // namespace cadre::cli
