#include "session.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "convert.h"
#include "io/file_handle.h"
#include "io/safetensors.h"
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

std::unique_ptr<Model> load_model(const CommonOptions& common) {
  Progress progress(ProgressTerminal::standard_error(common.quiet), "layers");
  LoadOptions options = load_options(common);
  options.progress = progress.callback();
  return Model::from_pretrained(model_path(common), options);
}

Tokenizer load_tokenizer(const Model& model) {
  return Tokenizer::from_file(std::filesystem::path(model.info().path) / "tokenizer.json");
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
