#include "checkpoint/model_files.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <utility>

#include "base/files/json_text.h"
#include "base/files/untrusted.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kExtension = ".safetensors";
constexpr const char* kIndexExtension = ".safetensors.index.json";
constexpr const char* kUsualIndex = "model.safetensors.index.json";
constexpr int64_t kMostModelIndexBytes = int64_t{256} << 20;

// A file of a model, and the names of the tensors wanted from it; none: all.
struct Part {
  fs::path path;
  std::optional<std::set<std::string>> names = std::nullopt;
  std::string index = "";  // the name of the index that lists them
};

void check_stored(const SafetensorsFile& file, const TensorHeader& tensor) {
  naming_file("checkpoint", file.path(), "can't be read", [&] {
    file.check(tensor.name, tensor.dtype,
               CheckedShape(tensor.shape, item_size(tensor.dtype)).numel());
  });
}

void add_part(const Part& part, std::vector<ModelTensor>& tensors) {
  const auto file = std::make_shared<SafetensorsFile>(File::open_file(part.path));
  const auto others = file->other_names();
  size_t found = 0;
  for (TensorHeader& tensor : file->tensors()) {
    if (part.names && !part.names->contains(tensor.name)) continue;
    ++found;
    check_stored(*file, tensor);
    std::vector<std::string> names = {tensor.name};
    if (const auto it = others.find(tensor.name); it != others.end())
      names.insert(names.end(), it->second.begin(), it->second.end());
    tensors.push_back({file, std::move(tensor), std::move(names)});
  }
  TORCH_CHECK_VALUE(!part.names || found == part.names->size(), "[checkpoint] '",
                    part.path.string(), "' lacks tensors that '", part.index, "' names; it has ",
                    found, " of ", part.names ? part.names->size() : 0);
}

std::vector<Part> indexed_parts(const fs::path& index) {
  std::vector<Part> parts;
  for (auto& [path, names] : files_of_index(index))
    parts.push_back({path, names, index.filename().string()});
  return parts;
}

// Names such as `model-00001-of-00003.safetensors` must form one complete set.
void check_numbered(const fs::path& directory, const std::vector<std::string>& files) {
  static const std::regex kNumbered(R"((.*)-(\d{5})-of-(\d{5})\.safetensors)");
  std::set<std::string> sets, missing;
  for (const std::string& file : files) {
    std::smatch match;
    if (!std::regex_match(file, match, kNumbered)) {
      sets.insert(file);
      continue;
    }
    sets.insert(match[1].str() + "-of-" + match[3].str());
    for (int number = 1; number <= std::min(std::stoi(match[3]), 99999); ++number)
      missing.insert(
          fmt::format("{}-{:05}-of-{}{}", match[1].str(), number, match[3].str(), kExtension));
  }
  if (missing.empty()) return;
  for (const std::string& file : files) missing.erase(file);
  TORCH_CHECK_VALUE(missing.empty(), "[checkpoint] '", directory.string(), "' lacks '",
                    missing.empty() ? "" : *missing.begin(), "', one of ", missing.size(),
                    " missing files of a numbered set of which it has others");
  TORCH_CHECK_VALUE(
      sets.size() == 1, "[checkpoint] '", directory.string(),
      "' must have the files of one model, or an index that tells which they are; it has ",
      fmt::format("{}", fmt::join(sets, ", ")));
}

std::vector<Part> parts_of(const fs::path& directory) {
  std::vector<std::string> files, indices;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(kExtension)) files.push_back(name);
    if (name.ends_with(kIndexExtension)) indices.push_back(name);
  }
  std::sort(files.begin(), files.end());
  const bool has_usual = std::find(indices.begin(), indices.end(), kUsualIndex) != indices.end();
  TORCH_CHECK_VALUE(has_usual || indices.size() <= 1, "[checkpoint] '", directory.string(),
                    "' must have one index, or one that is called ", kUsualIndex, "; it has ",
                    indices.size());
  if (!indices.empty())
    return indexed_parts(directory / (has_usual ? kUsualIndex : indices.front()));
  TORCH_CHECK_VALUE(!files.empty(), "[checkpoint] '", directory.string(),
                    "' must have safetensors files; it has none");
  check_numbered(directory, files);
  std::vector<Part> parts;
  for (const std::string& file : files) parts.push_back({directory / file});
  return parts;
}

}  // namespace

at::Tensor ModelTensor::read() const {
  const at::Tensor value = at::empty(header.shape, scalar_type_of(header.dtype));
  file->read(header.name, 0, value.nbytes(), value.mutable_data_ptr());
  return value;
}

std::map<fs::path, std::set<std::string>> files_of_index(const fs::path& index) {
  std::map<fs::path, std::set<std::string>> files;
  naming_file("checkpoint", index.string(), "must have a weight_map of names and files", [&] {
    const auto json = parse_json(File::open_file(index).read_all(kMostModelIndexBytes));
    for (const auto& [name, value] :
         json.at("weight_map").get<std::map<std::string, std::string>>()) {
      check_file_name(value);
      files[index.parent_path() / value].insert(name);
    }
  });
  for (const auto& [path, names] : files)
    TORCH_CHECK_VALUE(fs::exists(path), "[checkpoint] could not open '", path.string(),
                      "', which '", index.filename().string(), "' names: No such file");
  return files;
}

std::vector<ModelTensor> open_model(const fs::path& path) {
  std::vector<ModelTensor> tensors;
  const bool is_index = path.string().ends_with(kIndexExtension) && !fs::is_directory(path);
  const auto parts = fs::is_directory(path) ? parts_of(path)
                     : is_index             ? indexed_parts(path)
                                            : std::vector<Part>{{path}};
  for (const Part& part : parts) add_part(part, tensors);
  std::map<std::string, const ModelTensor*> seen;
  for (const ModelTensor& tensor : tensors) {
    for (const std::string& name : tensor.names) {
      const auto [it, is_new] = seen.emplace(name, &tensor);
      TORCH_CHECK_VALUE(is_new, "[checkpoint] '", path.string(), "' has '", shortened(name),
                        "' twice: in '", it->second->file->path(), "' and '", tensor.file->path(),
                        "'");
    }
  }
  return tensors;
}

}  // namespace tessera
