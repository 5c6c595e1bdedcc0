#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>
#include <tessera/base/page_heap.h>
#include <tessera/comm/world.h>
#include <tessera/init/deferred_init.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/device/device.h"
#include "comm/group/encoding.h"
#include "comm/start/spawned_rank.h"
#include "engine/grad/grad_gate.h"
#include "engine/model/check_devices.h"
#include "engine/model/check_plan.h"
#include "engine/model/memory_count.h"
#include "engine/unit/agreement.h"
#include "engine/unit/placement.h"
#include "engine/unit/unit_storage.h"
#include "init/recorder.h"
#include "tensor/op_plan.h"

namespace tessera {
namespace {

// The unit of a parameter, even if the parameter was given other data.
const Unit* owner_of(const at::Tensor& param) {
  if (const Unit* const unit = unit_of(param)) return unit;
  const auto gradients = gradients_behind(param);
  return gradients ? &gradients->unit() : nullptr;
}

// The state that the unit belongs to; null for null, and for a unit of something else.
ShardedState* state_with(const Unit* unit) {
  return unit ? dynamic_cast<ShardedState*>(&unit->listener()) : nullptr;
}

// Returns the parameters that no rule of `plan.groups` fits, under any of their names.
std::vector<NamedTensor> outside_groups(const std::vector<NamedTensor>& parameters,
                                        const ShardPlan& plan) {
  std::set<const c10::TensorImpl*> grouped;
  for (const NamedTensor& parameter : parameters)
    for (const GroupRule& rule : plan.groups)
      if (fits_pattern(rule.names, parameter.name))
        grouped.insert(parameter.tensor.unsafeGetTensorImpl());
  std::vector<NamedTensor> others;
  std::ranges::copy_if(parameters, std::back_inserter(others), [&](const NamedTensor& parameter) {
    return !grouped.contains(parameter.tensor.unsafeGetTensorImpl());
  });
  return others;
}

// The mesh of the parameters that are DistTensors; null: none is.
const DeviceMesh* find_mesh(const std::vector<NamedTensor>& parameters) {
  const DeviceMesh* mesh = nullptr;
  std::string first;
  for (const NamedTensor& parameter : parameters) {
    const DistMeta* const meta = find_dist_meta(parameter.tensor);
    if (!meta) continue;
    if (!mesh) first = parameter.name;
    if (!mesh) mesh = &meta->spec->mesh;
    TORCH_CHECK_VALUE(*mesh == meta->spec->mesh,
                      "[fully_shard] all DistTensors among the parameters must lie on one mesh; '",
                      first, "' lies on ", mesh->to_string(), ", '", parameter.name, "' on ",
                      meta->spec->mesh.to_string());
  }
  return mesh;
}

void check_replicated(const std::vector<NamedTensor>& parameters, int64_t mesh_dim) {
  for (const NamedTensor& parameter : parameters) {
    const DistMeta* const meta = find_dist_meta(parameter.tensor);
    TORCH_CHECK_VALUE(meta && is_replicate(meta->spec->placements[mesh_dim]),
                      "[fully_shard] with plan.mesh_dim all parameters must be DistTensors that "
                      "are replicated along mesh dim ",
                      mesh_dim, "; '", parameter.name, "' is ",
                      meta ? "placed " + to_string(meta->spec->placements) : "an ordinary tensor");
  }
}

// The ranks of the mesh that have the same coordinate along `mesh_dim` as this rank.
ProcessGroupPtr ranks_beside(const DeviceMesh& mesh, int64_t mesh_dim) {
  std::vector<std::string> names = mesh.dim_names();
  names.erase(names.begin() + mesh_dim);
  return names.empty() ? nullptr : mesh.sub_mesh(names).process_group();
}

// The ranks to shard over if the plan names none.
ProcessGroupPtr default_ranks() {
  ProcessGroupPtr ranks = default_process_group();
  static const int launched = rank_info_from_environment().size;
  const SpawnedRank* const spawned = SpawnedRank::current();
  const int started = spawned ? spawned->info().size : launched;
  if (ranks->size() == 1 && started > 1) {
    TORCH_WARN_ONCE("[fully_shard] this rank was started as one of ", started,
                    ", and shards a model over itself alone. Call tessera::init() before, "
                    "and keep the World; or name the ranks (ShardPlan::process_group)");
  }
  return ranks;
}

// The ranks that `plan` asks for, with those that hold other parts of parameters on a mesh.
ShardMesh shard_mesh_of(const std::vector<NamedTensor>& parameters, const ShardPlan& plan) {
  const DeviceMesh* const mesh = find_mesh(outside_groups(parameters, plan));
  if (!plan.mesh_dim) {
    return {plan.process_group ? plan.process_group : default_ranks(), plan.replicate_group,
            mesh ? mesh->process_group() : nullptr};
  }
  TORCH_CHECK_VALUE(!plan.process_group,
                    "[fully_shard] plan.mesh_dim and plan.process_group can't both be given");
  TORCH_CHECK_VALUE(mesh,
                    "[fully_shard] with plan.mesh_dim the parameters must be DistTensors; none is");
  const int64_t mesh_dim = c10::maybe_wrap_dim(*plan.mesh_dim, mesh->ndim());
  check_replicated(parameters, mesh_dim);
  return {mesh->process_group(mesh_dim), plan.replicate_group, ranks_beside(*mesh, mesh_dim)};
}

// Lets gradients arrive as one term per rank of a mesh dim. The unit then adds these up.
void sum_gradients_along(std::vector<ParamSlot>& params, int64_t mesh_dim) {
  for (ParamSlot& param : params) {
    const DeviceMesh& mesh = param.dist->spec->mesh;
    Placements placements = param.dist->spec->placements;
    placements[c10::maybe_wrap_dim(mesh_dim, mesh.ndim())] = Partial{PartialOp::kSum};
    // Along that dim each rank counts its own shard.
    param.dist->is_first_replica = is_first_replica({mesh, placements});
    param.dist->gradients = intern(mesh, std::move(placements));
  }
}

// Bytes of each unit's master copy on this rank, if all units have one.
std::vector<int64_t> master_nbytes(const std::vector<UnitLayout>& layouts,
                                   const UnitContext& context) {
  std::vector<int64_t> nbytes;
  for (const UnitLayout& layout : layouts) {
    const int rank = context.mesh_of(layout).shard().rank();
    const bool is_whole = layout.level == ShardLevel::kNone;
    const int64_t numel = is_whole ? layout.numel() : layout.shard_numel(rank);
    nbytes.push_back(numel * static_cast<int64_t>(c10::elementSize(layout.master_dtype)));
  }
  return nbytes;
}

// Moves the parameters that the plan ignores, under any of their names, out of `parameters`.
std::vector<NamedTensor> take_ignored(std::vector<NamedTensor>& parameters, const ShardPlan& plan) {
  std::set<std::string> names(plan.ignored.begin(), plan.ignored.end());
  std::set<const c10::TensorImpl*> impls;
  for (const NamedTensor& parameter : parameters) {
    if (names.erase(parameter.name) > 0) impls.insert(parameter.tensor.unsafeGetTensorImpl());
  }
  TORCH_CHECK_VALUE(names.empty(), "[fully_shard] plan.ignored names '",
                    names.empty() ? "" : *names.begin(), "', which the model does not have");
  const auto ignored = std::stable_partition(
      parameters.begin(), parameters.end(), [&](const NamedTensor& parameter) {
        return !impls.contains(parameter.tensor.unsafeGetTensorImpl());
      });
  std::vector<NamedTensor> taken(ignored, parameters.end());
  parameters.erase(ignored, parameters.end());
  return taken;
}

// Gradients that parameters have already must be such that `Reducer::install()` can keep them.
void check_gradients(const std::vector<ParamSlot>& params) {
  for (const ParamSlot& param : params) {
    for (size_t i = 0; i < param.handles.size(); ++i) {
      const at::Tensor grad = param.tensor(i).grad();
      if (!grad.defined()) continue;
      const DistMeta* const placed = find_dist_meta(grad);
      const bool is_on_mesh =
          param.dist ? placed && placed->spec->mesh == param.dist->spec->mesh : !placed;
      TORCH_CHECK_VALUE(grad.layout() == at::kStrided && !grad.requires_grad() && is_on_mesh &&
                            grad.sizes() == at::IntArrayRef(param.global_sizes()),
                        "[fully_shard] parameter '", param.name(),
                        "' has a gradient already, which must be dense, of its parameter's shape ",
                        at::IntArrayRef(param.global_sizes()),
                        " and mesh, and not require gradients itself; got layout ", grad.layout(),
                        ", shape ", grad.sizes(), is_on_mesh ? "" : ", not on its mesh",
                        grad.requires_grad() ? ", requires_grad" : "", ". Call zero_grad() before");
    }
  }
}

void check_no_parts(const ShardMesh& mesh, const ShardPlan& plan) {
  if (mesh.parts().size() == 1) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      !plan.outer, "[fully_shard] plan.outer can't go with parameters that are DistTensors");
  TORCH_CHECK_NOT_IMPLEMENTED(
      plan.groups.empty(),
      "[fully_shard] plan.groups can't go with other parameters that are DistTensors");
}

void check_countable(const ShardPlan& plan, at::Device device) {
  TORCH_CHECK(!plan.memory_budget || LiveMemory(device).is_known(),
              "[fully_shard] plan.memory_budget needs an allocator that counts tensors; the "
              "process has set one of its own");
}

void check_messages(const UnitContext& context, const ShardMesh& mesh, const ShardPlan& plan,
                    const std::vector<UnitLayout>& layouts) {
  const auto check = [](const char* field, ProcessGroup& ranks, Encoding encoding) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        encoding == Encoding::kPlain || ranks.size() == 1 || !ranks.transport().sends_plain(),
        "[fully_shard] plan.", field, ": messages over ", ranks.backend_name(),
        " can't be sent as ", to_string(encoding),
        ". Over Gloo's own connections (init() makes them), and between hosts whose ranks share "
        "memory, they can");
  };
  for (const UnitLayout& unit : layouts) {
    check("precision.reduce_dtype", context.mesh_of(unit).shard(), unit.reduce_encoding);
    check("precision.gather_dtype", context.mesh_of(unit).shard(), unit.gather_encoding);
  }
  if (plan.outer && plan.outer->reduce_dtype)
    check("outer.reduce_dtype", mesh.replicate(), *block_encoding(*plan.outer->reduce_dtype));
}

// Returns this rank's; null if no process group of the mesh has any.
Progress* progress_of(const ShardMesh& mesh) {
  for (ProcessGroup* const dim : {&mesh.shard(), &mesh.replicate(), &mesh.parts()})
    if (Progress* const progress = progress_of(*dim)) return progress;
  return nullptr;
}

}  // namespace

// In the parameters' order, on all ranks alike. Parameters that were given back have no unit.
void ShardedState::take_over_released(const std::vector<NamedTensor>& parameters) {
  for (const auto& [name, parameter] : parameters) {
    auto* const state = parameter.defined() ? state_with(unit_of(parameter)) : nullptr;
    if (state && state->is_released_) state->give_back(GivenValues::kUsed);
  }
}

std::shared_ptr<ShardedState> ShardedState::create(std::vector<NamedTensor> parameters,
                                                   std::vector<NamedTensor> buffers,
                                                   const ShardPlan& wanted) {
  use_page_heap();
  take_over_released(parameters);
  const ShardMesh mesh = shard_mesh_of(parameters, wanted);
  mesh.check();
  const ShardPlan plan = with_defaults(wanted, mesh.shard().sends_to().empty());
  UnitContext context{.mesh = plan.outer ? mesh.without_replicas() : mesh,
                      .master_only = plan.precision.master_only,
                      .progress = progress_of(mesh)};
  std::vector<ParamSlot> params;
  std::vector<UnitLayout> layouts;
  std::vector<NamedTensor> ignored;
  check_on_all_ranks(mesh, [&] {
    check_plan(plan);
    for (const GroupRule& rule : plan.groups)
      context.groups.emplace_back(rule.process_group, nullptr);
    ignored = take_ignored(parameters, plan);
    for (const NamedTensor& parameter : parameters)
      TORCH_CHECK_VALUE(!has_grad_gate(parameter.tensor), "[fully_shard] parameter '",
                        parameter.name, "' is sharded already: a module can be wrapped only once");
    TORCH_CHECK(!in_deferred_init(),
                "[fully_shard] must be called after the DeferredInit scope, not in it: build the "
                "model in the scope, shard it outside");
    params = collect_parameters(parameters);
    check_own_memory(params, "buffer", buffers);
    check_own_memory(params, "ignored parameter", ignored);
    if (plan.reduce_gradients) check_gradients(params);
    if (plan.device) {
      for (ParamSlot& param : params) param.device = with_index(*plan.device);
    }
    if (plan.mesh_dim) sum_gradients_along(params, *plan.mesh_dim);
    choose_groups(params, plan);
    check_no_parts(mesh, plan);
    layouts = lay_out(params, plan, mesh.shard().size());
    context.offload = make_state_memory(plan, layouts.front().device);
    if (context.offload) context.offload->reserve(master_nbytes(layouts, context));
    check_countable(plan, layouts.front().device);
    check_messages(context, mesh, plan, layouts);
  });
  check_same_model(mesh, params, plan);
  check_devices(mesh, layouts.front().device);
  std::shared_ptr<ShardedState> state(
      new ShardedState(std::move(buffers), ignored, plan, std::move(context), std::move(layouts)));
  for (const NamedTensor& param : parameters) state->parameter_names_.push_back(param.name);
  state->adopt(mesh);
  if (plan.memory_budget) state->ends_.set_budget(*plan.memory_budget);
  return state;
}

std::shared_ptr<ShardedState> state_of(const torch::nn::Module& module) {
  for (const at::Tensor& param : module.parameters()) {
    if (auto* const state = state_with(owner_of(param))) return state->shared_from_this();
  }
  return nullptr;
}

namespace detail {

std::shared_ptr<ShardedState> shard(torch::nn::Module& module, const ShardPlan& plan) {
  return ShardedState::create(named_tensors(module.named_parameters()),
                              named_tensors(module.named_buffers()), plan);
}

std::shared_ptr<ShardedState> shard(torch::jit::Module& module, const ShardPlan& plan) {
  return ShardedState::create(named_tensors(module.named_parameters()),
                              named_tensors(module.named_buffers()), plan);
}

}  // namespace detail

ShardedModule fully_shard(torch::jit::Module& module, const ShardPlan& plan) {
  return ShardedModule(detail::shard(module, plan));
}

ShardedModule fully_shard(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                          const ShardPlan& plan) {
  return ShardedModule(ShardedState::create(std::move(parameters), std::move(buffers), plan));
}

bool is_sharded(const at::Tensor& parameter) { return has_grad_gate(parameter); }
bool keeps_grad_elsewhere(const at::Tensor& parameter) { return hides_gradient(parameter); }

}  // namespace tessera
