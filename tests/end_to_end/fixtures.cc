#include "end_to_end/fixtures.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "io/safetensors.h"
#include "support/compare.h"

namespace cadre::test {

namespace fs = std::filesystem;

int missing_gpu_status() {
  const nlohmann::json json = json_of(run_cadre({"backends", "--json"}));
  return json.value("why_no_gpu", "") == "this build has no CUDA backends" ? 4 : 5;
}

fs::path model_folder(const std::string& name) {
  return fs::path(CADRE_TEST_DATA) / "models" / name;
}

fs::path expected_file(const std::string& name) {
  return model_folder(name) / "expected.safetensors";
}

fs::path copy_model(const std::string& name, const TempDir& folder) {
  const fs::path target = folder / name;
  fs::create_directories(target);
  for (const fs::directory_entry& entry : fs::directory_iterator(model_folder(name))) {
    if (entry.path().filename() == "expected.safetensors") continue;
    fs::copy_file(entry.path(), target / entry.path().filename());
    fs::permissions(target / entry.path().filename(), fs::perms::owner_write,
                    fs::perm_options::add);
  }
  return target;
}

std::string read_file(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

void write_file(const fs::path& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

void set_config(const fs::path& model, const std::string& key, const nlohmann::json& value) {
  nlohmann::json config = nlohmann::json::parse(read_file(model / "config.json"));
  config[key] = value;
  write_file(model / "config.json", config.dump());
}

fs::path write_input_ids(const fs::path& file, const Dims& shape,
                         const std::vector<int64_t>& values, DType dtype) {
  const Tensor ids(dtype, shape);
  for (int64_t i = 0; i < ids->numel(); ++i) {
    const int64_t value = values[static_cast<size_t>(i) % values.size()];
    if (dtype == DType::kI64) {
      ids->as<int64_t>()[i] = value;
    } else {
      ids->as<int32_t>()[i] = static_cast<int32_t>(value);
    }
  }
  const NamedTensor tensor{"input_ids", ids};
  write_safetensors(file, {&tensor, 1});
  return file;
}

std::vector<double> read_tensor(const fs::path& file, const std::string& name) {
  return to_doubles(SafetensorsFile::open(file).tensor(name));
}

Dims read_shape(const fs::path& file, const std::string& name) {
  return SafetensorsFile::open(file).tensor(name).shape();
}

nlohmann::json json_of(const Result& result) {
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 1) << result.out;
  nlohmann::json json = nlohmann::json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(json.is_object()) << "out: " << result.out << "\nerr: " << result.err;
  return json.is_object() ? json : nlohmann::json::object();
}

void expect_failure(const Result& result, int code, const std::vector<std::string>& parts) {
  EXPECT_EQ(result.exit_code, code) << result.err;
  EXPECT_EQ(result.signal, 0);
  EXPECT_EQ(result.out, "");
  EXPECT_EQ(result.err.rfind("cadre", 0), 0u) << result.err;
  EXPECT_EQ(result.err.find("\ncadre"), std::string::npos) << result.err;
  EXPECT_TRUE(result.err.ends_with("\n"));
  for (const std::string& part : parts) {
    EXPECT_NE(result.err.find(part), std::string::npos)
        << '"' << part << "\" not in: " << result.err;
  }
}

void expect_success(const Result& result) {
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.signal, 0);
  EXPECT_EQ(result.err, "");
}

}  // namespace cadre::test
