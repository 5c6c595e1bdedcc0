#include "engine/optim/optimizer_parameters.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>
#include <typeinfo>
#include <utility>

#include "engine/optim/foreign_state.h"
#include "engine/optim/optimizer_kinds.h"

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
        TORCH_CHECK_VALUE(name != names.end(), "[", function,
                          "] the optimizer's parameters must be the model's; ",
                          describe_unknown(model, params[i], group, i));
        const GroupOfParam first =
            seen.emplace(name->second, GroupOfParam(optimizer, group)).first->second;
        TORCH_CHECK_VALUE(first.first == optimizer, "[", function,
                          "] a parameter must be in one optimizer; '", name->second, "' is in two");
        TORCH_CHECK_VALUE(first.second == group, "[", function,
                          "] a parameter must be in one param group; '", name->second,
                          "' is in groups ", first.second, " and ", group);
      }
    }
  }
}

void check_class(const char* function, const torch::optim::Optimizer& optimizer) {
  const ForeignOptimizer* const foreign = as_foreign(optimizer);
  const bool is_lbfgs = foreign ? foreign->kind() == "LBFGS"
                                : dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(!is_lbfgs, "[", function,
                              "] the optimizer must be elementwise; got LBFGS, whose step needs "
                              "products over all parameters, which shards don't give");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !foreign || foreign->kind() != "SparseAdam", "[", function,
      "] the optimizer must take dense gradients; got SparseAdam: use Adam");
}

bool steps_elementwise(const torch::optim::Optimizer& optimizer) {
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group)
    if (!steps_elementwise(optimizer, group)) return false;
  return true;
}

bool steps_elementwise(const torch::optim::Optimizer& optimizer, size_t param_group) {
  if (const ForeignOptimizer* const foreign = as_foreign(optimizer)) return foreign->elementwise();
  bool result = false;
  with_kind(optimizer, [&](auto kind) {
    using Options = typename decltype(kind)::Options;
    result = kind.is_exactly(optimizer) && kind.steps_elementwise(static_cast<const Options&>(
                                               optimizer.param_groups()[param_group].options()));
  });
  return result;
}

bool steps_matrices(const torch::optim::Optimizer& optimizer) {
  return typeid(optimizer) == typeid(Muon);
}

bool steps_rows(const torch::optim::Optimizer& optimizer) {
  const auto* const described = find_described(optimizer);
  return described && typeid(optimizer) == *described->type && described->cut == Cut::kRows;
}

std::string ways_out_of_cuts(const torch::optim::Optimizer& optimizer) {
  const ForeignOptimizer* const foreign = as_foreign(optimizer);
  return fmt::format(
      "got a {}, which may need whole parameters. Shard them whole ({}), or, if its step treats "
      "each element by itself, declare that: elementwise = {}",
      foreign ? foreign->class_name() : c10::demangle(typeid(optimizer).name()),
      foreign ? R"(cuts=[("*", "whole")], or partition="whole_param")"
              : R"(plan.cuts = {{"*", Cut::kWhole}}, or Partition::kWholeParam)",
      foreign ? "True in its class" : "true in the options");
}

}  // namespace tessera
