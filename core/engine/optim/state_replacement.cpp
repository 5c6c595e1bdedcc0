#include "engine/optim/state_replacement.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/tensor/dist_tensor.h>

#include <map>
#include <set>
#include <string>
#include <utility>

#include "engine/grad/grad_gate.h"
#include "engine/optim/foreign_state.h"
#include "engine/optim/master_digits.h"
#include "engine/optim/optimizer_archive.h"

namespace tessera {
namespace {

using Numbers = std::vector<std::vector<int64_t>>;  // of parameters, by param group

// Keeps each number only where it occurs first.
Numbers distinct(const std::vector<OptimizerStateDict::ParamGroup>& groups) {
  Numbers result;
  std::set<int64_t> seen;
  for (const auto& group : groups) {
    auto& numbers = result.emplace_back();
    for (const int64_t number : group.params)
      if (seen.insert(number).second) numbers.push_back(number);
  }
  return result;
}

// Returns the numbers of an optimizer's parameters. With `number_again`, a repeated parameter gets
// a number without state: LibTorch's load() would look for its state again after having moved it
// out.
std::vector<OptimizerStateDict::ParamGroup> list_params(const torch::optim::Optimizer& optimizer,
                                                        bool number_again) {
  std::vector<OptimizerStateDict::ParamGroup> groups;
  std::map<const c10::TensorImpl*, int64_t> numbers;
  int64_t without_state = 0;
  for (const auto& group : optimizer.param_groups()) without_state += group.params().size();
  for (const auto& group : optimizer.param_groups()) {
    auto& params = groups.emplace_back().params;
    for (const at::Tensor& param : group.params()) {
      const auto [it, is_new] =
          numbers.emplace(param.unsafeGetTensorImpl(), static_cast<int64_t>(numbers.size()));
      params.push_back(is_new || !number_again ? it->second : without_state++);
    }
  }
  return groups;
}

// Returns the parameters by number; one that is listed again is left out.
std::vector<at::Tensor> distinct_params(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> params;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& param : group.params())
      if (seen.insert(param.unsafeGetTensorImpl()).second) params.push_back(param);
  return params;
}

void check_plain(const torch::optim::Optimizer& optimizer, const char* function) {
  for (const at::Tensor& param : distinct_params(optimizer)) {
    TORCH_CHECK_NOT_IMPLEMENTED(!is_dist(param), "[", function,
                                "] the optimizer's parameters must not be DistTensors; use "
                                "DistOptimizer::state_dict() and load_state_dict() for those");
    TORCH_CHECK_VALUE(!has_grad_gate(param), "[", function,
                      "] the optimizer must not be that of a sharded model; give its "
                      "ShardedOptimizer to full_state_dict() or load_full_state_dict()");
  }
}

}  // namespace

std::vector<int64_t> match_params(const torch::optim::Optimizer& optimizer,
                                  const OptimizerStateDict& state_dict, const char* function) {
  const Numbers wanted = distinct(list_params(optimizer, false));
  const Numbers given = distinct(state_dict.param_groups);
  TORCH_CHECK_VALUE(given.size() == wanted.size(), "[", function,
                    "] the state must have the optimizer's param groups; expected ", wanted.size(),
                    ", got ", given.size());
  std::vector<int64_t> numbers;
  for (size_t i = 0; i < wanted.size(); ++i) {
    TORCH_CHECK_VALUE(given[i].size() == wanted[i].size(), "[", function,
                      "] the state must have the optimizer's parameters; expected ",
                      wanted[i].size(), " in param group ", i, ", got ", given[i].size());
    numbers.insert(numbers.end(), given[i].begin(), given[i].end());
  }
  return numbers;
}

PreviousState::PreviousState(torch::optim::Optimizer& optimizer, const char* function)
    : optimizer_(&optimizer) {
  exchange_state();
  try {
    options_ = save_optimizer(optimizer);
    parse_optimizer(options_, function);
  } catch (...) {
    exchange_state();
    throw;
  }
}

void PreviousState::exchange_state() {
  std::swap(state_, optimizer_->state());
  ForeignOptimizer* const foreign = as_foreign(*optimizer_);
  if (!foreign) return;
  const auto earlier = std::exchange(foreign_, {});
  for (const at::Tensor& param : distinct_params(*foreign)) {
    foreign_.emplace_back(param, foreign->read_state(param));
    foreign->write_state(param, {});
  }
  for (const auto& [param, values] : earlier) foreign->write_state(param, values);
}

PreviousState::~PreviousState() {
  if (!optimizer_) return;
  exchange_state();
  try {
    load_optimizer(*optimizer_, options_);
  } catch (const std::exception& error) {
    TORCH_WARN("[load_state_dict] the options of the optimizer could not be restored: ",
               error.what());
  }
}

void set_state(torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict,
               const std::vector<int64_t>& numbers, const ConvertValuesFn& convert,
               const char* function) {
  OptimizerStateDict own{{}, list_params(optimizer, true), state_dict.extra};
  own.extra.erase(kMasterWeights);  // of the parameters; no concern of the optimizer's class
  for (size_t i = 0; i < own.param_groups.size(); ++i)
    own.param_groups[i].options = state_dict.param_groups[i].options;
  for (size_t number = 0; number < numbers.size(); ++number) {
    const auto it = state_dict.state.find(numbers[number]);
    if (it == state_dict.state.end()) continue;
    auto values = convert(static_cast<int64_t>(number), it->second);
    if (values) own.state[static_cast<int64_t>(number)] = std::move(*values);
  }
  load_optimizer(optimizer, write_optimizer(own));
  TORCH_CHECK_NOT_IMPLEMENTED(
      own.state.empty() || as_foreign(optimizer) || !optimizer.state().empty(), "[", function,
      "] the class of the optimizer must override load(), too; it has taken no state");
}

void replace_state(torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict,
                   const char* function) {
  const std::vector<at::Tensor> params = distinct_params(optimizer);
  const std::vector<int64_t> numbers = match_params(optimizer, state_dict, function);
  PreviousState previous(optimizer, function);
  const auto convert = [&](int64_t number, OptimizerStateDict::Values values) {
    for (auto& [name, value] : values) value = move_to(value, params[number]);
    return values;
  };
  set_state(optimizer, state_dict, numbers, convert, function);
  previous.drop();
}

c10::IValue move_to(const c10::IValue& value, const at::Tensor& param) {
  const at::Device device = param.device();
  if (value.isTensorList()) {  // LBFGS has some
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (at::Tensor& tensor : tensors) tensor = tensor.to(device);
    return tensors;
  }
  const bool is_count = value.isTensor() && value.toTensor().dim() == 0 && param.dim() > 0;
  return value.isTensor() && !is_count ? value.toTensor().to(device) : value;
}

OptimizerStateDict state_dict_of(const torch::optim::Optimizer& optimizer) {
  at::NoGradGuard no_grad;
  check_plain(optimizer, "state_dict_of");
  return parse_optimizer(save_optimizer(optimizer), "state_dict_of");
}

void load_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict) {
  at::NoGradGuard no_grad;
  check_plain(optimizer, "load_state_dict");
  replace_state(optimizer, state_dict, "load_state_dict");
}

}  // namespace tessera
