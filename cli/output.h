// What a command gives out: text on standard output, and files whose place is checked before hours
// of work.
#pragma once

#include <filesystem>
#include <string_view>

#include "io/json.h"

namespace cadre::cli {

/// Writes all of `text` to standard output at once. False when the reader has gone (`| head`): the
/// caller stops quietly. Throws Error with the system's reason when it cannot be written.
bool write_stdout(std::string_view text);

/// One object on one line.
bool write_json(const Json& json);

/// `text` as it is on standard error.
void show(std::string_view text);

/// `text` as a line on standard error, unless `quiet`.
void note(std::string_view text, bool quiet);

/// Throws Error when a file cannot be made at `path`: its folder is missing or not writable. An
/// empty path passes.
/// `option` is where the path came from.
void require_writable(const std::filesystem::path& path, std::string_view option = "--out");

/// Throws InvalidArgument when `out` and `input` are the same file, under whatever names.
void require_distinct(const std::filesystem::path& out, const std::filesystem::path& input);

}  // namespace cadre::cli
