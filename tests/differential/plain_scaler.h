#pragma once

#include <torch/torch.h>

#include <stdexcept>
#include <vector>

#include "differential/training.h"

namespace tessera::differential {

constexpr auto kNoBackward = "there must be a backward since the last zero_grad()";

/// PyTorch's GradScaler for some optimizers, with a growth interval of 2.
class PlainScaler {
 public:
  PlainScaler(double scale, size_t optimizers) : scale_(scale), progress_(optimizers) {}

  double scale() const { return scale_; }
  torch::Tensor scaled(const torch::Tensor& loss) {
    has_scaled_ = true;
    return loss * scale_;
  }
  void unscale(size_t optimizer, const std::vector<torch::Tensor>& params, bool has_gradient) {
    check_scaled();
    Progress& own = progress_[optimizer];
    if (own.is_unscaled)
      throw std::runtime_error(
          "unscale_() has already been called on this optimizer since the last update().");
    if (own.has_stepped) throw std::runtime_error("unscale_() is being called after step().");
    if (!has_gradient) throw Refused(kNoBackward);
    torch::Tensor found = torch::zeros({1}, params[0].device());
    const torch::Tensor inverse = torch::full({1}, scale_)
                                      .to(torch::kDouble)
                                      .reciprocal()
                                      .to(params[0].device(), torch::kFloat);
    for (const torch::Tensor& param : params) {
      std::vector<torch::Tensor> grads{param.grad()};
      if (grads[0].defined()) at::_amp_foreach_non_finite_check_and_unscale_(grads, found, inverse);
    }
    own = {.is_unscaled = true, .found_infinite = found.item<float>() > 0};
  }
  /// Whether to step the optimizer.
  bool begin_step(size_t optimizer, const std::vector<torch::Tensor>& params, bool has_gradient) {
    check_scaled();
    Progress& own = progress_[optimizer];
    if (own.has_stepped)
      throw std::runtime_error("step() has already been called since the last update().");
    if (!own.is_unscaled) unscale(optimizer, params, has_gradient);
    own.has_stepped = true;
    return !own.found_infinite;
  }
  void update() {
    bool found = false;
    for (const Progress& progress : progress_) found = found || progress.found_infinite;
    growth_ = found ? 0 : growth_ + 1;
    if (found) scale_ /= 2;
    if (growth_ == 2) {
      scale_ *= 2;
      growth_ = 0;
    }
    progress_.assign(progress_.size(), {});
    has_scaled_ = false;
  }
  void load(const PlainScaler& saved) {
    scale_ = saved.scale_;
    growth_ = saved.growth_;
    progress_.assign(progress_.size(), {});
  }

 private:
  struct Progress {
    bool is_unscaled = false, has_stepped = false, found_infinite = false;
  };
  // PyTorch would unscale what has the scale of an earlier step.
  void check_scaled() const {
    if (!has_scaled_ && scale_ != 1) throw Refused("no loss was scaled since the last update");
  }

  double scale_;
  int growth_ = 0;
  bool has_scaled_ = false;
  std::vector<Progress> progress_;  // by optimizer
};

}  // namespace tessera::differential
