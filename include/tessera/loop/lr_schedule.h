#pragma once

#include <tessera/export.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera {

/// Returns the factor of the initial learning rates in a step, counted from 0.
using LRFactor = std::function<double(int64_t step)>;

/// Multiplies each param group's initial learning rate by a factor of the step's number, as
/// PyTorch's scheduler of this name.
///
///     torch::optim::AdamW adamw(model->parameters(), torch::optim::AdamWOptions(3e-4));
///     ShardedOptimizer optimizer(sharded, adamw);
///     LambdaLR schedule(adamw, warmup_cosine({.warmup = 100, .steps = 2000}));
///     for (...) {
///       ...
///       optimizer.step();
///       schedule.step();
///     }
///
/// The constructor sets the rate of step 0; each `step()`, called after the optimizer's, that of
/// the next one. The initial rates are those at the time of the construction: construct the
/// schedule before a checkpoint is loaded, and pass it in `schedulers` of `SaveOptions` and
/// `LoadOptions` to restore its step. A param group that is added later has the rate with which it
/// was added as its initial one. Not collective; all ranks must do the same.
class TESSERA_API LambdaLR : public torch::optim::LRScheduler {
 public:
  /// `optimizer`: the user's, whether or not it is sharded; must outlive this.
  LambdaLR(torch::optim::Optimizer& optimizer, LRFactor factor);

 protected:
  std::vector<double> get_lrs() override;

 private:
  std::vector<double> rates_of(int64_t step);

  torch::optim::Optimizer& optimizer_;
  LRFactor factor_;
  std::vector<double> initial_;  // by param group
};

struct WarmupOptions {
  int64_t warmup = 0;       ///< steps in which the factor rises evenly to 1, from 1 / `warmup`
  int64_t steps = 0;        ///< of the whole run, warm-up included
  double final_factor = 0;  ///< in the last step, and after it
};
/// Warm-up, and then half a wave of the cosine, or a straight line, down to `final_factor`. A run
/// that is shorter than `warmup` ends in the warm-up. Throw `c10::ValueError` if `warmup` is
/// negative or `steps` is not positive.
TESSERA_API LRFactor warmup_cosine(const WarmupOptions& options);
TESSERA_API LRFactor warmup_linear(const WarmupOptions& options);
/// Warm-up, and then 1.
TESSERA_API LRFactor warmup_constant(int64_t warmup);

struct OneCycleOptions {
  int64_t steps = 0;             ///< of the whole run
  double warmup_fraction = 0.3;  ///< of the steps, in which the rate rises
  bool linear = false;           ///< straight lines in place of half waves of the cosine
  double initial_divisor = 25;   ///< the first rate is the maximum divided by this
  double final_divisor = 1e4;    ///< the last rate is the first one divided by this
  bool three_phases = false;     ///< falls to the first rate as fast as it rose, before the rest
  bool cycle_momentum = true;    ///< the momentum (Adam's first beta) falls while the rate rises
  double least_momentum = 0.85;
  double most_momentum = 0.95;
};

/// The 1cycle policy (Smith and Topin, arXiv 1708.07120) by the formulas of PyTorch's scheduler of
/// this name. The maximum is each param group's learning rate at the time of the construction.
/// After the last step, the rate stays at the final one.
///
/// Constructed, stepped, saved and loaded as a `LambdaLR`.
class TESSERA_API OneCycleLR : public torch::optim::LRScheduler {
 public:
  /// Throws `c10::ValueError` for options out of range, and if the optimizer has no momentum to
  /// cycle.
  OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleOptions& options);

 protected:
  std::vector<double> get_lrs() override;

 private:
  double interpolate(int64_t step, double first, double most, double last) const;
  std::vector<double> rates_of(int64_t step);
  void set_momentum(int64_t step);

  torch::optim::Optimizer& optimizer_;
  OneCycleOptions options_;
  std::vector<double> most_;  // by param group
};

}  // namespace tessera
