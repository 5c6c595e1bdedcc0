#include "optim/param_state.h"

#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <type_traits>
#include <utility>

#include "optim/cpu_adam_step.h"
#include "optim/optimizer_kinds.h"

namespace tessera {
namespace {

// Calls `f` with the optimizer's kind; throws if there is none.
template <class F>
void with_known_kind(const torch::optim::Optimizer& optimizer, F&& f) {
  TORCH_CHECK_NOT_IMPLEMENTED(with_kind(optimizer, f),
                              "[tessera] the state and options of an optimizer can be read and stored only for "
                              "Adagrad, Adam, AdamW, CPUAdam, RMSprop and SGD; got another class");
}

// Calls `f` with each option's name and a reference to its double or bool.
template <class F>
void visit_options(const std::string& kind_name, torch::optim::OptimizerParamGroup& group, F&& f) {
  with_kind(kind_name, [&](auto kind) {
    kind.visit_options(static_cast<typename decltype(kind)::Options&>(group.options()), f);
  });
}

}  // namespace

bool knows_state(const torch::optim::Optimizer& optimizer) {
  return with_kind(optimizer, [](auto) {});
}

ParamState read_param_state(const torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  ParamState result;
  const auto& states = optimizer.state();
  const auto it = states.find(param.unsafeGetTensorImpl());
  if (it == states.end()) return result;
  with_known_kind(optimizer, [&](auto kind) {
    kind.visit_state(
        static_cast<typename decltype(kind)::State&>(*it->second),
        [&](const char* name, const at::Tensor& tensor) {
          if (tensor.defined()) result.tensors[name] = tensor;
        },
        [&](const char* name, int64_t count) { result.counts[name] = count; });
  });
  return result;
}

void write_param_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                       const ParamState& source) {
  with_known_kind(optimizer, [&](auto kind) {
    auto state = std::make_unique<typename decltype(kind)::State>();
    kind.visit_state(
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
}

void replace_state_tensors(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                           const std::function<at::Tensor(const at::Tensor&)>& f) {
  const auto it = optimizer.state().find(param.unsafeGetTensorImpl());
  if (it == optimizer.state().end()) return;
  with_known_kind(optimizer, [&](auto kind) {
    kind.visit_state(
        static_cast<typename decltype(kind)::State&>(*it->second),
        [&](const char*, at::Tensor& tensor) {
          if (tensor.defined()) tensor = f(tensor);
        },
        [](const char*, int64_t) {});
  });
}

std::vector<std::string> state_names(const torch::optim::Optimizer& optimizer,
                                     torch::optim::OptimizerParamGroup& param_group) {
  std::vector<std::string> names;
  with_known_kind(optimizer, [&](auto kind) {
    using Options = typename decltype(kind)::Options;
    names = kind.state_names(static_cast<Options&>(param_group.options()));
  });
  return names;
}

at::ScalarType state_dtype(const torch::optim::Optimizer& optimizer, at::ScalarType param) {
  return dynamic_cast<const CPUAdam*>(&optimizer) ? moment_dtype(param) : param;
}

void make_param_state(torch::optim::Optimizer& optimizer,
                      torch::optim::OptimizerParamGroup& param_group, const at::Tensor& param) {
  if (optimizer.state().count(param.unsafeGetTensorImpl())) return;
  const auto names = state_names(optimizer, param_group);
  bool starts_with_zeros = false;
  with_known_kind(optimizer, [&](auto kind) {
    using Options = typename decltype(kind)::Options;
    starts_with_zeros = kind.starts_with_zeros(static_cast<Options&>(param_group.options()));
  });
  if (names.empty() || !starts_with_zeros) return;
  ParamState state;
  const auto options = param.options().dtype(state_dtype(optimizer, param.scalar_type()));
  for (const std::string& name : names)
    state.tensors[name] =
        at::zeros_like(param.detach(), options.requires_grad(false), at::MemoryFormat::Preserve);
  state.counts["step"] = 0;
  write_param_state(optimizer, param, state);
}

int64_t ParamState::nbytes() const {
  int64_t total = 0;
  for (const auto& [name, tensor] : tensors) total += static_cast<int64_t>(tensor.nbytes());
  return total;
}

int64_t state_nbytes(const torch::optim::Optimizer& optimizer) {
  int64_t total = 0;
  with_kind(optimizer, [&](auto kind) {
    for (const auto& entry : optimizer.state()) {
      kind.visit_state(
          static_cast<typename decltype(kind)::State&>(*entry.second),
          [&](const char*, const at::Tensor& tensor) {
            if (tensor.defined()) total += static_cast<int64_t>(tensor.nbytes());
          },
          [](const char*, int64_t) {});
    }
  });
  return total;
}

std::string optimizer_kind(const torch::optim::Optimizer& optimizer) {
  std::string name;
  with_known_kind(optimizer, [&](auto kind) { name = kind.kName; });
  return name;
}

std::map<std::string, double> read_options(const std::string& kind,
                                           torch::optim::OptimizerParamGroup& group) {
  std::map<std::string, double> values;
  visit_options(kind, group,
                [&](const char* name, auto& value) { values[name] = static_cast<double>(value); });
  return values;
}

void write_options(const std::string& kind, torch::optim::OptimizerParamGroup& group,
                   const std::map<std::string, double>& values) {
  visit_options(kind, group, [&](const char* name, auto& value) {
    const auto it = values.find(name);
    if (it != values.end())
      value = static_cast<std::remove_reference_t<decltype(value)>>(it->second);
  });
}

}  // namespace tessera
