#include "engine/optim/param_state.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <c10/util/accumulate.h>

#include <type_traits>
#include <typeinfo>
#include <utility>

#include "engine/optim/foreign_state.h"
#include "engine/optim/optimizer_kinds.h"
#include "engine/optim/state_shape.h"

namespace tessera {
namespace {

// Calls `f` with the optimizer's kind; throws if there is none.
template <class F>
void with_known_kind(const torch::optim::Optimizer& optimizer, F&& f) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      with_kind(optimizer, f),
      "[tessera] the state and options of an optimizer can be read and stored only for Adagrad, "
      "Adam, AdamW, CPUAdam, Muon, RMSprop and SGD, and classes that register_optimizer() has "
      "described; got a ",
      c10::demangle(typeid(optimizer).name()));
}

template <class Options>
Options default_options() {
  if constexpr (std::is_default_constructible_v<Options>) {
    return Options();
  } else {
    return Options(/*lr=*/0);
  }
}

template <class Kind, class Options>
void set_options(Kind kind, Options& options, const std::map<std::string, double>& values) {
  kind.visit_options(options, [&](const char* name, auto& value) {
    const auto it = values.find(name);
    if (it != values.end())
      value = static_cast<std::remove_reference_t<decltype(value)>>(it->second);
  });
}

// Calls `f(kind, options)` with the kind and the options of a param group; throws if there is none.
template <class F>
void with_options(const torch::optim::Optimizer& optimizer,
                  torch::optim::OptimizerParamGroup& param_group, F&& f) {
  const auto call = [&](auto kind) {
    f(kind, static_cast<typename decltype(kind)::Options&>(param_group.options()));
  };
  const ForeignOptimizer* const foreign = as_foreign(optimizer);
  if (!foreign) return with_known_kind(optimizer, call);
  const auto numbers = foreign_options(*foreign, &param_group - optimizer.param_groups().data());
  const bool is_known = with_kind(foreign->kind(), [&](auto kind) {
    auto options = default_options<typename decltype(kind)::Options>();
    set_options(kind, options, numbers);
    f(kind, options);
  });
  TORCH_CHECK_NOT_IMPLEMENTED(is_known,
                              "[tessera] which tensors an optimizer will make is known only for "
                              "Adagrad, Adam, AdamW, Muon, RMSprop and SGD; got ",
                              foreign->kind());
}

}  // namespace

bool knows_state(const torch::optim::Optimizer& optimizer) {
  return as_foreign(optimizer) || with_kind(optimizer, [](auto) {});
}

void check_counts(const torch::optim::Optimizer& optimizer,
                  const std::map<std::string, double>& counts) {
  const bool any = as_foreign(optimizer);
  for (const auto& [name, count] : counts)
    TORCH_CHECK_VALUE((any && name != "step") || (is_whole(count) && count >= 0), "[tessera] '",
                      name, "' in the state of this optimizer must be a whole number; got ", count);
}

ParamState read_param_state(const torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  if (const auto* foreign = as_foreign(optimizer)) return foreign_param_state(*foreign, param);
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
        [&](const char* name, int64_t count) { result.counts[name] = static_cast<double>(count); });
  });
  return result;
}

void write_param_state(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                       const ParamState& source) {
  check_counts(optimizer, source.counts);
  if (auto* foreign = as_foreign(optimizer)) return foreign->write_state(param, values_of(source));
  with_known_kind(optimizer, [&](auto kind) {
    auto state = kind.make_state();
    kind.visit_state(
        *state,
        [&](const char* name, at::Tensor& tensor) {
          const auto it = source.tensors.find(name);
          if (it != source.tensors.end()) tensor = it->second;
        },
        [&](const char* name, int64_t& count) {
          const auto it = source.counts.find(name);
          if (it != source.counts.end()) count = static_cast<int64_t>(it->second);
        });
    optimizer.state()[param.unsafeGetTensorImpl()] = std::move(state);
  });
}

void move_param_state(torch::optim::Optimizer& optimizer, const at::Tensor& from,
                      const at::Tensor& to) {
  if (auto* foreign = as_foreign(optimizer)) {
    const auto values = foreign->read_state(from);
    foreign->write_state(from, {});
    return foreign->write_state(to, values);
  }
  auto& states = optimizer.state();
  const auto it = states.find(from.unsafeGetTensorImpl());
  if (it == states.end()) return;
  auto own = std::move(it->second);
  states.erase(it);
  states[to.unsafeGetTensorImpl()] = std::move(own);
}

void erase_param_state(torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  if (auto* foreign = as_foreign(optimizer)) return foreign->write_state(param, {});
  optimizer.state().erase(param.unsafeGetTensorImpl());
}

void erase_state(torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& param : group.params()) erase_param_state(optimizer, param);
  optimizer.state().clear();
}

bool has_param_state(const torch::optim::Optimizer& optimizer, const at::Tensor& param) {
  if (const auto* foreign = as_foreign(optimizer)) return !foreign->read_state(param).empty();
  return optimizer.state().count(param.unsafeGetTensorImpl()) > 0;
}

void replace_state_tensors(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                           const std::function<at::Tensor(const at::Tensor&)>& f) {
  if (auto* foreign = as_foreign(optimizer)) {
    ParamState state = foreign_param_state(*foreign, param);
    if (state.tensors.empty()) return;
    for (auto& [name, tensor] : state.tensors) tensor = f(tensor);
    return foreign->write_state(param, values_of(state));
  }
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

int64_t StateTensor::nbytes() const {
  return c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
}

std::vector<StateTensor> state_tensors(const torch::optim::Optimizer& optimizer,
                                       torch::optim::OptimizerParamGroup& param_group,
                                       at::ScalarType param, at::IntArrayRef sizes) {
  std::vector<StateTensor> tensors;
  with_options(optimizer, param_group, [&](auto kind, auto& options) {
    for (const std::string& name : kind.state_names(options))
      tensors.push_back({name, is_scale(name) ? at::kFloat : kind.state_dtype(options, param),
                         state_sizes(name, sizes)});
  });
  return tensors;
}

OtherShapes other_shapes(const torch::optim::Optimizer& optimizer) {
  OtherShapes result;
  if (const auto* foreign = as_foreign(optimizer)) {
    result.any = !foreign->elementwise() && !with_kind(foreign->kind(), [](auto) {});
  } else if (const auto* described = find_described(optimizer)) {
    for (const auto& [name, tensor] : described->state(*described->make_state()).others)
      result.names.insert(name);
  }
  return result;
}

at::ScalarType state_dtype(const torch::optim::Optimizer& optimizer,
                           torch::optim::OptimizerParamGroup& param_group, at::ScalarType param) {
  const ForeignOptimizer* const foreign = as_foreign(optimizer);
  const auto nothing = [](auto) {};
  const bool is_known =
      foreign ? with_kind(foreign->kind(), nothing) : with_kind(optimizer, nothing);
  if (!is_known) return param;
  at::ScalarType result = param;
  with_options(optimizer, param_group,
               [&](auto kind, auto& options) { result = kind.state_dtype(options, param); });
  return result;
}

void make_param_state(torch::optim::Optimizer& optimizer,
                      torch::optim::OptimizerParamGroup& param_group, const at::Tensor& param) {
  if (has_param_state(optimizer, param)) return;
  const auto tensors = state_tensors(optimizer, param_group, param.scalar_type(), param.sizes());
  bool starts_with_zeros = false;
  with_options(optimizer, param_group, [&](auto kind, auto& options) {
    starts_with_zeros = kind.starts_with_zeros(options);
  });
  if (tensors.empty() || !starts_with_zeros) return;
  ParamState state;
  for (const StateTensor& tensor : tensors) {
    const auto options = param.options().dtype(tensor.dtype).requires_grad(false);
    state.tensors[tensor.name] =
        is_scale(tensor.name) ? at::zeros(tensor.sizes, options)
                              : at::zeros_like(param.detach(), options, at::MemoryFormat::Preserve);
  }
  state.counts["step"] = 0;
  write_param_state(optimizer, param, state);
}

int64_t ParamState::nbytes() const {
  int64_t total = 0;
  for (const auto& [name, tensor] : tensors) total += static_cast<int64_t>(tensor.nbytes());
  return total;
}

int64_t state_nbytes(const torch::optim::Optimizer& optimizer) {
  if (const auto* foreign = as_foreign(optimizer)) return foreign_state_nbytes(*foreign);
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
  if (const auto* foreign = as_foreign(optimizer)) return foreign->kind();
  std::string name;
  with_known_kind(optimizer, [&](auto kind) { name = kind.kName; });
  return name;
}

std::map<std::string, double> read_options(torch::optim::Optimizer& optimizer, size_t param_group) {
  if (const auto* foreign = as_foreign(optimizer)) return foreign_options(*foreign, param_group);
  return read_options(optimizer, optimizer.param_groups()[param_group]);
}

std::map<std::string, double> read_options(const torch::optim::Optimizer& kind_of,
                                           torch::optim::OptimizerParamGroup& param_group) {
  std::map<std::string, double> values;
  with_options(kind_of, param_group, [&](auto kind, auto& options) {
    kind.visit_options(
        options, [&](const char* name, auto& value) { values[name] = static_cast<double>(value); });
  });
  return values;
}

std::map<std::string, double> step_options(torch::optim::Optimizer& optimizer, size_t param_group) {
  if (knows_state(optimizer)) return read_options(optimizer, param_group);
  const auto lr = learning_rate(optimizer, param_group);
  return lr ? std::map<std::string, double>{{"lr", *lr}} : std::map<std::string, double>();
}

void write_options(torch::optim::Optimizer& optimizer, size_t param_group,
                   const std::map<std::string, double>& values) {
  if (auto* foreign = as_foreign(optimizer))
    return set_foreign_options(*foreign, param_group, values);
  write_options(optimizer, optimizer.param_groups()[param_group], values);
}

void write_options(const torch::optim::Optimizer& kind_of,
                   torch::optim::OptimizerParamGroup& param_group,
                   const std::map<std::string, double>& values) {
  with_options(kind_of, param_group,
               [&](auto kind, auto& options) { set_options(kind, options, values); });
}

std::optional<double> learning_rate(const torch::optim::Optimizer& optimizer, size_t param_group) {
  if (const auto* foreign = as_foreign(optimizer)) {
    const auto numbers = foreign_options(*foreign, param_group);
    const auto it = numbers.find("lr");
    return it == numbers.end() ? std::nullopt : std::optional(it->second);
  }
  try {
    return optimizer.param_groups()[param_group].options().get_lr();
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

void set_learning_rate(torch::optim::Optimizer& optimizer, size_t param_group, double lr) {
  if (auto* foreign = as_foreign(optimizer))
    return set_foreign_options(*foreign, param_group, {{"lr", lr}});
  if (learning_rate(optimizer, param_group))
    optimizer.param_groups()[param_group].options().set_lr(lr);
}

}  // namespace tessera
