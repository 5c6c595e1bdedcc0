#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/checkpoint_files.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/model_view.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/single_process.h"
#include "checkpoint/torch_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// A tensor of another program's file.
struct Source {
  std::vector<std::string> names;
  std::string dtype;
  std::vector<int64_t> shape;
  std::function<at::Tensor()> read;  // contiguous
};

// The other names of a tied tensor, as `save_model` of Python's safetensors notes them.
std::vector<std::string> names_in(const SafetensorsFile& file, const std::string& name) {
  std::vector<std::string> names = {name};
  for (const auto& [other, kept] : file.metadata())
    if (kept == name && other != name) names.push_back(other);
  return names;
}

void check_stored(const SafetensorsFile& file, const TensorHeader& tensor) {
  try {
    int64_t numel = 1;
    for (const int64_t size : tensor.shape) {
      TORCH_CHECK_VALUE(size >= 0, "its sizes must be 0 or more; got ", size);
      numel *= size;
    }
    file.check(tensor.name, tensor.dtype, numel);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "[import_checkpoint] '", tensor.name, "' of '", file.path(),
                      "' can't be read: ", error.what_without_backtrace());
  }
}

void add_safetensors(const fs::path& path, const std::function<bool(const std::string&)>& wanted,
                     std::vector<Source>& sources) {
  const auto file = std::make_shared<SafetensorsFile>(File::open_file(path));
  for (const TensorHeader& tensor : file->tensors()) {
    if (!wanted(tensor.name)) continue;
    check_stored(*file, tensor);
    sources.push_back({names_in(*file, tensor.name), tensor.dtype, tensor.shape, [file, tensor] {
                         const at::Tensor value =
                             at::empty(tensor.shape, scalar_type_of(tensor.dtype));
                         file->read(tensor.name, 0, value.nbytes(), value.mutable_data_ptr());
                         return value;
                       }});
  }
}

void add_torch(const fs::path& path, std::vector<Source>& sources) {
  const auto file = std::make_shared<TorchFile>(path);
  // Equal views of one storage are one tied tensor.
  using View = std::tuple<std::string, int64_t, std::vector<int64_t>, std::vector<int64_t>>;
  std::map<View, size_t> seen;
  for (const auto& [name, tensor] : file->tensors()) {
    const View view{tensor.storage, tensor.offset, tensor.shape, tensor.strides};
    const auto [place, is_new] = seen.emplace(view, sources.size());
    if (is_new) {
      sources.push_back({{name}, tensor.dtype, tensor.shape, [file, tensor = tensor] {
                           return file->read(tensor);
                         }});
    } else {
      sources[place->second].names.push_back(name);
    }
  }
}

// Of `model.safetensors.index.json` or one named alike: the file of each tensor.
std::map<std::string, std::string> weight_map(const fs::path& index) {
  try {
    return nlohmann::json::parse(std::ifstream(index))
        .at("weight_map")
        .get<std::map<std::string, std::string>>();
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "[import_checkpoint] '", index.string(),
                      "' must have a weight_map of names and files: ", error.what());
  }
}

void add_indexed(const fs::path& index, std::vector<Source>& sources) {
  std::map<std::string, std::set<std::string>> files;
  for (const auto& [name, file] : weight_map(index)) {
    TORCH_CHECK_VALUE(file.find('/') == std::string::npos, "[import_checkpoint] '", index.string(),
                      "' must name files beside itself; got '", file, "'");
    files[file].insert(name);
  }
  for (const auto& [file, names] : files) {
    const size_t before = sources.size();
    const auto wanted = [&names = names](const std::string& name) { return names.contains(name); };
    add_safetensors(index.parent_path() / file, wanted, sources);
    TORCH_CHECK_VALUE(sources.size() - before == names.size(), "[import_checkpoint] '",
                      (index.parent_path() / file).string(), "' lacks tensors that '",
                      index.filename().string(), "' names; it has ", sources.size() - before,
                      " of ", names.size());
  }
}

void add_directory(const fs::path& path, std::vector<Source>& sources) {
  TORCH_CHECK_VALUE(!fs::exists(path / kIndexFile), "[import_checkpoint] '", path.string(),
                    "' is a checkpoint already: reshard_checkpoint() and export_checkpoint() make "
                    "something else of it");
  std::vector<fs::path> files, indices;
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".safetensors")) files.push_back(entry.path());
    if (name.ends_with(".safetensors.index.json")) indices.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  TORCH_CHECK_VALUE(indices.size() <= 1, "[import_checkpoint] '", path.string(),
                    "' must have one index; it has ", indices.size());
  TORCH_CHECK_VALUE(!files.empty(), "[import_checkpoint] '", path.string(),
                    "' must have safetensors files; it has none");
  if (!indices.empty()) return add_indexed(indices.front(), sources);
  for (const fs::path& file : files)
    add_safetensors(
        file, [](const std::string&) { return true; }, sources);
}

std::vector<Source> open_sources(const fs::path& path) {
  std::vector<Source> sources;
  if (fs::is_directory(path)) {
    add_directory(path, sources);
  } else if (path.extension() == ".safetensors") {
    add_safetensors(
        path, [](const std::string&) { return true; }, sources);
  } else {
    add_torch(path, sources);
  }
  std::set<std::string> names;
  for (const Source& source : sources) {
    for (const std::string& name : source.names)
      TORCH_CHECK_VALUE(names.insert(name).second, "[import_checkpoint] '", path.string(),
                        "' has '", name, "' twice");
  }
  TORCH_CHECK_VALUE(!sources.empty(), "[import_checkpoint] '", path.string(), "' has no tensors");
  return sources;
}

}  // namespace

void import_checkpoint(const fs::path& from, const fs::path& path,
                       const CheckpointProgress& progress) {
  at::NoGradGuard no_grad;
  std::vector<RankContents> contents(1);
  CheckpointIndex& index = contents[0].index;
  index.plan = "imported";
  for (Source& source : open_sources(from)) {
    TensorRecord record =
        contiguous_record("tensor", source.names, source.shape, scalar_type_of(source.dtype));
    if (const int64_t numel = record.numel(); numel > 0) {
      record.chunks = {{rank_file(0, 1), record.id(), Region{0, numel}}};
      contents[0].chunks.push_back({record.id(), scalar_type_of(source.dtype), numel,
                                    [read = std::move(source.read)] { return read().view({-1}); }});
    }
    index.tensors.push_back(std::move(record));
  }
  write_for_all(path, std::move(contents), progress);
}

}  // namespace tessera
