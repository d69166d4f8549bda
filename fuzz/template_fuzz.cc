// A chat template and what it is rendered with: the input is the template, a line that says "----",
// and a JSON array of messages.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "cadre/chat.h"
#include "cadre/error.h"
#include "generation/jinja/template.h"
#include "generation/jinja/value_text.h"

namespace {

constexpr std::string_view kMessages =
    R"([{"role": "user", "content": "é x"}, {"role": "assistant", "content": null, "n": [1, 2.5]}])";

/// With limits that let a run end soon.
void render(std::string_view source, const cadre::jinja::Value& messages) {
  cadre::jinja::Dict variables;
  variables.set(cadre::jinja::Value(std::string("messages")), messages);
  variables.set(cadre::jinja::Value(std::string("tools")), messages);
  const cadre::jinja::Template chat(source, "template");
  chat.render(variables, std::tm{}, {.steps = 20'000, .bytes = 1 << 20});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr std::string_view kDivider = "\n----\n";
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.find(kDivider);
  const std::string_view json = end == input.npos ? kMessages : input.substr(end + kDivider.size());
  try {
    // The caller's JSON takes the way of the public interface first.
    cadre::ChatTemplate::from_text("{{ messages | tojson(indent=1) }}").render_json(json);
    render(input.substr(0, end),
           cadre::jinja::from_json(nlohmann::ordered_json::parse(json, nullptr, false)));
  } catch (const cadre::Error&) {
  } catch (const cadre::jinja::Fault&) {
  }
  return 0;
}
