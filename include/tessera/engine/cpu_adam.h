#pragma once

#include <tessera/engine/shard_plan.h>
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
/// from the options of the optimizer, but for `state_dtype`.
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
  /// How the moments are kept; the step computes in float. An optimizer keeps its own choice when
  /// state is loaded, and converts state of another kind at the next step.
  ///
  /// - Float: as they are; for Double parameters Double.
  /// - BFloat16, 4 bytes an element: rounded stochastically, so that on average nothing is lost of
  ///   updates that are too small for the dtype. The 16 bits below those of the result get a random
  ///   number of 16 bits added, and are dropped. It is the upper half of a hash of the moment's
  ///   bits and the gradient's, both in float, and of `seed`, the step count and the moment: a
  ///   32-bit mixer (xor with a shift, times an odd number), twice. So it depends on no counter,
  ///   and not on where the element lies.
  /// - Byte, 2 + 8/256 bytes an element: in blocks of 256 elements, from the parameter's start in
  ///   the order of its memory, with one float scale each, its largest magnitude. Each element is
  ///   the nearest of the scale's multiples by the dynamic code of 8 bits (Dettmers et al., arXiv
  ///   2110.02861; the values of `create_dynamic_map()` in bitsandbytes and torchao): signed for
  ///   `exp_avg`, unsigned for `exp_avg_sq`. The step is computed with the new moments before they
  ///   are rounded. If one is not finite, all of its block become NaN. Unlike there, small
  ///   parameters have such state, too (their part on a rank does not tell their size): put those
  ///   that are to have Float into a param group of their own. The last block may be shorter.
  ///
  /// With BFloat16 and Byte, parameters must be in host memory, and not Double. With Byte, they
  /// must not be DistTensors, and blocks must not be cut between ranks: see `cpu_adam_cuts()`.
  TORCH_ARG(at::ScalarType, state_dtype) = at::kFloat;
  TORCH_ARG(int64_t, seed) = 0;  ///< of the noise with which BFloat16 moments are rounded

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
  /// Float, one element for each block of Byte moments; otherwise undefined.
  TORCH_ARG(at::Tensor, exp_avg_scale);
  TORCH_ARG(at::Tensor, exp_avg_sq_scale);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Adam and AdamW in one pass over memory, with state in float for parameters of any dtype, or in
/// fewer bits (`CPUAdamOptions::state_dtype`).
///
/// Parameters are Float, BFloat16, Half or Double; moments are Float, and Double for Double
/// parameters. Gradients have the dtype of their parameter, or Float; those of Float parameters may
/// also be BFloat16 or Half. The step computes in Float, and in Double for Double parameters, and
/// rounds the parameter once.
///
/// The result for each element is bit-identical for any number of threads, any position of the
/// element in a tensor, and any sharding of the tensor (with Byte state: between blocks). Results
/// agree with `torch::optim::AdamW`
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

  /// Throws `c10::ValueError` for a negative rate, epsilon or decay, for betas outside [0, 1), and
  /// for a `state_dtype` other than Float, BFloat16 and Byte.
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
  /// for dtypes other than those above, and for parameters that `state_dtype` is not for.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

/// Returns the rule for `ShardPlan::cuts` that keeps the blocks of Byte state together: every
/// parameter may be cut between blocks of 256 elements. Put rules for single parameters before it.
TESSERA_API std::vector<CutRule> cpu_adam_cuts();

}  // namespace tessera
