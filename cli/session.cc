#include "session.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "cadre/generation.h"
#include "convert.h"
#include "dense/dense_ops.h"
#include "io/checkpoint.h"
#include "io/file_handle.h"
#include "io/safetensors.h"
#include "models/prepack.h"
#include "models/weight_placement.h"
#include "progress.h"

namespace cadre::cli {

namespace {

std::string read_all(int descriptor, const std::string& origin) {
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t count = ::read(descriptor, buffer, sizeof buffer);
    if (count == 0) return text;
    if (count > 0) {
      text.append(buffer, static_cast<size_t>(count));
    } else if (errno != EINTR) {
      throw CheckpointError(
          str_cat(origin, ": expected text, but it cannot be read: ", errno_text(errno)));
    }
  }
}

}  // namespace

std::string cpu_instruction_set() {
  return std::string(dense_ops(DeviceType::kCpu).instruction_set());
}

std::unique_ptr<Model> load_model(const CommonOptions& common) {
  Progress layers(ProgressTerminal::standard_error(common.quiet), "layers");
  Progress experts(ProgressTerminal::standard_error(common.quiet), "experts");
  Progress weights(ProgressTerminal::standard_error(common.quiet), "MiB");
  LoadOptions options = load_options(common);
  options.progress = [&](std::string_view what, int64_t done, int64_t total) {
    Progress& bar = what == kPackingExperts ? experts : what == kLoadingWeights ? weights : layers;
    bar.update(what, done, total);
  };
  return Model::from_pretrained(model_path(common), options);
}

void require_known_sub_configs(const ExpertsImplementation& map, const ModelInfo& info) {
  std::vector<std::string> keys{"\"\" (the model as a whole)"};
  for (const std::string& name : info.sub_configs) keys.push_back(str_cat('"', name, '"'));
  for (const auto& entry : map) {
    const std::string& wanted = entry.first;
    const bool known = wanted.empty() || std::find(info.sub_configs.begin(), info.sub_configs.end(),
                                                   wanted) != info.sub_configs.end();
    if (known) continue;
    throw InvalidArgument(str_cat("experts implementation: unknown sub-config \"", wanted,
                                  "\"; this model has: ", join(keys)));
  }
}

Tokenizer load_tokenizer(const Model& model) {
  const std::filesystem::path file = std::filesystem::path(model.info().path) / "tokenizer.json";
  if (!is_there(file)) {
    throw CheckpointError(
        str_cat(file.string(), ": expected the model's tokenizer, there is no such file; fetch it ",
                "with the model, or give token ids: cadre generate --input-ids FILE"));
  }
  return Tokenizer::from_file(file);
}

ChatTemplate load_chat_template(const CommonOptions& common, std::string_view what) {
  try {
    return ChatTemplate::from_model_folder(
        resolve_model_path(model_path(common), common.load.revision));
  } catch (const Unsupported& error) {
    throw Unsupported(str_cat(what, ": ", error.what()));
  }
}

std::vector<TokenId> encode_text(const Tokenizer& tokenizer, const Model& model,
                                 std::string_view text, bool add_special_tokens) {
  std::vector<TokenId> ids = tokenizer.encode(text, add_special_tokens);
  check_token_ids(ids, tokenizer, model.info());
  return ids;
}

TokenBatch read_input_ids(const std::filesystem::path& file, int64_t vocab_size) {
  const SafetensorsFile input = SafetensorsFile::open(file);
  const TensorView ids = input.tensor("input_ids");
  const bool integers = ids.dtype() == DType::kI64 || ids.dtype() == DType::kI32;
  if (!integers || ids.rank() != 2 || ids.numel() == 0) {
    throw CheckpointError(
        str_cat(file.string(), ": expected input_ids: int64 or int32 [sequences, ",
                "tokens], at least one of each, got ", describe("input_ids", ids)));
  }
  TokenBatch batch{ids.dim(0), ids.dim(1), {}};
  std::vector<int64_t> values;
  append_integers(ids, values);
  for (const int64_t id : values) {
    if (id < 0 || id >= vocab_size) {
      const auto i = static_cast<int64_t>(batch.token_ids.size());
      throw CheckpointError(str_cat(file.string(), ": input_ids[", i / ids.dim(1), ", ",
                                    i % ids.dim(1), "]: expected a token id from 0 to ",
                                    vocab_size - 1, " (the model's vocabulary), got ", id));
    }
    batch.token_ids.push_back(static_cast<TokenId>(id));
  }
  return batch;
}

void require_context(const ModelInfo& info, std::string_view what, int64_t num_tokens) {
  if (num_tokens <= info.max_position_embeddings) return;
  throw InvalidArgument(str_cat(what, ": ", num_tokens, " tokens, but the context of ", info.path,
                                " holds ", info.max_position_embeddings,
                                " (max_position_embeddings); shorten the input"));
}

void require_outside_model(const std::filesystem::path& out, const ModelInfo& info) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(info.path, ignored)) {
    if (!std::filesystem::equivalent(out, entry.path(), ignored)) continue;
    throw InvalidArgument(str_cat("--out ", out.string(), ": expected a new file, got the model's ",
                                  entry.path().string(), "; name another place"));
  }
}

std::string read_text(const std::string& path) {
  if (path == "-") return read_all(STDIN_FILENO, "standard input");
  const FileHandle file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) {
    throw CheckpointError(
        str_cat(path, ": expected a text file, but it cannot be opened: ", errno_text(errno)));
  }
  return read_all(file.get(), path);
}

}  // namespace cadre::cli
