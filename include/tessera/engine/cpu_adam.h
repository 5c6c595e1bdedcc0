#pragma once

#include <tessera/export.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera {

/// Options of `CPUAdam`.
///
/// As in LibTorch's own optimizers, an option that a param group leaves at its default is taken
/// from the options of the optimizer.
struct TESSERA_API CPUAdamOptions : torch::optim::OptimizerCloneableOptions<CPUAdamOptions> {
  CPUAdamOptions(double lr = 1e-3);
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(bool, bias_correction) = true;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  /// True: decoupled weight decay, as in AdamW. False: decay is added to the gradient, as in Adam.
  TORCH_ARG(bool, adamw_mode) = true;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;
};

/// State that `CPUAdam` keeps for a parameter, with the names of LibTorch's AdamW.
struct TESSERA_API CPUAdamParamState
    : torch::optim::OptimizerCloneableParamState<CPUAdamParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Adam and AdamW in one pass over memory, with state in float for parameters of any dtype.
///
/// Parameters are Float, BFloat16, Half or Double; moments are Float, and Double for Double
/// parameters. Gradients have the dtype of their parameter, or Float; those of Float parameters may
/// also be BFloat16 or Half. The step computes in the moments' dtype and rounds the parameter once.
///
/// The result for each element is bit-identical for any number of threads, any position of the
/// element in a tensor, and any sharding of the tensor. Results agree with `torch::optim::AdamW`
/// (`adamw_mode`) and `Adam` to rounding.
///
/// Steps parameters on other devices with LibTorch's fused operators (on a copy in the moments'
/// dtype if theirs differs). Steps DistTensors with the placements of their moments.
///
/// Like LibTorch's own optimizers, it works alone or in a `ShardedOptimizer`, with offload,
/// checkpoints, full state dicts, schedulers and `torch::save`.
class TESSERA_API CPUAdam : public torch::optim::Optimizer {
 public:
  /// Floats that training keeps per element of a parameter: value, gradient and two moments.
  static constexpr int num_fp32_shards_per_param = 4;

  /// Throws `c10::ValueError` for a negative rate, epsilon or decay and for betas outside [0, 1).
  explicit CPUAdam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                   CPUAdamOptions defaults = {});
  explicit CPUAdam(std::vector<at::Tensor> params, CPUAdamOptions defaults = {})
      : CPUAdam({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  /// Adds a param group. A call through a `torch::optim::Optimizer&` is LibTorch's version, and
  /// knows the options of its own classes only: there the group gets the options of the optimizer.
  /// Throws `c10::ValueError` as the constructor does.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Steps the parameters that have a gradient. Evaluates `closure` first, if given, and returns
  /// its loss.
  ///
  /// Throws, and changes nothing, `c10::Error` for a sparse gradient and `c10::NotImplementedError`
  /// for dtypes other than those above.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace tessera
