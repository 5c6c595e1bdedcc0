#pragma once

#include <tessera/engine/shard_plan.h>
#include <tessera/export.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace tessera {

/// Options of `Muon`, with the names and defaults of `torch.optim.Muon`.
///
/// As in LibTorch's own optimizers, an option that a param group leaves at its default is taken
/// from the options of the optimizer, but for `adamw`.
struct TESSERA_API MuonOptions : torch::optim::OptimizerCloneableOptions<MuonOptions> {
  MuonOptions(double lr = 1e-3);
  using coefficients_t = std::tuple<double, double, double>;
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(double, lr) = 1e-3;
  TORCH_ARG(double, weight_decay) = 0.1;  ///< decoupled, as in AdamW
  TORCH_ARG(double, momentum) = 0.95;
  TORCH_ARG(bool, nesterov) = true;
  /// The polynomial that a Newton-Schulz step applies to the singular values: a x + b x^3 + c x^5.
  TORCH_ARG(coefficients_t, ns_coefficients) = std::make_tuple(3.4445, -4.7750, 2.0315);
  TORCH_ARG(double, eps) = 1e-7;  ///< the least norm by which an update is divided
  TORCH_ARG(int64_t, ns_steps) = 5;
  /// False: a matrix of m rows and n columns is stepped with lr * sqrt(max(1, m / n)), PyTorch's
  /// `adjust_lr_fn="original"`. True: with lr * 0.2 * sqrt(max(m, n)), its "match_rms_adamw", for
  /// learning rates that were chosen for AdamW.
  TORCH_ARG(bool, match_rms_adamw) = false;

  /// True: the group is stepped by AdamW, with `lr`, `weight_decay` and these.
  TORCH_ARG(bool, adamw) = false;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  TORCH_ARG(double, adamw_eps) = 1e-8;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;
};

/// State that `Muon` keeps for a parameter: the momentum of a matrix, or the moments of AdamW.
struct TESSERA_API MuonParamState : torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer);
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Muon for the matrices of hidden layers (https://kellerjordan.github.io/posts/muon, arXiv
/// 2502.16982), and AdamW for everything else, in one optimizer.
///
/// A matrix is stepped by the orthogonalized average of its gradients; the formula is that of
/// `torch.optim.Muon`, with the same result to the bit for Float parameters; narrower ones are
/// rounded once a step. A parameter of three dims is a stack of matrices. Param groups with `adamw`
/// are stepped as by `CPUAdam`. State is Float, and Double for Double parameters.
///
/// In a `ShardedOptimizer` each matrix is orthogonalized by one rank, and the result does not
/// depend on the number of ranks. A matrix that is cut between ranks costs messages: that rank gets
/// the others' parts of the update, in bfloat16, and sends back their parts of the direction. For P
/// elements on N ranks, each rank sends 4 P (N - 1) / N^2 bytes more than another optimizer would.
/// Matrices that the plan keeps whole (`ShardPlan::cuts`, for which `muon_cuts()` has the rules)
/// cost nothing, but if they are few, ranks have unequal parts.
class TESSERA_API Muon : public torch::optim::Optimizer {
 public:
  /// Throws `c10::ValueError` for a negative rate, decay, momentum or epsilon, betas outside [0,
  /// 1), less than 0 or more than 99 steps of Newton-Schulz, and, in a group without `adamw`, a
  /// parameter that has not two or three dims.
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                MuonOptions defaults = {});
  explicit Muon(std::vector<at::Tensor> params, MuonOptions defaults = {})
      : Muon({torch::optim::OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

  /// See `CPUAdam::add_param_group`. Throws as the constructor does.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Steps the parameters that have a gradient. Evaluates `closure` first, if given, and returns
  /// its loss. Throws, and changes nothing, `c10::Error` for a sparse gradient,
  /// `c10::NotImplementedError` for a DistTensor, and in a group with `adamw` as `CPUAdam` does.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

/// Returns the param groups of a model: matrices and stacks of them, with `muon`, and the others,
/// with `adamw`. Others are vectors, parameters of more than three dims, and those whose names fit
/// one of `exceptions`: embeddings and heads, as patterns like those of `CutRule`. A tied parameter
/// is listed once, and any of its names may be an exception. A group without parameters is left
/// out.
TESSERA_API std::vector<torch::optim::OptimizerParamGroup> muon_groups(
    const torch::nn::Module& module, const std::vector<std::string>& exceptions,
    MuonOptions muon = {}, MuonOptions adamw = {});

/// Returns the rules for a plan that keep the matrices of such groups whole, and stacks together in
/// matrices; `exceptions` may be cut anywhere.
TESSERA_API std::vector<CutRule> muon_cuts(const torch::nn::Module& module,
                                           const std::vector<std::string>& exceptions);

}  // namespace tessera
