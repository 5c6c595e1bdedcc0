#include "optim/param_state.h"

#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <tessera/cpu_adam.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <type_traits>
#include <utility>

#include "optim/adam_step.h"

namespace tessera {
namespace {

using torch::optim::AdagradParamState;
using torch::optim::AdamParamState;
using torch::optim::AdamWParamState;
using torch::optim::RMSpropParamState;
using torch::optim::SGDParamState;

// The fields of each kind of state. `tensor` and `count` are called with a name and a reference.
template <class State, class Tensor, class Count>
void visit_adam(State& state, Tensor&& tensor, Count&& count) {
  tensor("exp_avg", state.exp_avg());
  tensor("exp_avg_sq", state.exp_avg_sq());
  tensor("max_exp_avg_sq", state.max_exp_avg_sq());
  count("step", state.step());
}
template <class Tensor, class Count>
void visit(AdamParamState& state, Tensor&& tensor, Count&& count) {
  visit_adam(state, tensor, count);
}
template <class Tensor, class Count>
void visit(AdamWParamState& state, Tensor&& tensor, Count&& count) {
  visit_adam(state, tensor, count);
}
template <class Tensor, class Count>
void visit(CPUAdamParamState& state, Tensor&& tensor, Count&& count) {
  tensor("exp_avg", state.exp_avg());
  tensor("exp_avg_sq", state.exp_avg_sq());
  count("step", state.step());
}
template <class Tensor, class Count>
void visit(SGDParamState& state, Tensor&& tensor, Count&&) {
  tensor("momentum_buffer", state.momentum_buffer());
}
template <class Tensor, class Count>
void visit(AdagradParamState& state, Tensor&& tensor, Count&& count) {
  tensor("sum", state.sum());
  count("step", state.step());
}
template <class Tensor, class Count>
void visit(RMSpropParamState& state, Tensor&& tensor, Count&& count) {
  tensor("square_avg", state.square_avg());
  tensor("momentum_buffer", state.momentum_buffer());
  tensor("grad_avg", state.grad_avg());
  count("step", state.step());
}

// Calls `f` with a null pointer of the state's type; false if the optimizer is of another kind.
template <class F>
bool with_state_type(const torch::optim::Optimizer& optimizer, F&& f) {
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer))
    return f((AdamWParamState*)nullptr), true;
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer)) return f((AdamParamState*)nullptr), true;
  if (dynamic_cast<const CPUAdam*>(&optimizer)) return f((CPUAdamParamState*)nullptr), true;
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) return f((SGDParamState*)nullptr), true;
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer))
    return f((AdagradParamState*)nullptr), true;
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer))
    return f((RMSpropParamState*)nullptr), true;
  return false;
}

[[noreturn]] void refuse_unknown_kind() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "[tessera] the optimizer's state can be read only for Adagrad, Adam, AdamW, "
                              "CPUAdam, RMSprop and SGD; got another class");
}

}  // namespace

bool knows_state(const torch::optim::Optimizer& optimizer) {
  return with_state_type(optimizer, [](auto*) {});
}

ParamState read_param_state(const torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  ParamState result;
  const auto& states = optimizer.state();
  const auto it = states.find(param.unsafeGetTensorImpl());
  if (it == states.end()) return result;
  const bool known = with_state_type(optimizer, [&](auto* type) {
    using State = std::remove_pointer_t<decltype(type)>;
    visit(
        static_cast<State&>(*it->second),
        [&](const char* name, const at::Tensor& tensor) {
          if (tensor.defined()) result.tensors[name] = tensor;
        },
        [&](const char* name, int64_t count) { result.counts[name] = count; });
  });
  if (!known) refuse_unknown_kind();
  return result;
}

void write_param_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                       const ParamState& source) {
  const bool known = with_state_type(optimizer, [&](auto* type) {
    using State = std::remove_pointer_t<decltype(type)>;
    auto state = std::make_unique<State>();
    visit(
        *state,
        [&](const char* name, at::Tensor& tensor) {
          const auto it = source.tensors.find(name);
          if (it != source.tensors.end()) tensor = it->second;
        },
        [&](const char* name, int64_t& count) {
          const auto it = source.counts.find(name);
          if (it != source.counts.end()) count = it->second;
        });
    optimizer.state()[param.unsafeGetTensorImpl()] = std::move(state);
  });
  if (!known) refuse_unknown_kind();
}

std::vector<std::string> state_names(const torch::optim::Optimizer& optimizer,
                                     torch::optim::OptimizerParamGroup& param_group) {
  using namespace torch::optim;
  auto& options = param_group.options();
  const auto adam_names = [](bool amsgrad) {
    std::vector<std::string> names{"exp_avg", "exp_avg_sq"};
    if (amsgrad) names.emplace_back("max_exp_avg_sq");
    return names;
  };
  if (dynamic_cast<const AdamW*>(&optimizer))
    return adam_names(static_cast<AdamWOptions&>(options).amsgrad());
  if (dynamic_cast<const Adam*>(&optimizer))
    return adam_names(static_cast<AdamOptions&>(options).amsgrad());
  if (dynamic_cast<const CPUAdam*>(&optimizer)) return adam_names(false);
  if (dynamic_cast<const SGD*>(&optimizer)) {
    if (static_cast<SGDOptions&>(options).momentum() == 0) return {};
    return {"momentum_buffer"};
  }
  if (dynamic_cast<const Adagrad*>(&optimizer)) return {"sum"};
  if (dynamic_cast<const RMSprop*>(&optimizer)) {
    auto& rms = static_cast<RMSpropOptions&>(options);
    std::vector<std::string> names{"square_avg"};
    if (rms.momentum() > 0) names.emplace_back("momentum_buffer");
    if (rms.centered()) names.emplace_back("grad_avg");
    return names;
  }
  refuse_unknown_kind();
}

at::ScalarType state_dtype(const torch::optim::Optimizer& optimizer, at::ScalarType param) {
  return dynamic_cast<const CPUAdam*>(&optimizer) ? moment_dtype(param) : param;
}

void make_param_state(torch::optim::Optimizer& optimizer,
                      torch::optim::OptimizerParamGroup& param_group, const at::Tensor& param) {
  if (optimizer.state().count(param.unsafeGetTensorImpl())) return;
  const auto names = state_names(optimizer, param_group);
  auto* const sgd = dynamic_cast<torch::optim::SGDOptions*>(&param_group.options());
  if (names.empty() || (sgd && sgd->dampening() != 0)) return;
  ParamState state;
  const auto options = param.options().dtype(state_dtype(optimizer, param.scalar_type()));
  for (const std::string& name : names)
    state.tensors[name] =
        at::zeros_like(param.detach(), options.requires_grad(false), at::MemoryFormat::Preserve);
  state.counts["step"] = 0;
  write_param_state(optimizer, param, state);
}

int64_t state_nbytes(const torch::optim::Optimizer& optimizer) {
  int64_t total = 0;
  with_state_type(optimizer, [&](auto* type) {
    using State = std::remove_pointer_t<decltype(type)>;
    for (const auto& entry : optimizer.state()) {
      visit(
          static_cast<State&>(*entry.second),
          [&](const char*, const at::Tensor& tensor) {
            if (tensor.defined()) total += static_cast<int64_t>(tensor.nbytes());
          },
          [](const char*, int64_t) {});
    }
  });
  return total;
}

}  // namespace tessera
