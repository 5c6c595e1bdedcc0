#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "differential/program.h"

/// How far results may be from each other whose sums or roundings have no single order: see
/// docs/design/differential.md.
namespace tessera::differential {

/// Numbers in double, with a bound of how far a computation in a narrower dtype may be from each.
struct Approximate {
  torch::Tensor value, error;
};
Approximate exact(const torch::Tensor& value);

/// One element-wise step of an optimizer (SGD, Adam, AdamW, Adagrad) from a parameter, its gradient
/// and its state.
struct StepState {
  torch::Tensor param, grad;
  torch::Tensor first, second, most;  // momentum or exp_avg; exp_avg_sq or sum; max_exp_avg_sq
  double step = 0;                    // steps before this one
};
struct StepResult {
  Approximate param, first, second, most;
};
StepResult step_approximately(const Optimizer& spec, double lr, const StepState& state);

/// Of a norm of a type, from the sum of powers in double, the elements of the largest parameter,
/// and of all.
double norm_bound(double sum, double type, int64_t most, int64_t all);

/// Of sums by messages of 8 bits.
class NarrowSums {
 public:
  NarrowSums(at::ScalarType dtype, int ranks) : is_int8_(dtype == at::kChar), lost_(ranks + 1, 0) {}
  /// What a message of rank `rank` whose largest element is `most` may be off by; the sums have the
  /// number after the last rank's. `of`: what its elements are rounded for; of bfloat16, the scale
  /// of int8 is a power of two.
  double add(size_t rank, double most, at::ScalarType of) {
    const double before = lost_[rank];
    const double part = !is_int8_ ? 16 : of == at::kBFloat16 ? 127 : 254;
    lost_[rank] = (most + before) / part * (1 + 0x1p-15);
    return before + lost_[rank];
  }

 private:
  bool is_int8_;
  std::vector<double> lost_;
};

}  // namespace tessera::differential
