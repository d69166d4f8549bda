// Where a checkpoint keeps its chat templates.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

namespace cadre {

struct TemplateSource {
  std::string source;
  std::string origin;  // for messages: the file, and the key or name inside it
};

struct ChatTemplateFiles {
  TemplateSource plain;                               // for conversations without tools
  std::optional<TemplateSource> with_tools;           // "tool_use"; absent: the plain one serves
  std::map<std::string, std::string> special_tokens;  // bos_token, eos_token, ...
};

/// As Transformers finds them; see ChatTemplate::from_model_folder.
ChatTemplateFiles read_chat_template_files(const std::filesystem::path& folder);

}  // namespace cadre
