#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/parallel/dist_optimizer.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/group/blocking_all_reduce.h"
#include "engine/model/sharded_state.h"
#include "engine/optim/described_optimizer.h"
#include "engine/optim/param_state.h"
#include "engine/optim/sharded_optimizer_access.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

using StateDict = std::map<std::string, at::Tensor>;

constexpr const char* kLearningRates = "LR_Scheduler";
constexpr const char* kMasterWeightsPrefix = "master_weights.";

template <class F>
void for_each_param(torch::optim::Optimizer& optimizer, F&& f) {
  for (auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) f(group, param);
  }
}

at::Tensor learning_rates(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i)
    rates.push_back(learning_rate(optimizer, i).value_or(0));
  return at::tensor(at::ArrayRef<double>(rates), at::kDouble);
}

void set_learning_rates(torch::optim::Optimizer& optimizer, const at::Tensor& rates) {
  const at::Tensor values = (is_dist(rates) ? full_tensor(rates) : rates).to(at::kDouble);
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i)
    set_learning_rate(optimizer, i, values.select(0, static_cast<int64_t>(i)).item<double>());
}

// A count as a tensor on the mesh of `param`, if that is a DistTensor.
at::Tensor count_tensor(const std::string& name, double count, const at::Tensor& param) {
  const at::Tensor value = at::full({1}, count, name == "step" ? at::kLong : at::kDouble);
  return is_dist(param) ? distribute(value, mesh_of(param), {}) : value;
}

double count_of(const at::Tensor& tensor) {
  return (is_dist(tensor) ? full_tensor(tensor) : tensor).item<double>();
}

// `value`, placed as `like`.
at::Tensor placed_like(const at::Tensor& value, const at::Tensor& like) {
  if (!is_dist(like)) return (is_dist(value) ? full_tensor(value) : value).to(like.scalar_type());
  const at::Tensor typed = value.to(like.scalar_type());
  return is_dist(typed) ? redistribute(typed, mesh_of(like), placements_of(like))
                        : distribute(typed, mesh_of(like), placements_of(like));
}

// A parameter of a sharded optimizer, and this rank's segment of it.
struct ShardedParam {
  const std::string& name;
  const Unit& unit;
  const ParamSlot& slot;
  const Segment& segment;
};

template <class F>
void for_each_sharded(ShardedOptimizer& optimizer, const std::vector<NamedTensor>& params, F&& f) {
  const ShardedState& state = *optimizer.module().state();
  for (const NamedTensor& param : params) {
    const ParamIndex place = *state.find(param.tensor);
    for (const Segment& segment : OptimizerAccess(optimizer).segments()) {
      if (segment.place.unit != place.unit || segment.place.slot != place.slot) continue;
      f(ShardedParam{param.name, *state.units()[place.unit], state.slot(place), segment});
    }
  }
}

// Gathers a tensor like the parameter, of which the ranks of the shard dim hold a part each.
at::Tensor gather_part(const ShardedParam& param, const at::Tensor& part, at::ScalarType dtype) {
  const at::Tensor flat = at::zeros({param.slot.numel}, at::device(param.slot.device).dtype(dtype));
  const int64_t begin = param.segment.begin - param.slot.offset;
  if (part.defined())
    flat.narrow(0, begin, part.numel()).copy_(at::as_strided(part, {part.numel()}, {1}));
  if (param.unit.layout().level != ShardLevel::kNone)
    param.unit.context()
        .mesh.shard()
        .all_reduce(flat, ReduceOp::kSum, {param.name, Channel::kControl})
        ->wait();
  const at::Tensor local = at::as_strided(flat, param.slot.sizes, param.slot.strides);
  if (!param.slot.dist) return local;
  const DistSlot& dist = *param.slot.dist;
  return make_dist(local, dist.spec, dist.sizes, dist.strides);
}

// This rank's part of `value`, in the shape in which the optimizer holds it; undefined if it has
// none.
at::Tensor cut_part(const ShardedParam& param, const at::Tensor& value) {
  at::Tensor local = value;
  // Collective: also on ranks without a part.
  if (!is_dist(value)) {
    local = local_value(param.slot, value);
  } else if (param.slot.dist) {
    const DistSpec& spec = *param.slot.dist->spec;
    local = local_of(redistribute(value, spec.mesh, spec.placements));
  } else {
    local = full_tensor(value);
  }
  const Segment& segment = param.segment;
  if (!segment.tensor.defined()) return {};
  const at::Tensor part =
      flat_in_order(local, param.slot.strides)
          .narrow(0, segment.begin - param.slot.offset, segment.end - segment.begin);
  return at::as_strided(part.clone(), segment.tensor.sizes(), segment.tensor.strides());
}

// The highest count on any rank: ranks without a part of the parameter have no count.
double agree_on_count(ProcessGroup& process_group, double count) {
  const at::Tensor most = at::full({1}, count, at::kDouble);
  blocking_all_reduce(process_group, most, ReduceOp::kMax, {"optimizer state", Channel::kControl});
  return most.item<double>();
}

// The optimizer's parameters in the order of its param groups, with the names that
// `distribute_module` gave them; others are `param 0`, `param 1`, ... by their position.
std::vector<NamedTensor> named_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<NamedTensor> params;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      const DistMeta* const meta = find_dist_meta(param);
      const bool is_named = meta && meta->parameter && !meta->parameter->name.empty();
      params.push_back(
          {is_named ? meta->parameter->name : fmt::format("param {}", params.size()), param});
    }
  }
  return params;
}

// Creates the state that the first step would create, filled with zeros, where there is none.
void make_optimizer_state(torch::optim::Optimizer& optimizer) {
  at::NoGradGuard no_grad;
  for_each_param(optimizer, [&](auto& group, const at::Tensor& param) {
    if (param.numel() > 0) make_param_state(optimizer, group, param);
  });
}

// Makes DistTensors of the state of DistTensor parameters, and places it by `place` if that is
// given. `placed`: parameters whose state has been placed; they are skipped, and parameters that
// have state are added. On failure nothing is changed.
void place_optimizer_state(torch::optim::Optimizer& optimizer, const StatePlacementFn& place,
                           std::set<const c10::TensorImpl*>& placed) {
  // An optimizer of another kind makes its state itself, by operators on its parameters.
  if (!place && !knows_state(optimizer)) return;
  at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, ParamState>> changed;
  for_each_param(optimizer, [&](auto& group, const at::Tensor& param) {
    if (!is_dist(param) || placed.contains(param.unsafeGetTensorImpl())) return;
    ParamState state = read_param_state(optimizer, param);
    for (auto& [name, tensor] : state.tensors) {
      if (!is_dist(tensor)) tensor = distribute(tensor, mesh_of(param), placements_of(param));
      if (!place) continue;
      const auto sizes = tensor.sizes().vec();
      tensor = place(name, param, tensor);
      TORCH_CHECK_VALUE(
          tensor.defined() && is_dist(tensor) && tensor.sizes() == at::IntArrayRef(sizes),
          "[DistOptimizer] place_state must return a DistTensor of the state's sizes; expected ",
          at::IntArrayRef(sizes), " for '", name, "', got ",
          !tensor.defined() ? "an undefined tensor"
          : is_dist(tensor) ? describe(tensor)
                            : "an ordinary tensor");
    }
    if (!state.tensors.empty()) changed.emplace_back(param, std::move(state));
  });
  for (const auto& [param, state] : changed) {
    write_param_state(optimizer, param, state);
    placed.insert(param.unsafeGetTensorImpl());
  }
}

StateDict placed_state_dict(torch::optim::Optimizer& optimizer,
                            const std::vector<NamedTensor>& params) {
  StateDict dict{{kLearningRates, learning_rates(optimizer)}};
  for (const NamedTensor& param : params) {
    const ParamState state = read_param_state(optimizer, param.tensor);
    for (const auto& [name, tensor] : state.tensors) dict[param.name + "." + name] = tensor;
    for (const auto& [name, count] : state.counts)
      dict[param.name + "." + name] = count_tensor(name, count, param.tensor);
  }
  return dict;
}

void load_placed_state(torch::optim::Optimizer& optimizer, const std::vector<NamedTensor>& params,
                       const StateDict& dict) {
  for (const NamedTensor& param : params) {
    ParamState state = read_param_state(optimizer, param.tensor);
    for (auto& [name, tensor] : state.tensors)
      tensor = placed_like(dict.at(param.name + "." + name), tensor).clone();
    for (auto& [name, count] : state.counts) count = count_of(dict.at(param.name + "." + name));
    if (!state.tensors.empty() || !state.counts.empty())
      write_param_state(optimizer, param.tensor, state);
  }
  set_learning_rates(optimizer, dict.at(kLearningRates));
}

// A state dict has one count of a parameter in shards.
void check_counts(const torch::optim::Optimizer& optimizer) {
  const auto* const traits = find_described(optimizer);
  if (!traits) return;
  for (const auto& [name, count] : traits->state(*traits->make_state()).counts)
    TORCH_CHECK_NOT_IMPLEMENTED(name == "step",
                                "[DistOptimizer] a state dict has the count 'step' alone; a ",
                                traits->name, " has '", name, "'");
}

StateDict sharded_state_dict(ShardedOptimizer& optimizer, const std::vector<NamedTensor>& params) {
  torch::optim::Optimizer& inner = optimizer.inner();
  check_counts(inner);
  make_optimizer_state(inner);
  StateDict dict{{kLearningRates, learning_rates(inner)}};
  for_each_sharded(optimizer, params, [&](const ShardedParam& param) {
    const at::Tensor& part = param.segment.tensor;
    const ParamState state = part.defined() ? read_param_state(inner, part) : ParamState();
    auto& group = inner.param_groups()[param.segment.param_group];
    const at::ScalarType master_dtype = param.unit.layout().master_dtype;
    for (const StateTensor& tensor : state_tensors(inner, group, master_dtype, {})) {
      const auto it = state.tensors.find(tensor.name);
      dict[param.name + "." + tensor.name] =
          gather_part(param, it == state.tensors.end() ? at::Tensor() : it->second, tensor.dtype);
    }
    const auto step = state.counts.find("step");
    const double count = agree_on_count(param.unit.context().mesh.shard(),
                                        step == state.counts.end() ? -1 : step->second);
    if (count >= 0) dict[param.name + ".step"] = count_tensor("step", count, param.slot.tensor());
    if (param.unit.master().exists())
      dict[kMasterWeightsPrefix + param.name] = gather_part(param, part, master_dtype);
  });
  return dict;
}

void load_sharded_state(ShardedOptimizer& optimizer, const std::vector<NamedTensor>& params,
                        const StateDict& dict) {
  torch::optim::Optimizer& inner = optimizer.inner();
  check_counts(inner);
  std::vector<std::pair<at::Tensor, at::Tensor>> masters;  // and their new values
  for_each_sharded(optimizer, params, [&](const ShardedParam& param) {
    const at::Tensor& part = param.segment.tensor;
    const at::ScalarType master_dtype = param.unit.layout().master_dtype;
    const auto cut = [&](const std::string& name, at::ScalarType dtype) {
      return cut_part(param, dict.at(name).to(dtype));
    };
    ParamState state;
    auto& group = inner.param_groups()[param.segment.param_group];
    for (const StateTensor& tensor : state_tensors(inner, group, master_dtype, {}))
      state.tensors[tensor.name] = cut(param.name + "." + tensor.name, tensor.dtype);
    const auto step = dict.find(param.name + ".step");
    if (step != dict.end()) state.counts["step"] = count_of(step->second);
    if (part.defined()) write_param_state(inner, part, state);
    if (param.unit.master().exists()) {
      const at::Tensor value = cut(kMasterWeightsPrefix + param.name, master_dtype);
      if (part.defined()) masters.emplace_back(part, value);
    }
  });
  if (!masters.empty()) {
    optimizer.module().state()->overwrite([&] {
      for (const auto& [part, value] : masters) part.copy_(value);
    });
  }
  set_learning_rates(inner, dict.at(kLearningRates));
}

// The first mesh dim along which all parameters are replicated.
int64_t find_mesh_dim(const std::vector<NamedTensor>& params) {
  TORCH_CHECK_VALUE(!params.empty(),
                    "[DistOptimizer] the optimizer must have parameters; it has none");
  const DeviceMesh* mesh = nullptr;
  for (const NamedTensor& param : params) {
    TORCH_CHECK_VALUE(
        is_dist(param.tensor),
        "[DistOptimizer] a level above kNone needs parameters that are DistTensors; '", param.name,
        "' is an ordinary tensor");
    mesh = &mesh_of(param.tensor);
  }
  for (int64_t dim = 0; dim < mesh->ndim(); ++dim) {
    const bool fits = std::ranges::all_of(params, [&](const NamedTensor& param) {
      const Placements& placements = placements_of(param.tensor);
      return dim < static_cast<int64_t>(placements.size()) && is_replicate(placements[dim]);
    });
    if (fits) return dim;
  }
  TORCH_CHECK_VALUE(
      false,
      "[DistOptimizer] there must be a mesh dim along which all parameters are replicated; of ",
      mesh->to_string(), " there is none");
}

void check_options(const DistOptimizerOptions& options) {
  const bool is_sharded = options.level != ShardLevel::kNone || options.master_dtype;
  TORCH_CHECK_VALUE(!options.place_state || !is_sharded,
                    "[DistOptimizer] place_state can't be given together with a level above kNone "
                    "or a master dtype, which shard the state themselves");
  TORCH_CHECK_VALUE(!options.mesh_dim || options.level != ShardLevel::kNone,
                    "[DistOptimizer] mesh_dim needs a level above kNone; got mesh dim ",
                    *options.mesh_dim);
}

}  // namespace

// Shards the optimizer as fully_shard does, but on parameters that have no module.
void DistOptimizer::shard() {
  ShardPlan plan{.level = options_.level, .start_values = StartValues::kKeep};
  plan.precision.master_dtype = options_.master_dtype;
  if (options_.level == ShardLevel::kNone) {
    plan.process_group = single_process_group();
  } else {
    plan.mesh_dim = options_.mesh_dim ? *options_.mesh_dim : find_mesh_dim(params_);
  }
  sharded_ = std::make_unique<ShardedOptimizer>(
      ShardedModule(ShardedState::create(params_, {}, plan)), *optimizer_,
      ShardedOptimizerOptions{.elementwise = options_.elementwise});
}

void DistOptimizer::place_state() {
  place_optimizer_state(*optimizer_, options_.place_state, placed_);
}

void DistOptimizer::after_step() {
  has_stepped_ = true;
  // SGD with dampening makes state in its steps. Without a function it is placed as the parameters
  // are.
  if (options_.place_state) place_state();
}

DistOptimizer::DistOptimizer(torch::optim::Optimizer& optimizer, DistOptimizerOptions options)
    : optimizer_(&optimizer), options_(std::move(options)), params_(named_parameters(optimizer)) {
  check_options(options_);
  if (options_.level != ShardLevel::kNone || options_.master_dtype) {
    shard();
  } else {
    if (options_.place_state) make_optimizer_state(optimizer);
    place_state();
  }
}

void DistOptimizer::step() {
  sharded_ ? sharded_->step() : (void)optimizer_->step();
  after_step();
}

namespace {

// The norm of all gradients, the same on all ranks of the meshes: the first rank of each mesh tells
// the others that mesh's norm.
double norm_over_meshes(const std::vector<at::Tensor>& params,
                        const std::vector<const DeviceMesh*>& meshes, double order) {
  std::set<int> ranks;
  for (const DeviceMesh* mesh : meshes) ranks.insert(mesh->ranks().begin(), mesh->ranks().end());
  const auto count = static_cast<int64_t>(meshes.size());
  at::Tensor norms = at::zeros({count + 1}, at::kDouble);
  for (int64_t m = 0; m <= count; ++m) {
    const DeviceMesh* const mesh = m < count ? meshes[m] : nullptr;  // the last: ordinary tensors
    if (mesh && !mesh->is_member()) continue;
    std::vector<at::Tensor> own;
    for (const at::Tensor& param : params) {
      const bool is_here =
          mesh ? is_dist(param) && find_dist_meta(param)->spec->mesh == *mesh : !is_dist(param);
      if (is_here && param.grad().defined())
        own.push_back(at::linalg_vector_norm(param.grad(), order).to(at::kDouble));
    }
    if (own.empty()) continue;
    const at::Tensor norm = at::linalg_vector_norm(at::stack(own), order);
    const at::Tensor whole = mesh ? full_tensor(norm) : norm;
    const bool tells =
        !mesh || std::ranges::all_of(*mesh->coordinate(), [](int64_t at) { return at == 0; });
    if (tells) norms[m].copy_(whole);
  }
  at::Tensor shared = norms.narrow(0, 0, count);
  meshes[0]
      ->process_group_of({ranks.begin(), ranks.end()})
      ->all_reduce(shared, ReduceOp::kSum, {"norms of meshes"})
      ->wait();
  return at::linalg_vector_norm(norms, order).item<double>();
}

}  // namespace

void DistOptimizer::zero_grad() { sharded_ ? sharded_->zero_grad() : optimizer_->zero_grad(); }

double DistOptimizer::clip_grad_norm_(double max_norm, double norm_type) {
  if (sharded_) return sharded_->clip_grad_norm_(max_norm, norm_type);
  std::vector<at::Tensor> params;
  std::vector<const DeviceMesh*> meshes;
  for (const NamedTensor& param : params_) {
    params.push_back(param.tensor);
    if (!is_dist(param.tensor) || !param.tensor.grad().defined()) continue;
    const DeviceMesh& mesh = find_dist_meta(param.tensor)->spec->mesh;
    if (std::ranges::none_of(meshes, [&](const DeviceMesh* each) { return *each == mesh; }))
      meshes.push_back(&mesh);
  }
  if (meshes.size() < 2) return torch::nn::utils::clip_grad_norm_(params, max_norm, norm_type);
  at::NoGradGuard no_grad;
  const double norm = norm_over_meshes(params, meshes, norm_type);
  const double factor = max_norm / (norm + 1e-6);
  for (const at::Tensor& param : params)
    if (param.grad().defined() && !(factor >= 1)) param.grad().mul_(factor);
  return norm;
}

std::map<std::string, at::Tensor> DistOptimizer::state_dict() {
  at::NoGradGuard no_grad;
  if (sharded_) return sharded_state_dict(*sharded_, params_);
  if (!has_stepped_) {
    for (const NamedTensor& param : params_)
      TORCH_CHECK_VALUE(!param.tensor.grad().defined(),
                        "[state_dict] before the first step the gradient should be None; '",
                        param.name, "' has one: call zero_grad()");
    make_optimizer_state(*optimizer_);
    place_state();
  }
  return placed_state_dict(*optimizer_, params_);
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
  if (sharded_) {
    load_sharded_state(*sharded_, params_, state);
  } else {
    load_placed_state(*optimizer_, params_, state);
  }
  has_stepped_ = true;
}

bool DistOptimizer::step(GradScaler& scaler) {
  const bool stepped = sharded_ ? scaler.step(*sharded_) : scaler.step(*optimizer_);
  if (stepped) after_step();
  return stepped;
}

void DistOptimizer::unscale_(GradScaler& scaler) {
  sharded_ ? scaler.unscale_(*sharded_) : scaler.unscale_(*optimizer_);
}

}  // namespace tessera
