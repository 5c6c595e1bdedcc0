#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <tessera/export.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

struct ActivationCheckpointOptions {
  /// Restores the state of the random generators before the function runs again, so that it draws
  /// the same numbers. False: each checkpoint keeps one generator state less (5 kB for the CPU's);
  /// correct only for functions that draw no random numbers.
  bool preserve_random_state = true;
  /// Name of this checkpoint in error messages.
  std::string name = {};
};

/// Returns true on a thread that runs a checkpoint's function for the second time. For functions
/// with side effects, such as counting their calls.
TESSERA_API bool is_recomputing();

namespace detail {

using Tensors = std::vector<at::Tensor>;

template <class T>
constexpr bool kHoldsTensors = false;
template <>
inline constexpr bool kHoldsTensors<at::Tensor> = true;
template <>
inline constexpr bool kHoldsTensors<at::Generator> = true;
template <class T>
constexpr bool kHoldsTensors<std::optional<T>> = kHoldsTensors<T>;
template <class T>
constexpr bool kHoldsTensors<std::vector<T>> = kHoldsTensors<T>;
template <class T, size_t kSize>
constexpr bool kHoldsTensors<std::array<T, kSize>> = kHoldsTensors<T>;
template <class... Ts>
constexpr bool kHoldsTensors<std::tuple<Ts...>> = (kHoldsTensors<std::decay_t<Ts>> || ...);
template <class T, class U>
constexpr bool kHoldsTensors<std::pair<T, U>> = kHoldsTensors<T> || kHoldsTensors<U>;

/// Calls `visit` with each tensor and generator in `value`, always in the same order.
template <class Value, class Visit>
void each_tensor(Value& value, const Visit& visit) {
  using T = std::remove_const_t<Value>;
  if constexpr (!kHoldsTensors<T>) {
    return;
  } else if constexpr (std::same_as<T, at::Tensor> || std::same_as<T, at::Generator>) {
    visit(value);
  } else if constexpr (requires { value.has_value(); }) {
    if (value) each_tensor(*value, visit);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& item : value) each_tensor(item, visit);
  } else {
    std::apply([&](auto&... items) { (each_tensor(items, visit), ...); }, value);
  }
}

/// Returns the tensors in a function's result, always in the same order.
template <class Result>
Tensors tensors_of(const Result& result) {
  Tensors tensors;
  each_tensor(result, [&](const auto& item) {
    if constexpr (std::same_as<std::decay_t<decltype(item)>, at::Tensor>) tensors.push_back(item);
  });
  return tensors;
}

/// A pointer to an object with a `forward`, or a holder of a module.
template <class Fn, class... Inputs>
concept HasForward = requires(Fn& fn, Inputs&&... inputs) {
  fn->forward(std::forward<Inputs>(inputs)...);
};

/// Anything that checkpoint() can call. A const lambda that is `mutable` can't be called.
template <class Fn, class... Inputs>
concept Callable = HasForward<Fn, Inputs...> || std::invocable<Fn&, Inputs...>;

template <class Fn, class... Inputs>
auto call(Fn& fn, Inputs&&... inputs) {
  if constexpr (HasForward<Fn, Inputs...>) {
    return fn->forward(std::forward<Inputs>(inputs)...);
  } else {
    return std::invoke(fn, std::forward<Inputs>(inputs)...);
  }
}

/// A call that can be repeated: holds copies of the function and its inputs, except for the tensors
/// among the inputs; those are kept elsewhere. `Inputs` are the caller's types: with `&` for
/// lvalues.
template <class Fn, class... Inputs>
class RepeatableCall {
 public:
  RepeatableCall(const Fn& fn, const std::remove_reference_t<Inputs>&... inputs)
      : fn_(fn), inputs_(inputs...) {
    each_tensor(inputs_, [this](auto& item) { take(item); });
  }

  /// The tensors and generators that the constructor found, for the caller to move out.
  Tensors tensors;
  std::vector<at::Generator> generators;

  /// Works on fresh copies in each call: changes that the function makes to itself or its inputs
  /// are discarded.
  Tensors operator()(const Tensors& given) const {
    Fn fn = fn_;
    auto inputs = inputs_;
    size_t next = 0;
    each_tensor(inputs, [&](auto& item) {
      if constexpr (std::same_as<std::decay_t<decltype(item)>, at::Tensor>) item = given[next++];
    });
    return std::apply(
        [&](auto&... items) { return tensors_of(detail::call(fn, pass<Inputs>(items)...)); },
        inputs);
  }

 private:
  void take(at::Tensor& item) { tensors.push_back(std::exchange(item, {})); }
  void take(const at::Generator& item) { generators.push_back(item); }

  template <class Input>
  static decltype(auto) pass(std::decay_t<Input>& item) {
    if constexpr (std::is_lvalue_reference_v<Input>) {
      return (item);
    } else {
      return std::move(item);
    }
  }

  Fn fn_;
  std::tuple<std::decay_t<Inputs>...> inputs_;
};

using Rerun = std::function<Tensors(const Tensors& inputs)>;

/// Calls `run`, and then drops the tensors that autograd has saved meanwhile on this thread:
/// `rerun` makes them again. Both return the function's output tensors. If `run` throws, they stay.
/// Throws if an input was changed in place. See [Note: Recomputation] in
/// grad/activation_checkpoint.cpp.
TESSERA_API void record_checkpoint(const ActivationCheckpointOptions& options,
                                   const Tensors& inputs,
                                   const std::vector<at::Generator>& generators, Rerun rerun,
                                   const std::function<Tensors()>& run);

}  // namespace detail

/// Returns `fn(inputs...)` without keeping the tensors that autograd saves for backward: backward
/// runs `fn` a second time to recompute them. Gradients are bit-identical. Only the inputs of `fn`
/// stay in memory, at the cost of one more forward of `fn`. Not collective.
///
/// `fn` is anything that can be called with the inputs, a `ModuleHolder`, or a pointer to an object
/// with a `forward` (`std::shared_ptr` of a module). `fn` and all inputs are copied, and the copies
/// live until the backward: let lambdas capture modules by value (a holder or pointer), and no
/// local variable by reference. Inputs and results may have any types. Tensors among the inputs,
/// also within `std::vector`, `optional`, `tuple`, `pair` and `array`, must not be changed in place
/// between this call and the end of backward: backward then throws. Tensors that `fn` captures, or
/// that are within other types, get their gradients, too, but a change of them goes undetected,
/// except for parameters.
///
/// The second run of `fn` uses the random state (of the calling rank's CPU generator, of generators
/// among the inputs and of the devices of the inputs), the autocast state and the gradient mode of
/// the first run; all are restored afterwards. It must repeat the first run: if it saves or returns
/// tensors that differ in number, shape or dtype, backward throws. Other side effects of `fn`, such
/// as updates of the running averages of a BatchNorm, happen twice; `is_recomputing()` tells the
/// second run from the first.
///
/// Works with `torch::autograd::grad()`, `retain_graph`, `create_graph` (double backward), nested
/// checkpoints and every sharding level. With gradients disabled, `fn` just runs.
///
/// Throws if `fn` changes an input in place.
template <class Fn, class... Inputs>
requires detail::Callable<std::remove_reference_t<Fn>, Inputs...>
auto checkpoint(const ActivationCheckpointOptions& options, Fn&& fn, Inputs&&... inputs) {
  if (!at::GradMode::is_enabled()) return detail::call(fn, std::forward<Inputs>(inputs)...);
  auto again = std::make_shared<detail::RepeatableCall<std::decay_t<Fn>, Inputs...>>(fn, inputs...);
  const auto tensors = std::exchange(again->tensors, {});
  std::optional<decltype(detail::call(fn, std::forward<Inputs>(inputs)...))> result;
  detail::record_checkpoint(
      options, tensors, again->generators,
      [again](const detail::Tensors& given) { return (*again)(given); },
      [&] {
        result.emplace(detail::call(fn, std::forward<Inputs>(inputs)...));
        return detail::tensors_of(*result);
      });
  return *std::move(result);
}

template <class Fn, class... Inputs>
requires detail::Callable<std::remove_reference_t<Fn>, Inputs...>
auto checkpoint(Fn&& fn, Inputs&&... inputs) {
  return checkpoint(ActivationCheckpointOptions(), std::forward<Fn>(fn),
                    std::forward<Inputs>(inputs)...);
}

}  // namespace tessera
