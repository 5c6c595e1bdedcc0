// What exchange.py needs of the library: a checkpoint's tensors, one by one, in both directions.
#include <tessera/interop/exchange.h>
#include <tessera/interop/load_safetensors.h>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding.h"

namespace tessera::python {
namespace {

using Path = std::filesystem::path;
using Rule = std::tuple<std::string, std::string, std::map<std::string, std::string>>;

RenameRules rules_of(const std::vector<Rule>& rules) {
  RenameRules result;
  for (const auto& [pattern, replacement, names] : rules)
    result.push_back({pattern, replacement, names});
  return result;
}

}  // namespace

void bind_exchange(py::module_& module) {
  py::class_<CheckpointTensors>(module, "CheckpointTensors")
      .def(py::init([](const Path& path, bool with_state, const std::vector<Rule>& rename,
                       std::optional<at::ScalarType> dtype, const CheckpointProgress& progress) {
        return std::make_unique<CheckpointTensors>(
            path, with_state,
            ExportOptions{.dtype = dtype, .progress = progress, .rename = rules_of(rename)});
      }))
      .def("index", &CheckpointTensors::index)
      .def("read", &CheckpointTensors::read, Waits());
  module.def(
      "load_safetensors",
      [](const Path& path, ShardedModule& model, const std::vector<Rule>& rename,
         const std::vector<std::string>& transpose, bool allow_missing, bool allow_unexpected) {
        LoadedTensors loaded = load_safetensors(path, model,
                                                {.rename = rules_of(rename),
                                                 .transpose = transpose,
                                                 .allow_missing = allow_missing,
                                                 .allow_unexpected = allow_unexpected});
        return std::pair(std::move(loaded.missing), std::move(loaded.unexpected));
      },
      Waits());
  module.def(
      "import_tensors",
      [](const std::string& index, const std::function<at::Tensor(size_t)>& read, const Path& path,
         const std::vector<Rule>& rename, const std::vector<std::string>& transpose,
         const CheckpointProgress& progress) {
        import_tensors(index, read, path,
                       {.rename = rules_of(rename), .transpose = transpose, .progress = progress});
      },
      Waits());
}

}  // namespace tessera::python
