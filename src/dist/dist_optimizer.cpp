#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/dist_optimizer.h>
#include <tessera/dist_tensor.h>
#include <tessera/grad_scaler.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "dist/named_state.h"
#include "mesh/dist_meta.h"
#include "model/sharded_state.h"

namespace tessera {
namespace {

// The first mesh dim along which all parameters are replicated.
int64_t find_mesh_dim(const std::vector<NamedTensor>& params) {
  TORCH_CHECK_VALUE(!params.empty(), "[DistOptimizer] the optimizer must have parameters; it has none");
  const DeviceMesh* mesh = nullptr;
  for (const NamedTensor& param : params) {
    TORCH_CHECK_VALUE(is_dist(param.tensor), "[DistOptimizer] a level above kNone needs parameters that are "
                      "DistTensors; '", param.name, "' is an ordinary tensor");
    mesh = &mesh_of(param.tensor);
  }
  for (int64_t dim = 0; dim < mesh->ndim(); ++dim) {
    const bool fits = std::all_of(params.begin(), params.end(), [&](const NamedTensor& param) {
      const Placements& placements = placements_of(param.tensor);
      return dim < static_cast<int64_t>(placements.size()) && is_replicate(placements[dim]);
    });
    if (fits) return dim;
  }
  TORCH_CHECK_VALUE(false, "[DistOptimizer] there must be a mesh dim along which all parameters are replicated; of ",
                    mesh->to_string(), " there is none");
}

void check_options(const DistOptimizerOptions& options) {
  const bool is_sharded = options.level != ShardLevel::kNone || options.master_dtype;
  TORCH_CHECK_VALUE(!options.place_state || !is_sharded,
                    "[DistOptimizer] place_state can't be given together with a level above kNone or a master "
                    "dtype, which shard the state themselves");
  TORCH_CHECK_VALUE(!options.mesh_dim || options.level != ShardLevel::kNone,
                    "[DistOptimizer] mesh_dim needs a level above kNone; got mesh dim ", *options.mesh_dim);
}

}  // namespace

struct DistOptimizer::Impl {
  torch::optim::Optimizer* optimizer;
  DistOptimizerOptions options;
  std::vector<NamedTensor> params;
  std::optional<ShardedOptimizer> sharded;
  std::set<const c10::TensorImpl*> placed;  // parameters whose state has been placed
  bool has_stepped = false;

  void shard();
  void place_state();
  void after_step();
};

// Shards the optimizer as fully_shard does, but on parameters that have no module.
void DistOptimizer::Impl::shard() {
  ShardPlan plan{.level = options.level, .start_values = StartValues::kKeep};
  plan.precision.master_dtype = options.master_dtype;
  if (options.level == ShardLevel::kNone) {
    plan.process_group = single_process_group();
  } else {
    plan.mesh_dim = options.mesh_dim ? *options.mesh_dim : find_mesh_dim(params);
  }
  sharded.emplace(ShardedModule(ShardedState::create(params, {}, plan)), *optimizer);
}

void DistOptimizer::Impl::place_state() {
  place_optimizer_state(*optimizer, options.place_state, placed);
}

void DistOptimizer::Impl::after_step() {
  has_stepped = true;
  // SGD with dampening makes state in its steps. Without a function it is placed as the parameters
  // are.
  if (options.place_state) place_state();
}

DistOptimizer::DistOptimizer(torch::optim::Optimizer& optimizer, DistOptimizerOptions options)
    : impl_(new Impl{.optimizer = &optimizer,
                     .options = std::move(options),
                     .params = named_parameters(optimizer)}) {
  check_options(impl_->options);
  if (impl_->options.level != ShardLevel::kNone || impl_->options.master_dtype) {
    impl_->shard();
  } else {
    if (impl_->options.place_state) make_optimizer_state(optimizer);
    impl_->place_state();
  }
}

DistOptimizer::~DistOptimizer() = default;
DistOptimizer::DistOptimizer(DistOptimizer&&) noexcept = default;
DistOptimizer& DistOptimizer::operator=(DistOptimizer&&) noexcept = default;

void DistOptimizer::step() {
  impl_->sharded ? impl_->sharded->step() : (void)impl_->optimizer->step();
  impl_->after_step();
}

void DistOptimizer::zero_grad() {
  impl_->sharded ? impl_->sharded->zero_grad() : impl_->optimizer->zero_grad();
}

double DistOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  if (impl_->sharded) return impl_->sharded->clip_grad_norm_(max_norm, norm_type);
  std::vector<at::Tensor> params;
  for (const NamedTensor& param : impl_->params) params.push_back(param.tensor);
  return torch::nn::utils::clip_grad_norm_(params, max_norm, norm_type);
}

std::map<std::string, at::Tensor> DistOptimizer::state_dict() {
  at::NoGradGuard no_grad;
  if (impl_->sharded) return sharded_state_dict(*impl_->sharded, impl_->params);
  if (!impl_->has_stepped) {
    for (const NamedTensor& param : impl_->params)
      TORCH_CHECK_VALUE(!param.tensor.grad().defined(), "[state_dict] before the first step the gradient should be "
                        "None; '", param.name, "' has one: call zero_grad()");
    make_optimizer_state(*impl_->optimizer);
    impl_->place_state();
  }
  return placed_state_dict(*impl_->optimizer, impl_->params);
}

void DistOptimizer::load_state_dict(const std::map<std::string, at::Tensor>& state) {
  at::NoGradGuard no_grad;
  const auto own = state_dict();
  std::vector<std::string> errors;
  for (const auto& [name, tensor] : own) {
    const auto it = state.find(name);
    if (it == state.end()) {
      errors.push_back(fmt::format("'{}' is missing", name));
    } else if (!it->second.defined() || it->second.sizes() != tensor.sizes()) {
      errors.push_back(
          fmt::format("'{}' must have sizes [{}]", name, fmt::join(tensor.sizes(), ", ")));
    }
  }
  for (const auto& [name, tensor] : state) {
    if (!own.contains(name)) errors.push_back(fmt::format("'{}' is unknown", name));
  }
  TORCH_CHECK_VALUE(errors.empty(), "[load_state_dict] the state must be that of the optimizer; ",
                    fmt::format("{}", fmt::join(errors, ", ")));
  if (impl_->sharded) {
    load_sharded_state(*impl_->sharded, impl_->params, state);
  } else {
    load_placed_state(*impl_->optimizer, impl_->params, state);
  }
  impl_->has_stepped = true;
}

torch::optim::Optimizer& DistOptimizer::inner() const { return *impl_->optimizer; }

ShardedOptimizer* DistOptimizer::sharded() const {
  return impl_->sharded ? &*impl_->sharded : nullptr;
}

bool DistOptimizer::step(GradScaler& scaler) {
  const bool stepped =
      impl_->sharded ? scaler.step(*impl_->sharded) : scaler.step(*impl_->optimizer);
  if (stepped) impl_->after_step();
  return stepped;
}

void DistOptimizer::unscale_(GradScaler& scaler) {
  impl_->sharded ? scaler.unscale_(*impl_->sharded) : scaler.unscale_(*impl_->optimizer);
}

}  // namespace tessera
