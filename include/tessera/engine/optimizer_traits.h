#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <tessera/engine/shard_plan.h>
#include <tessera/export.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <variant>

namespace tessera {

/// The fields of an optimizer's state for a parameter, by their names in checkpoints. A tensor may
/// be undefined: then it has not been made, and is not stored.
struct OptimizerStateFields {
  std::map<std::string, at::Tensor*> tensors = {};  ///< of the parameter's shape
  /// Tensors of other shapes, such as a moment for each row. Only with `Cut::kWhole`.
  std::map<std::string, at::Tensor*> others = {};
  std::map<std::string, int64_t*> counts = {};  ///< such as `step`
};

/// The options of a param group, by their names in checkpoints.
using OptimizerOptionFields = std::map<std::string, std::variant<double*, int64_t*, bool*>>;

/// Describes a class of optimizers of one's own, so that Tessera shards it, refuses plans that its
/// step doesn't allow, offloads its state, and stores and loads that at any number of ranks.
///
///   tessera::register_optimizer<Lamb, LambOptions, LambState>({
///       .name = "LAMB",
///       .state = [](LambState& state) -> tessera::OptimizerStateFields {
///         return {.tensors = {{"exp_avg", &state.exp_avg}}, .counts = {{"step", &state.step}}};
///       },
///       .options = [](LambOptions& options) -> tessera::OptimizerOptionFields {
///         return {{"lr", &options.lr}};
///       }});
///
/// The step must treat each parameter by itself, and leave those without a gradient alone. The
/// class needs no `save()` and `load()`; Tessera does not call them.
template <class OptimizerClass, class OptionsClass, class StateClass>
struct OptimizerTraits {
  /// The name of the class, in checkpoints and errors.
  std::string name;
  /// Where parameters may be cut: kAnywhere, if the step treats each element by itself; kRows, if
  /// it treats each row so, an index of the first dim; kWhole, nowhere.
  Cut cut = Cut::kWhole;
  /// Return the fields of an object: the same names for every object of the class.
  std::function<OptimizerStateFields(StateClass&)> state;
  std::function<OptimizerOptionFields(OptionsClass&)> options;
};

namespace detail {

struct DescribedOptimizer {
  std::string name;
  Cut cut;
  const std::type_info* type;
  std::function<bool(const torch::optim::Optimizer&)> is_one;  // or of a derived class
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make_state;
  std::function<OptimizerStateFields(torch::optim::OptimizerParamState&)> state = {};
  std::function<OptimizerOptionFields(torch::optim::OptimizerOptions&)> options = {};
};

TESSERA_API void register_optimizer(DescribedOptimizer described);

// Returns `object` as what the traits say that it is.
template <class To, class From>
To& described_as(From& object, const std::string& name) {
  To* const result = dynamic_cast<To*>(&object);
  TORCH_CHECK_VALUE(result, "[OptimizerTraits] objects of '", name,
                    "' must be of the classes that its traits name; expected a ",
                    c10::demangle(typeid(To).name()), ", got a ",
                    c10::demangle(typeid(object).name()));
  return *result;
}

}  // namespace detail

/// Adds a class to those that Tessera knows, for the rest of the process. Classes derived from it
/// have its state and options, and get whole parameters unless they are registered, too.
///
/// Throws `c10::ValueError` for a class that is known, a name that is empty or known, missing
/// functions, `Cut::kElements`, and fields of other shapes without `Cut::kWhole`.
template <class OptimizerClass, class OptionsClass, class StateClass>
void register_optimizer(OptimizerTraits<OptimizerClass, OptionsClass, StateClass> traits) {
  detail::DescribedOptimizer described{
      traits.name, traits.cut, &typeid(OptimizerClass),
      [](auto& own) { return dynamic_cast<const OptimizerClass*>(&own) != nullptr; },
      [] { return std::make_unique<StateClass>(); }};
  if (traits.state)
    described.state = [traits](auto& own) {
      return traits.state(detail::described_as<StateClass>(own, traits.name));
    };
  if (traits.options)
    described.options = [traits](auto& own) {
      return traits.options(detail::described_as<OptionsClass>(own, traits.name));
    };
  detail::register_optimizer(std::move(described));
}

}  // namespace tessera
