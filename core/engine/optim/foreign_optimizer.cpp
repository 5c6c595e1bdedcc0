#include <c10/util/Exception.h>
#include <tessera/engine/foreign_optimizer.h>

#include <map>
#include <memory>

#include "engine/optim/foreign_state.h"
#include "engine/optim/optimizer_archive.h"
#include "engine/optim/param_state.h"
#include "engine/optim/state_shape.h"

namespace tessera {
namespace {

struct NoOptions : torch::optim::OptimizerCloneableOptions<NoOptions> {};

std::vector<torch::optim::OptimizerParamGroup> make_groups(
    const std::vector<std::vector<at::Tensor>>& param_groups) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& params : param_groups)
    groups.emplace_back(params, std::make_unique<NoOptions>());
  return groups;
}

bool is_count(const std::string& name, const c10::IValue& value, const at::Tensor& param) {
  if (value.isInt() || value.isBool() || value.isDouble()) return true;
  // A parameter may have a single element, too.
  return value.isTensor() && value.toTensor().numel() == 1 && !is_scale(name) &&
         (name == "step" || value.toTensor().sizes() != param.sizes());
}

double to_number(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().item<double>() : value.toScalar().toDouble();
}

}  // namespace

ForeignOptimizer::ForeignOptimizer(const std::vector<std::vector<at::Tensor>>& param_groups)
    : Optimizer(make_groups(param_groups), std::make_unique<NoOptions>()) {}

void ForeignOptimizer::save(torch::serialize::OutputArchive& archive) const {
  save_values(
      archive, *this, [&](const at::Tensor& param) { return read_state(param); },
      [&](size_t group) { return read_options(group); });
}

void ForeignOptimizer::load(torch::serialize::InputArchive& archive) {
  load_values(
      archive, *this,
      [&](const at::Tensor& param, const Values& values) { write_state(param, values); },
      [&](size_t group, Values values) {
        if (kind() == "CPUAdam") values.erase(kStateDtype);
        write_options(group, values);
      });
}

const ForeignOptimizer* as_foreign(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const ForeignOptimizer*>(&optimizer);
}
ForeignOptimizer* as_foreign(torch::optim::Optimizer& optimizer) {
  return dynamic_cast<ForeignOptimizer*>(&optimizer);
}

ParamState foreign_param_state(const ForeignOptimizer& optimizer, const at::Tensor& param) {
  ParamState state;
  for (const auto& [name, value] : optimizer.read_state(param)) {
    if (value.isNone()) continue;
    if (is_count(name, value, param)) {
      state.counts[name] = to_number(value);
      continue;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(value.isTensor(),
                                "[tessera] an optimizer's state must consist of tensors and counts "
                                "to be stored in a checkpoint or offloaded; '",
                                name, "' is a ", value.tagKind());
    state.tensors[name] = value.toTensor();
  }
  return state;
}

int64_t foreign_state_nbytes(const ForeignOptimizer& optimizer) {
  int64_t total = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      for (const auto& [name, value] : optimizer.read_state(param)) {
        if (value.isTensor() && !is_count(name, value, param))
          total += static_cast<int64_t>(value.toTensor().nbytes());
      }
    }
  }
  return total;
}

ForeignOptimizer::Values values_of(const ParamState& state) {
  ForeignOptimizer::Values values;
  for (const auto& [name, tensor] : state.tensors) values[name] = tensor;
  for (const auto& [name, count] : state.counts) {
    if (is_whole(count)) {
      values[name] = static_cast<int64_t>(count);
    } else {
      values[name] = count;
    }
  }
  return values;
}

std::map<std::string, double> foreign_options(const ForeignOptimizer& optimizer, size_t group) {
  std::map<std::string, double> numbers;
  for (const auto& [name, value] : optimizer.read_options(group)) {
    if (value.isDouble() || value.isInt() || value.isBool()) {
      numbers[name] = value.toScalar().toDouble();
    } else if (value.isTensor() && value.toTensor().numel() == 1) {
      numbers[name] = value.toTensor().item<double>();
    } else if (name == "betas" && value.isDoubleList()) {
      const auto betas = value.toDoubleVector();
      for (size_t i = 0; i < betas.size(); ++i) numbers["beta" + std::to_string(i + 1)] = betas[i];
    }
  }
  return numbers;
}

void set_foreign_options(ForeignOptimizer& optimizer, size_t group,
                         const std::map<std::string, double>& numbers) {
  ForeignOptimizer::Values values;
  for (const auto& [name, value] : optimizer.read_options(group)) {
    const auto it = numbers.find(name);
    if (name == "betas" && value.isDoubleList()) {
      auto betas = value.toDoubleVector();
      for (size_t i = 0; i < betas.size(); ++i) {
        const auto beta = numbers.find("beta" + std::to_string(i + 1));
        if (beta != numbers.end()) betas[i] = beta->second;
      }
      values[name] = betas;
    } else if (it == numbers.end()) {
      continue;
    } else if (value.isBool()) {
      values[name] = it->second != 0;
    } else if (value.isInt()) {
      values[name] = static_cast<int64_t>(it->second);
    } else {
      values[name] = it->second;
    }
  }
  optimizer.write_options(group, values);
}

}  // namespace tessera
