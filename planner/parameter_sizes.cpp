#include <c10/util/Exception.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/planner/plan_report.h>
#include <tessera/planner/transformer_config.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <sstream>

#include "base/files/file.h"
#include "base/files/untrusted.h"
#include "checkpoint/directory.h"
#include "checkpoint/index.h"
#include "checkpoint/model_files.h"
#include "planner/described_files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Spells out names such as fp32, bf16 and u8.
std::string long_dtype_name(std::string name) {
  for (const auto& [shorter, longer] : {std::pair<std::string, const char*>("bf", "bfloat"),
                                        {"fp", "float"},
                                        {"f", "float"},
                                        {"i", "int"},
                                        {"u", "uint"}})
    if (name.starts_with(shorter) && std::isdigit(name[shorter.size()]))
      return longer + name.substr(shorter.size());
  return name;
}

// Calls `f`, which reads a file, and makes its errors name that file.
template <class F>
auto naming(const fs::path& path, F&& f) {
  try {
    return f();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    if (text.find(path.string()) != std::string::npos) throw;
    TORCH_CHECK_VALUE(false, "[read_parameter_sizes] '", path.string(), "': ", text);
  }
}

// Most elements of all parameters together: more than any model has, few enough to compute with.
constexpr int64_t kMostElements = 9'000'000'000'000'000;
constexpr int64_t kMostListBytes = int64_t{64} << 20;

void check_sizes(const ParameterSize& parameter) {
  try {
    CheckedShape(parameter.shape, static_cast<int64_t>(c10::elementSize(parameter.dtype)));
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "the sizes of '", shortened(parameter.names.front()),
                      "' must be those of a tensor: ", error.what_without_backtrace());
  }
}

ParameterSize parameter_from(std::vector<std::string> names, std::vector<int64_t> shape,
                             at::ScalarType dtype) {
  const bool trainable = c10::isFloatingType(dtype) || c10::isComplexType(dtype);
  ParameterSize parameter{std::move(names), std::move(shape), dtype, trainable};
  check_sizes(parameter);
  return parameter;
}

std::vector<ParameterSize> read_model(const fs::path& path) {
  std::vector<ParameterSize> sizes;
  for (ModelTensor& tensor : open_model(path)) {
    sizes.push_back(parameter_from(std::move(tensor.names), std::move(tensor.header.shape),
                                   scalar_type_of(tensor.header.dtype)));
  }
  return sizes;
}

// Reads a checkpoint. In an imported one, tensors may be parameters or buffers.
std::vector<ParameterSize> read_checkpoint(const fs::path& path) {
  CheckpointIndex index = read_index(File::open_directory(path));
  std::vector<ParameterSize> sizes;
  for (TensorRecord& tensor : index.tensors) {
    if (tensor.kind != "param" && tensor.kind != "tensor") continue;
    sizes.push_back(parameter_from(std::move(tensor.names), std::move(tensor.shape),
                                   scalar_type_of(tensor.dtype)));
  }
  return sizes;
}

std::vector<ParameterSize> read_directory(const fs::path& path) {
  const fs::path checkpoint = readable_checkpoint(path);
  if (fs::exists(checkpoint / kIndexFile)) return read_checkpoint(checkpoint);
  return is_described(path) ? parameter_sizes(read_transformer_config(path)) : read_model(path);
}

int64_t parse_size(const std::string& word, const std::string& where) {
  int64_t size = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), size);
  TORCH_CHECK_VALUE(error == std::errc() && end == word.data() + word.size() && size >= 0,
                    "[read_parameter_sizes] ", where,
                    " must be `name dtype size... [frozen]`; got '", shortened(word),
                    "' for a size");
  return size;
}

// Parses one line of a list.
ParameterSize parse_line(const std::vector<std::string>& words, const std::string& where) {
  TORCH_CHECK_VALUE(words.size() >= 2, "[read_parameter_sizes] ", where,
                    " must be `name dtype size... [frozen]`; got '", shortened(words.front()),
                    "' alone");
  ParameterSize parameter{.names = {words[0]}};
  try {
    parameter.dtype = parse_dtype(words[1]);
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, "[read_parameter_sizes] ", where, ": ",
                      error.what_without_backtrace());
  }
  const bool is_frozen = words.size() > 2 && words.back() == "frozen";
  parameter.trainable = !is_frozen && c10::isFloatingType(parameter.dtype);
  for (size_t i = 2; i + (is_frozen ? 1 : 0) < words.size(); ++i)
    parameter.shape.push_back(parse_size(words[i], where));
  check_sizes(parameter);
  return parameter;
}

std::vector<ParameterSize> read_list(const fs::path& path) {
  std::istringstream file(File::open_any(path).read_to_end(kMostListBytes));
  std::vector<ParameterSize> sizes;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    std::istringstream text(line.substr(0, line.find('#')));
    std::vector<std::string> words;
    for (std::string word; text >> word;) words.push_back(word);
    if (words.empty()) continue;
    sizes.push_back(
        parse_line(words, "line " + std::to_string(number) + " of '" + path.string() + "'"));
  }
  return sizes;
}

std::vector<ParameterSize> read_any(const fs::path& path) {
  if (fs::is_directory(path)) {
    const auto latest = latest_checkpoint(path);  // if the directory is that of a run
    return read_directory(latest ? *latest : path);
  }
  if (is_described(path)) return parameter_sizes(read_transformer_config(path));
  return path.extension() == ".safetensors" ? read_model(path) : read_list(path);
}

void check_total(const std::vector<ParameterSize>& sizes, const std::string& path) {
  int64_t total = 0;
  for (const ParameterSize& size : sizes) {
    const int64_t numel = CheckedShape(size.shape).numel();
    TORCH_CHECK_VALUE(numel <= kMostElements - total, "[read_parameter_sizes] '", path,
                      "' must have at most ", kMostElements, " elements; with parameter '",
                      shortened(size.names.front()), "' it has more");
    total += numel;
  }
}

}  // namespace

at::ScalarType parse_dtype(const std::string& name) {
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto& dtypes = c10::getStringToDtypeMap();
  const auto it = dtypes.find(long_dtype_name(lower));
  TORCH_CHECK_VALUE(
      it != dtypes.end(),
      "[parse_dtype] a dtype must be one such as float32, bfloat16, float16 or int64; got '",
      shortened(name), "'");
  return it->second;
}

std::vector<ParameterSize> read_parameter_sizes(const std::string& path) {
  TORCH_CHECK_VALUE(fs::exists(path), "[read_parameter_sizes] there is no file or directory '",
                    path, "'");
  std::vector<ParameterSize> sizes = naming(path, [&] { return read_any(path); });
  TORCH_CHECK_VALUE(!sizes.empty(), "[read_parameter_sizes] '", path, "' holds no parameters");
  check_total(sizes, path);
  return sizes;
}

std::vector<ParameterSize> made_up_parameter_sizes(int64_t numel, int layers,
                                                   at::ScalarType dtype) {
  TORCH_CHECK_VALUE(layers >= 1 && numel >= layers,
                    "[made_up_parameter_sizes] there must be at least one layer, with at least one "
                    "element in each; got ",
                    layers, " layers and ", numel, " elements");
  std::vector<ParameterSize> sizes;
  for (int layer = 0; layer < layers; ++layer) {
    const int64_t size = numel / layers + (layer < numel % layers ? 1 : 0);
    sizes.push_back({{"layers." + std::to_string(layer)}, {size}, dtype});
  }
  return sizes;
}

}  // namespace tessera
