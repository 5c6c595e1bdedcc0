#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <tessera/engine/muon.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/optim/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "engine/optim/cpu_adam_step.h"
#include "engine/optim/muon_step.h"
#include "engine/optim/optimizer_parameters.h"
#include "engine/unit/placement.h"

namespace tessera {
namespace {

using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

void check_options(const MuonOptions& options) {
  const auto check = [](const char* name, double value) {
    TORCH_CHECK_VALUE(value >= 0, "[Muon] ", name, " must not be negative; got ", value);
  };
  check("lr", options.lr());
  check("weight_decay", options.weight_decay());
  check("momentum", options.momentum());
  check("eps", options.eps());
  check("adamw_eps", options.adamw_eps());
  const auto [beta1, beta2] = options.betas();
  TORCH_CHECK_VALUE(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1,
                    "[Muon] betas must be in [0, 1); got ", beta1, " and ", beta2);
  TORCH_CHECK_VALUE(options.ns_steps() >= 0 && options.ns_steps() < 100,
                    "[Muon] ns_steps must be from 0 to 99; got ", options.ns_steps());
}

void check_params(const OptimizerParamGroup& group, const MuonOptions& options) {
  if (options.adamw()) return;
  for (const at::Tensor& param : group.params()) {
    TORCH_CHECK_VALUE(param.dim() == 2 || param.dim() == 3,
                      "Muon only supports 2D parameters, and stacks of them, whereas we found a "
                      "parameter with size: ",
                      param.sizes(),
                      ". Put it into a param group with adamw, as muon_groups() does");
    TORCH_CHECK(!param.is_complex(), "Muon does not support complex parameters");
  }
}

// Returns the options of a group, with the optimizer's defaults filled in.
std::unique_ptr<MuonOptions> group_options(const OptimizerParamGroup& group,
                                           const MuonOptions& defaults) {
  if (!group.has_options()) return std::make_unique<MuonOptions>(defaults);
  const MuonOptions initial;
  auto own = std::make_unique<MuonOptions>(static_cast<const MuonOptions&>(group.options()));
  if (own->lr() == initial.lr()) own->lr(defaults.lr());
  if (own->weight_decay() == initial.weight_decay()) own->weight_decay(defaults.weight_decay());
  if (own->momentum() == initial.momentum()) own->momentum(defaults.momentum());
  if (own->nesterov() == initial.nesterov()) own->nesterov(defaults.nesterov());
  if (own->ns_coefficients() == initial.ns_coefficients())
    own->ns_coefficients(defaults.ns_coefficients());
  if (own->eps() == initial.eps()) own->eps(defaults.eps());
  if (own->ns_steps() == initial.ns_steps()) own->ns_steps(defaults.ns_steps());
  if (own->match_rms_adamw() == initial.match_rms_adamw())
    own->match_rms_adamw(defaults.match_rms_adamw());
  if (own->betas() == initial.betas()) own->betas(defaults.betas());
  if (own->adamw_eps() == initial.adamw_eps()) own->adamw_eps(defaults.adamw_eps());
  return own;
}

at::Tensor zeros_for(const at::Tensor& param) {
  return at::zeros_like(param.detach(), moment_dtype(param.scalar_type()));
}

MuonParamState& muon_state_of(torch::optim::Optimizer& optimizer, const at::Tensor& param,
                              bool adamw) {
  auto& own = optimizer.state()[param.unsafeGetTensorImpl()];
  if (!own) own = std::make_unique<MuonParamState>();
  auto& state = static_cast<MuonParamState&>(*own);
  if (adamw && !state.exp_avg().defined()) {
    state.exp_avg(zeros_for(param));
    state.exp_avg_sq(zeros_for(param));
  }
  if (!adamw && !state.momentum_buffer().defined()) state.momentum_buffer(zeros_for(param));
  return state;
}

void step_matrix(const MuonOptions& options, const at::Tensor& param, const at::Tensor& grad,
                 const at::Tensor& buffer) {
  muon_descend(options, param.size(0), param.size(1), param,
               orthogonalized(muon_update(options, grad, buffer), options));
}

void check_gradients(const OptimizerParamGroup& group) {
  const bool adamw = static_cast<const MuonOptions&>(group.options()).adamw();
  for (const at::Tensor& param : group.params()) {
    if (!param.grad().defined()) continue;
    TORCH_CHECK(!param.grad().is_sparse(), "Muon does not support sparse gradients");
    TORCH_CHECK_NOT_IMPLEMENTED(!is_dist(param),
                                "[Muon] a DistTensor can't be stepped: shard the "
                                "model, or use AdamW");
    if (adamw) check_adam_gradient(param);
  }
}

struct MuonParam {
  std::string name;
  at::Tensor param;
  bool is_matrix;
};

// Returns each parameter once, by its first name; none of its names may be an exception.
std::vector<MuonParam> list_params(const torch::nn::Module& module,
                                   const std::vector<std::string>& exceptions) {
  std::vector<MuonParam> params;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& param = item.value();
    const bool is_matrix = takes_muon(item.key(), param.dim(), exceptions);
    const auto known =
        std::ranges::find_if(params, [&](auto& it) { return it.param.is_same(param); });
    if (known == params.end()) {
      params.push_back({item.key(), param, is_matrix});
    } else {
      known->is_matrix = known->is_matrix && is_matrix;
    }
  }
  return params;
}

}  // namespace

at::Tensor muon_update(const MuonOptions& options, const at::Tensor& grad,
                       const at::Tensor& buffer) {
  buffer.lerp_(grad, 1 - options.momentum());
  return options.nesterov() ? grad.lerp(buffer, options.momentum()) : buffer;
}

at::Tensor orthogonalized(const at::Tensor& update, const MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients();
  const bool is_tall = update.size(0) > update.size(1);
  at::Tensor x = update.to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/true);
  if (is_tall) x = x.t();
  x.div_(x.norm().clamp_min(options.eps()));  // no singular value is above 1
  for (int64_t i = 0; i < options.ns_steps(); ++i) {
    const at::Tensor gram = at::mm(x, x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a);
  }
  return is_tall ? x.t() : x;
}

void muon_descend(const MuonOptions& options, int64_t rows, int64_t columns,
                  const at::Tensor& param, const at::Tensor& direction) {
  const auto m = static_cast<double>(rows), n = static_cast<double>(columns);
  const double rate =
      options.match_rms_adamw() ? 0.2 * std::sqrt(std::max(m, n)) : std::sqrt(std::max(1.0, m / n));
  // Kernels of narrow dtypes round differently in vectors and at their ends: a part would show
  // that.
  const bool is_narrow = c10::isReducedFloatingType(param.scalar_type());
  const at::Tensor wide = is_narrow ? param.to(at::kFloat) : param;
  wide.mul_(1 - options.lr() * options.weight_decay());
  wide.add_(direction, -options.lr() * rate);
  if (is_narrow) param.copy_(wide);
}

at::Tensor muon_buffer(Muon& optimizer, const at::Tensor& param) {
  return muon_state_of(optimizer, param, /*adamw=*/false).momentum_buffer();
}

void check_muon_gradients(const Muon& optimizer) {
  for (const OptimizerParamGroup& group : optimizer.param_groups()) check_gradients(group);
}

void step_muon_group(Muon& optimizer, const OptimizerParamGroup& group,
                     const std::set<const c10::TensorImpl*>& others) {
  const auto& options = static_cast<const MuonOptions&>(group.options());
  const CPUAdamOptions adamw = CPUAdamOptions(options.lr())
                                   .betas(options.betas())
                                   .eps(options.adamw_eps())
                                   .weight_decay(options.weight_decay());
  std::vector<AdamParam> elsewhere;
  for (const at::Tensor& param : group.params()) {
    if (others.contains(param.unsafeGetTensorImpl()) || !param.grad().defined() ||
        param.numel() == 0)
      continue;
    MuonParamState& state = muon_state_of(optimizer, param, options.adamw());
    if (options.adamw()) {
      state.step(state.step() + 1);
      const AdamParam own{param, param.grad(), state.exp_avg(), state.exp_avg_sq(), state.step()};
      param.is_cpu() ? step_on_host(adamw, own) : elsewhere.push_back(own);
      continue;
    }
    const at::Tensor &buffer = state.momentum_buffer(),
                     grad = param.grad().to(buffer.scalar_type());
    if (param.dim() == 2) {
      step_matrix(options, param, grad, buffer);
    } else {
      for (int64_t i = 0; i < param.size(0); ++i)
        step_matrix(options, param[i], grad[i], buffer[i]);
    }
  }
  if (!elsewhere.empty()) step_by_operators(adamw, elsewhere);
}

bool takes_muon(const std::string& name, int64_t dims, const std::vector<std::string>& exceptions) {
  if (dims != 2 && dims != 3) return false;
  return std::ranges::none_of(exceptions, [&](auto& it) { return fits_pattern(it, name); });
}

MuonOptions::MuonOptions(double lr) : lr_(lr) {}
double MuonOptions::get_lr() const { return lr(); }
void MuonOptions::set_lr(double lr) { this->lr(lr); }

void MuonOptions::serialize(OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_coefficients);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(ns_steps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(match_rms_adamw);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(adamw);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(adamw_eps);
}
void MuonOptions::serialize(InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(coefficients_t, ns_coefficients);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, ns_steps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, match_rms_adamw);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, adamw);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, adamw_eps);
}

void MuonParamState::serialize(OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum_buffer);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
}
void MuonParamState::serialize(InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, momentum_buffer);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_sq);
}

Muon::Muon(const std::vector<OptimizerParamGroup>& param_groups, MuonOptions defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(), std::make_unique<MuonOptions>(defaults)) {
  check_options(defaults);
  for (const OptimizerParamGroup& group : param_groups) add_param_group(group);
}

void Muon::add_param_group(const OptimizerParamGroup& param_group) {
  auto options = group_options(param_group, static_cast<const MuonOptions&>(*defaults_));
  check_options(*options);
  check_params(param_group, *options);
  Optimizer::add_param_group(param_group);
  param_groups_.back().set_options(std::move(options));
}

at::Tensor Muon::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  step_muon(*this, {});
  return loss;
}

void Muon::save(OutputArchive& archive) const {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}
void Muon::load(InputArchive& archive) {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

std::vector<OptimizerParamGroup> muon_groups(const torch::nn::Module& module,
                                             const std::vector<std::string>& exceptions,
                                             MuonOptions muon, MuonOptions adamw) {
  std::vector<at::Tensor> matrices, others;
  for (const auto& [name, param, is_matrix] : list_params(module, exceptions))
    (is_matrix ? matrices : others).push_back(param);
  std::vector<OptimizerParamGroup> groups;
  if (!matrices.empty())
    groups.emplace_back(matrices, std::make_unique<MuonOptions>(muon.adamw(false)));
  if (!others.empty())
    groups.emplace_back(others, std::make_unique<MuonOptions>(adamw.adamw(true)));
  return groups;
}

std::vector<CutRule> muon_cuts(const torch::nn::Module& module,
                               const std::vector<std::string>& exceptions) {
  std::vector<CutRule> rules;
  for (const auto& [name, param, is_matrix] : list_params(module, exceptions))
    if (is_matrix) rules.push_back({name, param.dim() == 2 ? Cut::kWhole : Cut::kRows});
  return rules;
}

}  // namespace tessera
