#include "generation/chat_template_files.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "io/file_handle.h"
#include "io/json.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxTemplateBytes = int64_t{4} << 20;
constexpr int64_t kMaxConfigBytes = int64_t{64} << 20;  // added tokens make it long

using Named = std::map<std::string, TemplateSource>;

[[noreturn]] void fail(const std::string& origin, std::string_view expected, const Json& found) {
  throw CheckpointError(str_cat(origin, ": expected ", expected, ", got ", found.type_name(),
                                "; fetch the file again"));
}

// A text, or a list of {"name": ..., "template": ...}.
void add_from_config(const Json& value, const std::string& origin, Named& named) {
  if (value.is_string()) {
    named["default"] = {value.get<std::string>(), origin};
    return;
  }
  if (!value.is_array()) fail(origin, "a text or a list of named templates", value);
  for (const Json& entry : value) {
    const bool is_named = entry.is_object() && entry.contains("name") &&
                          entry["name"].is_string() && entry.contains("template") &&
                          entry["template"].is_string();
    if (!is_named) fail(origin, "objects with the texts name and template", entry);
    const std::string name = entry["name"];
    named[name] = {entry["template"].get<std::string>(), str_cat(origin, " ", quote(name))};
  }
}

TemplateSource read_template(const fs::path& file) {
  return {read_file(file, kMaxTemplateBytes, "a chat template"), file.string()};
}

// Files count more than what tokenizer_config.json holds.
Named named_templates(const fs::path& folder, const Json& config) {
  Named files;
  const fs::path file = folder / "chat_template.jinja";
  const fs::path processor_file = folder / "chat_template.json";
  if (is_there(file)) {
    files["default"] = read_template(file);
  } else if (is_there(processor_file)) {
    const Json json = read_json_file(processor_file, kMaxConfigBytes);
    if (json.contains("chat_template")) {
      add_from_config(json["chat_template"], processor_file.string() + ": chat_template", files);
    }
  }
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder / "additional_chat_templates", ignored)) {
    if (entry.path().extension() != ".jinja") continue;
    files[entry.path().stem().string()] = read_template(entry.path());
  }
  const bool in_config = config.contains("chat_template") && !config["chat_template"].is_null();
  if (files.empty() && in_config) {
    add_from_config(config["chat_template"],
                    (folder / "tokenizer_config.json").string() + ": chat_template", files);
  }
  return files;
}

// "bos_token": "<s>" or {"content": "<s>", ...}
void add_special_tokens(const Json& config, std::map<std::string, std::string>& tokens) {
  for (const auto& [key, value] : config.items()) {
    if (!key.ends_with("_token")) continue;
    if (value.is_string()) tokens[key] = value.get<std::string>();
    const bool has_content =
        value.is_object() && value.contains("content") && value["content"].is_string();
    if (has_content) tokens[key] = value["content"].get<std::string>();
  }
}

std::map<std::string, std::string> special_tokens(const fs::path& folder, const Json& config) {
  std::map<std::string, std::string> tokens;
  add_special_tokens(config, tokens);
  if (config.contains("extra_special_tokens") && config["extra_special_tokens"].is_object()) {
    add_special_tokens(config["extra_special_tokens"], tokens);
  }
  const fs::path legacy = folder / "special_tokens_map.json";
  if (!config.contains("added_tokens_decoder") && is_there(legacy)) {
    add_special_tokens(read_json_file(legacy, kMaxConfigBytes), tokens);
  }
  return tokens;
}

[[noreturn]] void fail_without(const fs::path& folder, const Named& named) {
  if (named.empty()) {
    throw Unsupported(
        str_cat(folder.string(),
                " has no chat template: expected chat_template.jinja, or chat_template in ",
                "tokenizer_config.json; it may be a base model, which continues text but does not "
                "chat. Put ",
                "the template of its instruct model there as chat_template.jinja, or continue text "
                "without ",
                "one"));
  }
  std::vector<std::string> names;
  for (const auto& entry : named) names.push_back(entry.first);
  throw Unsupported(str_cat(folder.string(), ": expected a chat template named default, got ",
                            join(names), "; copy the one to use to chat_template.jinja there"));
}

}  // namespace

ChatTemplateFiles read_chat_template_files(const fs::path& folder) {
  const fs::path config_file = folder / "tokenizer_config.json";
  const Json config =
      is_there(config_file) ? read_json_file(config_file, kMaxConfigBytes) : Json::object();
  Named named = named_templates(folder, config);
  const auto plain = named.find("default");
  const auto with_tools = named.find("tool_use");
  if (plain == named.end()) fail_without(folder, named);
  ChatTemplateFiles files{plain->second, {}, special_tokens(folder, config)};
  if (with_tools != named.end()) files.with_tools = with_tools->second;
  return files;
}

}  // namespace cadre
