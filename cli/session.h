// What the commands that run a model share: loading with a progress bar, the tokenizer, and input
// files checked before anything runs.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cadre/chat.h"
#include "cadre/model.h"
#include "cadre/tokenizer.h"
#include "options.h"

namespace cadre::cli {

/// What a run on the CPU uses. Throws for a wrong CADRE_CPU_ISA, as a run does.
std::string cpu_instruction_set();

std::unique_ptr<Model> load_model(const CommonOptions& common);

/// Throws InvalidArgument, as loading would, for a key that is neither "" nor a sub-config.
void require_known_sub_configs(const ExpertsImplementation& map, const ModelInfo& info);

/// tokenizer.json of the model's folder. Throws CheckpointError when it is not there.
Tokenizer load_tokenizer(const Model& model);

/// The chat template of the model that `common` names; no weight is read. Throws Unsupported when
/// it has none; `what` asked for it.
ChatTemplate load_chat_template(const CommonOptions& common, std::string_view what);

/// The text's ids, each of which the model has a row for.
std::vector<TokenId> encode_text(const Tokenizer& tokenizer, const Model& model,
                                 std::string_view text, bool add_special_tokens = true);

/// `input_ids` of a safetensors file: B sequences of T tokens each.
struct TokenBatch {
  int64_t num_sequences = 0;
  int64_t num_tokens = 0;          // of each sequence
  std::vector<TokenId> token_ids;  // sequence after sequence
};

/// Reads `input_ids` (B, T) i64 or i32, other tensors are ignored. Throws CheckpointError naming
/// file and tensor when it is absent, of another dtype or rank, empty, or holds an id outside
/// [0, vocab_size).
TokenBatch read_input_ids(const std::filesystem::path& file, int64_t vocab_size);

/// Throws InvalidArgument when sequences of `num_tokens` do not fit the model's context.
void require_context(const ModelInfo& info, std::string_view what, int64_t num_tokens);

/// Throws InvalidArgument when `out` is one of the model's own files: they are mapped.
void require_outside_model(const std::filesystem::path& out, const ModelInfo& info);

/// The whole file, or standard input when `path` is "-".
std::string read_text(const std::string& path);

}  // namespace cadre::cli
