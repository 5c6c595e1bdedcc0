#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/dist_tensor.h>
#include <tessera/optimizer_state_dict.h>
#include <torch/optim/optimizer.h>

#include <set>
#include <vector>

#include "grad/grad_gate.h"
#include "optim/optimizer_archive.h"
#include "optim/state_replacement.h"

namespace tessera {
namespace {

// Returns the parameters by number; one that is listed again is left out.
std::vector<at::Tensor> check_plain(const torch::optim::Optimizer& optimizer,
                                    const char* function) {
  std::vector<at::Tensor> params;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      TORCH_CHECK_NOT_IMPLEMENTED(!is_dist(param), "[", function,
                                  "] the optimizer's parameters must not be DistTensors; use "
                                  "DistOptimizer::state_dict() and load_state_dict() for those");
      TORCH_CHECK_VALUE(!has_grad_gate(param), "[", function,
                        "] the optimizer must not be that of a sharded model; give its ShardedOptimizer to "
                        "full_state_dict() or load_full_state_dict()");
      if (seen.insert(param.unsafeGetTensorImpl()).second) params.push_back(param);
    }
  }
  return params;
}

}  // namespace

OptimizerStateDict state_dict_of(const torch::optim::Optimizer& optimizer) {
  at::NoGradGuard no_grad;
  check_plain(optimizer, "state_dict_of");
  return parse_optimizer(save_optimizer(optimizer), "state_dict_of");
}

void load_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict) {
  at::NoGradGuard no_grad;
  constexpr const char* kFunction = "load_state_dict";
  const std::vector<at::Tensor> params = check_plain(optimizer, kFunction);
  const std::vector<int64_t> numbers = match_params(optimizer, state_dict, kFunction);
  PreviousState previous(optimizer, kFunction);
  const auto convert = [&](int64_t number, OptimizerStateDict::Values values) {
    for (auto& [name, value] : values) value = move_to(value, params[number].device());
    return values;
  };
  set_state(optimizer, state_dict, numbers, convert, kFunction);
  previous.drop();
}

}  // namespace tessera
