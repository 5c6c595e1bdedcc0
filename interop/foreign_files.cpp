#include "interop/foreign_files.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "base/files/untrusted.h"
#include "checkpoint/model_files.h"
#include "checkpoint/safetensors.h"
#include "interop/torch_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDcpMetadata = ".metadata";
constexpr const char* kTorchIndexExtension = ".bin.index.json";
constexpr const char* kTorchModel = "pytorch_model.bin";
constexpr const char* kTorchModelIndex = "pytorch_model.bin.index.json";

// The tensors of a file of `torch.save`, by name.
class TorchSource final : public ChunkSource {
 public:
  TorchSource(std::shared_ptr<const TorchFile> file, std::map<std::string, PickledTensor> tensors)
      : file_(std::move(file)), tensors_(std::move(tensors)) {}

  void check(const std::string& key, const std::string& dtype, int64_t numel) const override {
    const PickledTensor& tensor = tensors_.at(key);
    TORCH_CHECK_VALUE(tensor.dtype == dtype && CheckedShape(tensor.shape).numel() == numel,
                      "[checkpoint] '", shortened(key), "' of '", path(), "' must be ", numel,
                      " elements of ", dtype);
  }

  void read(const std::string& key, int64_t offset, size_t nbytes, void* out) const override {
    const PickledTensor& tensor = tensors_.at(key);
    const int64_t size = CheckedShape(tensor.shape, item_size(tensor.dtype)).nbytes();
    TORCH_CHECK_VALUE(is_inside(offset, static_cast<int64_t>(nbytes), size), "[checkpoint] '",
                      shortened(key), "' of '", path(), "' has ", size, " bytes; expected ", nbytes,
                      " from ", offset, " on");
    if (is_same_order(tensor.shape, row_major(tensor.shape), tensor.strides))
      return file_->read_bytes_of(tensor, offset, nbytes, out);
    if (held_key_ != key) held_ = file_->read(tensor), held_key_ = key;
    std::memcpy(out, static_cast<const char*>(held_.const_data_ptr()) + offset, nbytes);
  }

  const std::string& path() const override { return file_->path(); }

 private:
  std::shared_ptr<const TorchFile> file_;
  std::map<std::string, PickledTensor> tensors_;
  // The last tensor that was not contiguous.
  mutable std::string held_key_;
  mutable at::Tensor held_;
};

// Adds a tensor that is stored whole, row by row, in a file of this name.
void add_foreign_tensor(CheckpointIndex& index, std::vector<std::string> names,
                        const std::string& dtype, std::vector<int64_t> shape,
                        const std::string& file, const std::string& key) {
  TensorRecord record =
      contiguous_record("tensor", std::move(names), std::move(shape), scalar_type_of(dtype));
  const int64_t numel = record.numel();
  if (numel > 0) record.chunks = {{file, key, Region{0, numel}}};
  index.tensors.push_back(std::move(record));
}

using Sources = std::map<std::string, std::shared_ptr<const ChunkSource>>;

OpenSource opener_of(Sources sources) {
  return [sources = std::move(sources)](const std::string& file) { return sources.at(file); };
}

ForeignFiles open_safetensors(const fs::path& path) {
  ForeignFiles files{.path = path.string(), .index = {}, .open = nullptr};
  Sources sources;
  for (ModelTensor& tensor : open_model(path)) {
    sources.emplace(tensor.file->path(), tensor.file);
    add_foreign_tensor(files.index, tensor.names, tensor.header.dtype, tensor.header.shape,
                       tensor.file->path(), tensor.header.name);
  }
  files.open = opener_of(std::move(sources));
  return files;
}

// Adds the tensors of these names; null: all. Equal views of one storage are one tied tensor.
void add_torch_file(const std::shared_ptr<const TorchFile>& file,
                    const std::set<std::string>* wanted, CheckpointIndex& index, Sources& sources) {
  std::map<PickledTensor, size_t> seen;
  std::map<std::string, PickledTensor> tensors;
  size_t found = 0;
  for (const auto& [name, tensor] : file->tensors()) {
    if (wanted && !wanted->contains(name)) continue;
    ++found;
    const auto [place, is_new] = seen.emplace(tensor, index.tensors.size());
    if (is_new) {
      tensors.emplace(name, tensor);
      add_foreign_tensor(index, {name}, tensor.dtype, tensor.shape, file->path(), name);
    } else {
      index.tensors[place->second].names.push_back(name);
    }
  }
  TORCH_CHECK_VALUE(!wanted || found == wanted->size(), "[checkpoint] '", file->path(),
                    "' lacks tensors that its index names; it has ", found, " of ",
                    wanted ? wanted->size() : 0);
  sources.emplace(file->path(), std::make_shared<TorchSource>(file, std::move(tensors)));
}

void check_twice(const CheckpointIndex& index, const fs::path& path) {
  std::set<std::string> names;
  for (const TensorRecord& record : index.tensors)
    for (const std::string& name : record.names)
      TORCH_CHECK_VALUE(names.insert(name).second, "[import_checkpoint] '", path.string(),
                        "' has '", shortened(name), "' twice");
}

ForeignFiles open_torch(const fs::path& path) {
  ForeignFiles files{.path = path.string(), .index = {}, .open = nullptr};
  Sources sources;
  if (path.string().ends_with(kTorchIndexExtension)) {
    for (const auto& [file, names] : files_of_index(path))
      add_torch_file(std::make_shared<TorchFile>(file), &names, files.index, sources);
  } else {
    add_torch_file(std::make_shared<TorchFile>(path), nullptr, files.index, sources);
  }
  check_twice(files.index, path);
  files.open = opener_of(std::move(sources));
  return files;
}

// Returns the file of a directory that has a model of `torch.save`; empty if it has safetensors
// files, or nothing.
fs::path torch_model_in(const fs::path& directory) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) return {};
  }
  for (const char* name : {kTorchModelIndex, kTorchModel})
    if (fs::exists(directory / name)) return directory / name;
  return {};
}

}  // namespace

ForeignFiles open_foreign(const fs::path& path) {
  if (fs::is_directory(path)) {
    TORCH_CHECK_VALUE(
        !fs::exists(path / kDcpMetadata), "[checkpoint] '", path.string(),
        "' is a directory of torch.distributed.checkpoint, which Python reads: make a "
        "checkpoint of it by `python -m tessera.exchange import '",
        path.string(), "' CKPT`, and load that");
    const fs::path model = torch_model_in(path);
    return model.empty() ? open_safetensors(path) : open_torch(model);
  }
  const std::string name = path.filename().string();
  if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json"))
    return open_safetensors(path);
  return open_torch(path);
}

}  // namespace tessera
