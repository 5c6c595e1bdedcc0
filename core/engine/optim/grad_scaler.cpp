#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/engine/grad_scaler.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/group/blocking_all_reduce.h"
#include "comm/group/progress.h"
#include "engine/model/sharded_state.h"
#include "engine/optim/segments.h"
#include "engine/optim/sharded_optimizer_access.h"
#include "engine/optim/tensor_kind.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

void check_factors(const GradScalerOptions& options) {
  TORCH_CHECK_VALUE(options.init_scale > 0, "[GradScaler] init_scale must be positive; got ",
                    options.init_scale);
  TORCH_CHECK_VALUE(options.growth_factor > 1, "[GradScaler] growth_factor must be above 1; got ",
                    options.growth_factor);
  TORCH_CHECK_VALUE(options.backoff_factor > 0 && options.backoff_factor < 1,
                    "[GradScaler] backoff_factor must be between 0 and 1; got ",
                    options.backoff_factor);
  TORCH_CHECK_VALUE(options.growth_interval > 0,
                    "[GradScaler] growth_interval must be positive; got ", options.growth_interval);
  TORCH_CHECK_VALUE(options.hysteresis > 0, "[GradScaler] hysteresis must be positive; got ",
                    options.hysteresis);
  TORCH_CHECK_VALUE(options.min_scale >= 0 && options.min_scale <= options.max_scale,
                    "[GradScaler] min_scale must be from 0 to max_scale; got ", options.min_scale,
                    " and ", options.max_scale);
}

constexpr CollectiveTag kFoundInf{"found inf", Channel::kControl};

// One call of the operator takes the gradients of one list.
using AlikeGradients = std::map<TensorKind, std::vector<at::Tensor>>;

void add_gradient(AlikeGradients& lists, const at::Tensor& part) {
  if (part.defined()) lists[kind_of(part)].push_back(part);
}

// Returns this rank's parts of the gradients that the optimizer would step with.
AlikeGradients collect_gradients(const ShardedOptimizer& optimizer, ShardedState& state) {
  AlikeGradients lists;
  for (const Segment& segment : OptimizerAccess(optimizer).segments())
    add_gradient(lists, reduced_gradient(state, segment));
  return lists;
}

// Does so for an optimizer that is not sharded.
AlikeGradients collect_gradients(const torch::optim::Optimizer& optimizer) {
  AlikeGradients lists;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) add_gradient(lists, param.grad());
  }
  TORCH_CHECK(!lists.empty(),
              "[unscale_] there must be a backward since the last zero_grad(); no parameter of the "
              "optimizer has a gradient");
  return lists;
}

// On DistTensors the operator combines the results of the ranks of its tensors' meshes: those of
// calls for other ranks are combined here.
void share_over_meshes(const AlikeGradients& lists, const at::Tensor& found_inf) {
  std::set<std::set<int>> of_calls;
  std::set<int> ranks;
  const DeviceMesh* own = nullptr;
  for (const auto& [alike, gradients] : lists) {
    std::set<int> of_call;
    for (const at::Tensor& gradient : gradients) {
      const DistMeta* const meta = find_dist_meta(gradient);
      if (!meta) continue;
      const DeviceMesh& mesh = meta->spec->mesh;
      of_call.insert(mesh.ranks().begin(), mesh.ranks().end());
      if (mesh.is_member()) own = &mesh;
    }
    ranks.insert(of_call.begin(), of_call.end());
    if (!of_call.empty()) of_calls.insert(std::move(of_call));
  }
  if (!own || of_calls.size() == 1) return;
  own->process_group_of({ranks.begin(), ranks.end()})
      ->all_reduce(found_inf, ReduceOp::kMax, kFoundInf)
      ->wait();
}

}  // namespace

struct GradScaler::Impl {
  enum class Stage : uint8_t { kReady, kUnscaled, kStepped };
  // The state of one optimizer since the last update.
  struct Progress {
    Stage stage = Stage::kReady;
    std::optional<bool> found_inf;
  };

  GradScalerOptions options;
  at::Tensor scale;                          // float, one element
  at::Tensor growth_tracker;                 // int, one element: steps without overflow
  int64_t overflows = 0;                     // since the scale last grew
  bool has_scaled = false;                   // a loss since the last update
  std::map<const void*, Progress> progress;  // by the user's optimizer

  static const void* key_of(ShardedOptimizer& optimizer) { return &optimizer.inner(); }
  static const void* key_of(torch::optim::Optimizer& optimizer) { return &optimizer; }
  void set_scale(double value) { scale = at::full({1}, value, at::kFloat); }
  // Throws, and changes nothing, for invalid values.
  template <class F>
  void change(F&& set) {
    GradScalerOptions changed = options;
    set(changed);
    check_factors(changed);
    options = changed;
  }
  void adapt(bool found);
  void check_scaled(const char* function) const;
  bool on_any_rank(const at::Tensor& found_inf) const;
  at::Tensor unscale_parts(AlikeGradients lists) const;
  bool unscale(ShardedOptimizer& optimizer);
  bool unscale(torch::optim::Optimizer& optimizer);
  template <class Optimizer>
  void unscale_once(Optimizer& optimizer);
  template <class Optimizer>
  bool step(Optimizer& optimizer);
};

// Returns one element: 1 if a gradient of this rank is not finite, else 0.
at::Tensor GradScaler::Impl::unscale_parts(AlikeGradients lists) const {
  const at::Tensor found_inf = at::zeros({1}, at::kFloat);
  const at::Tensor inverse = scale.to(at::kDouble).reciprocal().to(at::kFloat);
  for (auto& [alike, gradients] : lists) {
    const at::Device device = gradients.front().device();
    at::Tensor found_there = at::zeros({1}, found_inf.options().device(device));
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_there, inverse.to(device));
    found_inf.add_(found_there.to(found_inf.device()));
  }
  return found_inf;
}

// Returns whether a rank of the options' process group found one, if there is such a group; the
// ranks of the model have combined their results before.
bool GradScaler::Impl::on_any_rank(const at::Tensor& found_inf) const {
  if (options.process_group)
    blocking_all_reduce(*options.process_group, found_inf, ReduceOp::kMax, kFoundInf);
  return found_inf.item<float>() > 0;
}

// Returns whether any rank found a gradient that is not finite.
bool GradScaler::Impl::unscale(ShardedOptimizer& optimizer) {
  at::NoGradGuard no_grad;
  ShardedState& state = *optimizer.module().state();
  state.check_no_join("GradScaler");
  const PhaseScope phase(state.context().progress, Phase::kStep);
  TORCH_CHECK(state.reducer().any_gradient(),
              "[unscale_] there must be a backward since the last zero_grad(); no parameter of the "
              "sharded model has a gradient");
  const at::Tensor found_inf = unscale_parts(collect_gradients(optimizer, state));
  // Each rank has checked its own parts only: skipping must be agreed on.
  found_inf.fill_(state.mesh().any(found_inf.item<float>() > 0, kFoundInf));
  return on_any_rank(found_inf);
}

bool GradScaler::Impl::unscale(torch::optim::Optimizer& optimizer) {
  at::NoGradGuard no_grad;
  const AlikeGradients lists = collect_gradients(optimizer);
  const at::Tensor found_inf = unscale_parts(lists);
  share_over_meshes(lists, found_inf);
  return on_any_rank(found_inf);
}

// PyTorch's scaler notices only if no loss was ever scaled. Gradients of a scale of 1 are right.
void GradScaler::Impl::check_scaled(const char* function) const {
  if (has_scaled || scale.item<float>() == 1) return;
  throw std::runtime_error(fmt::format(
      "Attempted {} but no loss was scaled since the last update.  This may indicate your "
      "script did not use scaler.scale(loss or outputs) earlier in the iteration.",
      function));
}

template <class Optimizer>
void GradScaler::Impl::unscale_once(Optimizer& optimizer) {
  if (!options.enabled) return;
  check_scaled("unscale_");
  Progress& own = progress[key_of(optimizer)];
  if (own.stage == Stage::kUnscaled) {
    throw std::runtime_error(
        "unscale_() has already been called on this optimizer since the last update().");
  }
  if (own.stage == Stage::kStepped)
    throw std::runtime_error("unscale_() is being called after step().");
  own.found_inf = unscale(optimizer);
  own.stage = Stage::kUnscaled;
}

template <class Optimizer>
bool GradScaler::Impl::step(Optimizer& optimizer) {
  if (!options.enabled) {
    optimizer.step();
    return true;
  }
  check_scaled("step");
  Progress& own = progress[key_of(optimizer)];
  if (own.stage == Stage::kStepped)
    throw std::runtime_error("step() has already been called since the last update().");
  if (own.stage == Stage::kReady) unscale_once(optimizer);
  own.stage = Stage::kStepped;
  if (*own.found_inf) {
    if constexpr (std::is_same_v<Optimizer, ShardedOptimizer>)
      OptimizerAccess(optimizer).skip_step();
    return false;
  }
  optimizer.step();
  return true;
}

void GradScaler::Impl::adapt(bool found) {
  at::NoGradGuard no_grad;
  if (found && ++overflows < options.hysteresis) {
    growth_tracker.zero_();
    return;
  }
  at::_amp_update_scale_(scale, growth_tracker, at::full({1}, found ? 1.0 : 0.0, at::kFloat),
                         options.growth_factor, options.backoff_factor, options.growth_interval);
  scale.clamp_(options.min_scale, options.max_scale);
  if (!found && growth_tracker.item<int>() == 0) overflows = 0;
}

GradScaler::GradScaler(const GradScalerOptions& options) : impl_(new Impl{.options = options}) {
  check_factors(options);
  impl_->set_scale(options.init_scale);
  impl_->growth_tracker = at::zeros({1}, at::kInt);
}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

at::Tensor GradScaler::scale(const at::Tensor& outputs) const {
  if (!impl_->options.enabled) return outputs;
  TORCH_CHECK_VALUE(outputs.defined(),
                    "[GradScaler] outputs must be a tensor; got an undefined one");
  impl_->has_scaled = true;
  // Multiplies by a number: a tensor would be copied to a device, and the host would wait for the
  // forward. A loss of one element has the dtype that it would have by a tensor.
  const auto wider = c10::promoteTypes(outputs.scalar_type(), at::kFloat);
  return at::mul(outputs.dim() == 0 ? outputs.to(wider) : outputs, impl_->scale.item<float>());
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) const {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::unscale_(ShardedOptimizer& optimizer) { impl_->unscale_once(optimizer); }
void GradScaler::unscale_(torch::optim::Optimizer& optimizer) { impl_->unscale_once(optimizer); }

bool GradScaler::step(ShardedOptimizer& optimizer) { return impl_->step(optimizer); }
bool GradScaler::step(torch::optim::Optimizer& optimizer) { return impl_->step(optimizer); }

bool GradScaler::step(ShardedOptimizer& optimizer, const std::function<at::Tensor()>& closure) {
  if (impl_->options.enabled)
    throw std::runtime_error("Closure use is not currently supported if GradScaler is enabled.");
  optimizer.step(closure);
  return true;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!impl_->options.enabled) return;
  if (new_scale) {
    TORCH_CHECK_VALUE(*new_scale > 0, "[GradScaler] new_scale must be positive; got ", *new_scale);
    impl_->set_scale(*new_scale);
  } else {
    bool any = false, found = false;
    for (const auto& [optimizer, progress] : impl_->progress) {
      any |= progress.found_inf.has_value();
      found |= progress.found_inf.value_or(false);
    }
    if (!any) throw std::runtime_error("No inf checks were recorded prior to update.");
    impl_->adapt(found);
  }
  impl_->progress.clear();
  impl_->has_scaled = false;
}

void GradScaler::update(const at::Tensor& new_scale) {
  TORCH_CHECK_VALUE(new_scale.defined() && new_scale.numel() == 1 && !new_scale.requires_grad(),
                    "[GradScaler] new_scale must be a float or a tensor of one element that "
                    "requires no gradient");
  update(new_scale.item<double>());
}

double GradScaler::get_scale() const {
  return impl_->options.enabled ? impl_->scale.item<double>() : 1.0;
}
bool GradScaler::is_enabled() const { return impl_->options.enabled; }
const GradScalerOptions& GradScaler::options() const { return impl_->options; }

void GradScaler::set_growth_factor(double factor) {
  impl_->change([&](GradScalerOptions& options) { options.growth_factor = factor; });
}
void GradScaler::set_backoff_factor(double factor) {
  impl_->change([&](GradScalerOptions& options) { options.backoff_factor = factor; });
}
void GradScaler::set_growth_interval(int64_t steps) {
  impl_->change([&](GradScalerOptions& options) { options.growth_interval = steps; });
}

std::map<std::string, double> GradScaler::state() const {
  if (!impl_->options.enabled) return {};
  std::map<std::string, double> state = {
      {"scale", get_scale()},
      {"growth_factor", impl_->options.growth_factor},
      {"backoff_factor", impl_->options.backoff_factor},
      {"growth_interval", static_cast<double>(impl_->options.growth_interval)},
      {"_growth_tracker", impl_->growth_tracker.item<double>()}};
  // PyTorch's scaler has no hysteresis.
  if (impl_->options.hysteresis > 1)
    state["_hysteresis_tracker"] = static_cast<double>(impl_->overflows);
  return state;
}

void GradScaler::load_state(const std::map<std::string, double>& state) {
  if (!impl_->options.enabled) return;
  const auto get = [&](const char* name) {
    const auto it = state.find(name);
    TORCH_CHECK_VALUE(it != state.end(), "[GradScaler] the state must have '", name,
                      "' (was it saved from a disabled scaler?)");
    return it->second;
  };
  double scale = 0, tracker = 0;
  impl_->change([&](GradScalerOptions& options) {
    scale = get("scale");
    options.growth_factor = get("growth_factor");
    options.backoff_factor = get("backoff_factor");
    options.growth_interval = static_cast<int64_t>(get("growth_interval"));
    tracker = get("_growth_tracker");
  });
  impl_->set_scale(scale);
  impl_->growth_tracker = at::full({1}, tracker, at::kInt);
  const auto overflows = state.find("_hysteresis_tracker");
  impl_->overflows = overflows == state.end() ? 0 : static_cast<int64_t>(overflows->second);
  impl_->progress.clear();
}

}  // namespace tessera
