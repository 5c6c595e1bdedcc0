#include "optim/optimizer_parameters.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>
#include <utility>

#include "optim/foreign_state.h"

namespace tessera {
namespace {

std::string describe_unknown(const std::vector<NamedTensor>& model, const at::Tensor& param,
                             size_t group, size_t index) {
  std::string text = fmt::format("parameter {} of param group {}, of shape [{}], is not one", index,
                                 group, fmt::join(param.sizes().vec(), ", "));
  for (const NamedTensor& own : model) {
    if (own.tensor.sizes() == param.sizes())
      return text + fmt::format("; the model's '{}' has that shape", own.name);
  }
  return text;
}

}  // namespace

void check_optimized_once(const char* function, const std::vector<NamedTensor>& model,
                          const std::vector<const torch::optim::Optimizer*>& optimizers) {
  std::map<const c10::TensorImpl*, std::string> names;
  for (const NamedTensor& param : model)
    names.emplace(param.tensor.unsafeGetTensorImpl(), param.name);
  using GroupOfParam = std::pair<const torch::optim::Optimizer*, size_t>;  // and the param group
  std::map<std::string, GroupOfParam> seen;
  for (const torch::optim::Optimizer* optimizer : optimizers) {
    const auto& groups = optimizer->param_groups();
    for (size_t group = 0; group < groups.size(); ++group) {
      const auto& params = groups[group].params();
      for (size_t i = 0; i < params.size(); ++i) {
        const auto name = names.find(params[i].unsafeGetTensorImpl());
        TORCH_CHECK_VALUE(name != names.end(), "[", function, "] the optimizer's parameters must be the model's; ",
                          describe_unknown(model, params[i], group, i));
        const GroupOfParam first =
            seen.emplace(name->second, GroupOfParam(optimizer, group)).first->second;
        TORCH_CHECK_VALUE(first.first == optimizer, "[", function,
                          "] a parameter must be in one optimizer; '", name->second, "' is in two");
        TORCH_CHECK_VALUE(first.second == group, "[", function, "] a parameter must be in one param group; '",
                          name->second, "' is in groups ", first.second, " and ", group);
      }
    }
  }
}

bool steps_elementwise(const torch::optim::Optimizer& optimizer) {
  if (const ForeignOptimizer* const foreign = as_foreign(optimizer))
    return foreign->kind() != "LBFGS";
  return dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr;
}

}  // namespace tessera
