#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/foreign_optimizer.h>
#include <tessera/engine/optimizer_state_dict.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// Returns, for each parameter of the optimizer by number, the number of the parameter at the same
/// position in `state_dict`. Throws `c10::ValueError` unless there are as many param groups, with
/// as many parameters each. `function`: for messages.
std::vector<int64_t> match_params(const torch::optim::Optimizer& optimizer,
                                  const OptimizerStateDict& state_dict, const char* function);

/// Holds an optimizer's state and options while they are replaced. Unless `drop()` is called, the
/// destructor restores them.
class PreviousState {
 public:
  /// Moves the state out of the optimizer; the options stay. Throws `c10::NotImplementedError`, and
  /// changes nothing, for a class that does not override `save()`.
  PreviousState(torch::optim::Optimizer& optimizer, const char* function);
  ~PreviousState();
  PreviousState(const PreviousState&) = delete;
  PreviousState& operator=(const PreviousState&) = delete;
  void drop() { optimizer_ = nullptr; }

 private:
  void exchange_state();

  torch::optim::Optimizer* optimizer_;  // null once dropped
  std::string options_;                 // an archive without state
  std::remove_reference_t<decltype(optimizer_->state())> state_;
  std::vector<std::pair<at::Tensor, ForeignOptimizer::Values>> foreign_;  // by parameter
};

/// Returns the values for parameter `number`, made from those in the dict; nothing if it gets no
/// state.
using ConvertValuesFn = std::function<std::optional<OptimizerStateDict::Values>(
    int64_t number, const OptimizerStateDict::Values& values)>;

/// Gives an optimizer without state the state of `state_dict`, converted, and its options.
/// `numbers`: from `match_params()`.
void set_state(torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict,
               const std::vector<int64_t>& numbers, const ConvertValuesFn& convert,
               const char* function);

/// Replaces an optimizer's state and options by copies of those in `state_dict`, on the devices of
/// its parameters. If anything fails, the optimizer is unchanged.
void replace_state(torch::optim::Optimizer& optimizer, const OptimizerStateDict& state_dict,
                   const char* function);

/// Returns `value` on the device of `param`, whose state it is. A number of a parameter that has
/// dims, as a count of steps, stays on the CPU.
c10::IValue move_to(const c10::IValue& value, const at::Tensor& param);

}  // namespace tessera
