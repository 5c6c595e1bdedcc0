#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/parallel/pipeline.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

std::vector<DeviceMesh> stage_meshes(const DeviceMesh& mesh, int64_t mesh_dim) {
  std::vector<DeviceMesh> meshes;
  for (int64_t i = 0; i < mesh.size(mesh_dim); ++i) meshes.push_back(mesh.select(mesh_dim, i));
  return meshes;
}

std::vector<PipelineStage> cut_stages(torch::nn::SequentialImpl& model,
                                      const std::vector<std::vector<std::string>>& names) {
  std::vector<std::string> given, expected;
  bool has_empty = false;
  for (const auto& stage : names) {
    has_empty |= stage.empty();
    given.insert(given.end(), stage.begin(), stage.end());
  }
  for (const auto& child : model.named_children()) expected.push_back(child.key());
  TORCH_CHECK_VALUE(
      given == expected && !has_empty,
      "[cut_stages] each stage must have children, and all stages those of the model, each once "
      "and in their order; expected ",
      fmt::format("[{}], got [{}]", fmt::join(expected, ", "), fmt::join(names, "], [")));
  std::vector<PipelineStage> stages;
  std::map<const void*, std::pair<std::string, std::set<size_t>>> uses;  // of each parameter
  auto child = model.begin();
  for (const auto& stage : names) {
    auto module = std::make_shared<torch::nn::SequentialImpl>();
    for (const std::string& name : stage) module->push_back(name, *child++);
    for (const auto& item : module->named_parameters()) {
      auto& [name, users] = uses[item.value().unsafeGetTensorImpl()];
      if (users.empty()) name = item.key();
      users.insert(stages.size());
    }
    stages.push_back(make_stage(std::move(module)));
  }
  for (PipelineStage& stage : stages) {
    for (const at::Tensor& parameter : stage.module->parameters()) {
      const auto& [name, users] = uses[parameter.unsafeGetTensorImpl()];
      if (users.size() > 1) stage.tied[name] = parameter;
    }
  }
  return stages;
}

}  // namespace tessera
