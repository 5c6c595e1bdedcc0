#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint_files.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "checkpoint/directory.h"
#include "checkpoint/model_files.h"
#include "checkpoint/model_view.h"
#include "checkpoint/shortened.h"
#include "checkpoint/single_process.h"
#include "checkpoint/torch_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// A tensor of a file that another program wrote.
struct Source {
  std::vector<std::string> names;
  std::string dtype;
  std::vector<int64_t> shape;
  std::function<at::Tensor()> read;  // contiguous
};

void add_torch(const fs::path& path, std::vector<Source>& sources) {
  const auto file = std::make_shared<TorchFile>(path);
  // Equal views of one storage are one tied tensor.
  using View =
      std::tuple<std::string, std::string, int64_t, std::vector<int64_t>, std::vector<int64_t>>;
  std::map<View, size_t> seen;
  std::set<std::string> names;
  for (const auto& [name, tensor] : file->tensors()) {
    TORCH_CHECK_VALUE(names.insert(name).second, "[import_checkpoint] '", path.string(), "' has '",
                      shortened(name), "' twice");
    const View view{tensor.storage, tensor.dtype, tensor.offset, tensor.shape, tensor.strides};
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

void add_model(const fs::path& path, std::vector<Source>& sources) {
  TORCH_CHECK_VALUE(!fs::exists(readable_checkpoint(path) / kIndexFile), "[import_checkpoint] '", path.string(),
                    "' is a checkpoint already: reshard_checkpoint() and export_checkpoint() make "
                    "something else of it");
  for (ModelTensor& tensor : open_model(path)) {
    sources.push_back({tensor.names, tensor.header.dtype, tensor.header.shape,
                       [tensor] { return tensor.read(); }});
  }
}

std::vector<Source> open_sources(const fs::path& path) {
  std::vector<Source> sources;
  const bool is_model = fs::is_directory(path) || path.extension() == ".safetensors";
  is_model ? add_model(path, sources) : add_torch(path, sources);
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
