#include <c10/util/Exception.h>
#include <tessera/comm/world.h>

#include <cmath>
#include <map>
#include <set>
#include <typeinfo>

#include "dialects/colossalai/state.h"
#include "engine/unit/unit_storage.h"
#include "tensor/shard_mesh.h"

namespace tessera::colossalai {

namespace {

// The name of the module that has the parameter as its own.
std::string module_of(const std::string& parameter) {
  const size_t dot = parameter.rfind('.');
  return dot == std::string::npos ? "" : parameter.substr(0, dot);
}

}  // namespace

BaseShardStrategy::~BaseShardStrategy() = default;

void TensorShardStrategy::apply(const torch::nn::Module&, ShardPlan& plan) const {
  plan.unit_bytes = 0;
}

void BucketTensorShardStrategy::apply(const torch::nn::Module& module, ShardPlan& plan) const {
  std::set<const c10::TensorImpl*> seen;  // a tied parameter is gathered with its first module
  for (const auto& item : module.named_parameters()) {
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    if (plan.units.empty() || module_of(plan.units.back().front()) != module_of(item.key()))
      plan.units.emplace_back();
    plan.units.back().push_back(item.key());
  }
}

namespace detail {
namespace {

std::shared_ptr<const ParamOrigin> origin_or_throw(const std::string& name,
                                                   const at::Tensor& param) {
  TORCH_CHECK_VALUE(!unit_of(param),
                    "[ShardedModelV2] Nested ShardedModelV2 is not supported; parameter '", name,
                    "' is sharded already");
  auto origin = std::dynamic_pointer_cast<const ParamOrigin>(origin_of(param));
  TORCH_CHECK_VALUE(
      origin,
      "[ShardedModelV2] You must use ZeroInitContext to init your module first. Parameter '", name,
      "' was not made in one, or was given other data since (as by Module::to())");
  return origin;
}

bool is_offloaded(const ShardedModelV2Options& options) {
  const std::map<std::string, std::string> to_cpu = {{"device", "cpu"}};
  TORCH_CHECK_VALUE(options.offload_config.empty() || options.offload_config == to_cpu,
                    "[ShardedModelV2] offload_config must be {{\"device\", \"cpu\"}} or empty");
  return !options.offload_config.empty() || options.tensor_placement_policy == "cpu";
}

void check_options(const ShardedModelV2Options& options) {
  const std::string& policy = options.tensor_placement_policy;
  TORCH_CHECK_TYPE(policy == "cuda" || policy == "cpu" || policy == "auto",
                   "[ShardedModelV2] Unknown tensor placement policy ", policy,
                   ": expected cuda, cpu or auto");
  TORCH_CHECK_VALUE(policy != "auto" || options.memory_budget,
                    "[ShardedModelV2] tensor_placement_policy auto needs memory_budget: the bytes "
                    "that this rank may use");
  TORCH_CHECK_VALUE(
      !options.memory_budget || policy == "auto" || is_offloaded(options),
      "[ShardedModelV2] memory_budget needs tensor_placement_policy auto or cpu; got ", policy);
  TORCH_CHECK_VALUE(policy != "auto" || options.offload_config.empty(),
                    "[ShardedModelV2] offload_config can't go with tensor_placement_policy auto");
  TORCH_CHECK_VALUE(
      !options.reduce_scatter_process_group ||
          options.reduce_scatter_process_group == options.process_group,
      "[ShardedModelV2] reduce_scatter_process_group must be null or process_group: reductions and "
      "gathers do not wait for each other in one group, so no second one is needed");
}

// Returns a power of two near the square root of the number of ranks.
double automatic_predivide(int ranks) {
  int factor = 1;
  while (ranks % factor == 0 && ranks / factor > factor) factor *= 2;
  return factor;
}

// A parameter's name, and the origin that it remembers.
struct Found {
  std::string name;
  std::shared_ptr<const ParamOrigin> origin;
};

std::vector<Found> find_origins(const torch::nn::Module& module) {
  std::vector<Found> all;
  std::map<std::string, bool> is_sharded;  // by module
  for (const auto& item : module.named_parameters()) {
    const std::string& name = item.key();
    const std::string owner = module_of(name);
    all.push_back({name, origin_or_throw(name, item.value())});
    const bool sharded = all.back().origin->options.shard_param;
    TORCH_CHECK_VALUE(
        is_sharded.emplace(owner, sharded).first->second == sharded,
        "[ShardedModelV2] nn.Module can not both have shard param and unshard param; module '",
        owner, "' has '", name, "', which is ", sharded ? "" : "not ", "sharded, and others");
  }
  TORCH_CHECK_VALUE(!all.empty(), "[ShardedModelV2] the module must have parameters; it has none");
  return all;
}

void check_contexts(const std::vector<Found>& all, const ShardStrategyPtr& strategy,
                    const ProcessGroupPtr& process_group) {
  const ParamOrigin& first = *all.front().origin;
  TORCH_CHECK_VALUE(typeid(*strategy) == typeid(*first.strategy),
                    "[ShardedModelV2] shard_strategy must be that of the ZeroInitContext");
  for (const Found& found : all) {
    const ParamOrigin& origin = *found.origin;
    TORCH_CHECK_VALUE(
        origin.device == first.device && origin.options.param_dtype == first.options.param_dtype,
        "[ShardedModelV2] all parameters must be made for one device and dtype; got ", first.device,
        " ", first.options.param_dtype, " and, for '", found.name, "', ", origin.device, " ",
        origin.options.param_dtype);
    TORCH_CHECK_VALUE(
        !origin.options.dp_process_group || origin.options.dp_process_group == process_group,
        "[ShardedModelV2] process_group must be the dp_process_group of the ZeroInitContext");
  }
}

// The process group that the module is to be sharded over.
ProcessGroupPtr group_of(const torch::nn::Module& module, const ShardedModelV2Options& options) {
  if (options.process_group) return options.process_group;
  for (const at::Tensor& param : module.parameters()) {
    const auto origin = std::dynamic_pointer_cast<const ParamOrigin>(origin_of(param));
    if (origin && origin->options.dp_process_group) return origin->options.dp_process_group;
  }
  return default_process_group();
}

// The plan of a module that was built in a context. Not collective.
ShardPlan plan_of(const torch::nn::Module& module, const ShardStrategyPtr& strategy,
                  const ShardedModelV2Options& options) {
  check_options(options);
  TORCH_CHECK_VALUE(strategy, "[ShardedModelV2] shard_strategy must not be null");
  const std::vector<Found> all = find_origins(module);
  const ParamOrigin& first = *all.front().origin;
  ShardPlan plan;
  strategy->apply(module, plan);
  plan.process_group = group_of(module, options);
  check_contexts(all, strategy, plan.process_group);
  plan.level = ShardLevel::kGradients;
  for (const Found& found : all) {
    if (found.origin->options.shard_param) plan.level = ShardLevel::kParameters;
  }
  for (const Found& found : all) {
    if (!found.origin->is_replicated) {
      plan.unreplicated.push_back(found.name);
    } else if (!found.origin->options.shard_param && plan.level == ShardLevel::kParameters) {
      plan.whole.push_back(found.name);
    }
  }
  plan.device = first.device;
  plan.precision.param_dtype = plan.precision.buffer_dtype = first.options.param_dtype;
  if (options.fp32_reduce_scatter) plan.precision.reduce_dtype = at::kFloat;
  plan.precision.master_only = options.reuse_fp16_shard;
  plan.sync_buffers = options.sync_buffers;
  const double mib = options.reduce_scatter_bucket_size_mb;
  plan.bucket_bytes = mib > 0 ? std::llround(mib * (1 << 20)) : 0;
  plan.predivide = options.gradient_predivide_factor
                       ? *options.gradient_predivide_factor
                       : automatic_predivide(plan.process_group->size());
  if (is_offloaded(options)) plan.offload = Offload::kHost;
  if (options.tensor_placement_policy == "auto") plan.memory_budget = options.memory_budget;
  return plan;
}

}  // namespace

ModelState make_state(torch::nn::Module& module, const ShardStrategyPtr& strategy,
                      const ShardedModelV2Options& options) {
  const ShardMesh ranks(group_of(module, options), nullptr);
  ShardPlan plan;
  check_on_all_ranks(ranks, [&] { plan = plan_of(module, strategy, options); });
  ModelState state{options, ShardedModule(tessera::detail::shard(module, plan))};
  if (options.use_memory_tracer) state.tracer.emplace(state.sharded);
  return state;
}

}  // namespace detail
}  // namespace tessera::colossalai
