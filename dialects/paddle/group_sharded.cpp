#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/world.h>
#include <tessera/dialects/paddle_group_sharded.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <stdexcept>

#include "dialects/element_bytes.h"
#include "engine/model/sharded_state.h"
#include "engine/optim/optimizer_parameters.h"
#include "tensor/shard_mesh.h"

namespace tessera::paddle {
namespace {

std::string hint_at(const std::string& level) {
  if (level.starts_with("p")) return "; did you mean p_g_os?";
  return level.starts_with("os_") ? "; did you mean os_g?" : "";
}

ShardLevel parse_level(const std::string& level) {
  if (level == "os_g") return ShardLevel::kGradients;
  if (level == "p_g_os") return ShardLevel::kParameters;
  TORCH_CHECK_VALUE(level == "os",
                    "[group_sharded_parallel] The level must be os, os_g or p_g_os. Got '", level,
                    "'", hint_at(level));
  LOG(INFO) << "[group_sharded_parallel] level os frees whole gradients as they are reduced, as "
               "os_g does";
  return ShardLevel::kOptimizerState;
}

void check_sizes(const GroupShardedOptions& options) {
  TORCH_CHECK_VALUE(options.buffer_max_size >= 0,
                    "[group_sharded_parallel] buffer_max_size must be GE than 0. Got ",
                    options.buffer_max_size);
  TORCH_CHECK_VALUE(options.segment_size >= 0,
                    "[group_sharded_parallel] segment_size must be GE than 0. Got ",
                    options.segment_size);
  TORCH_CHECK_VALUE(!options.grad_clip || options.grad_clip->clip_norm > 0,
                    "[group_sharded_parallel] grad_clip.clip_norm must be positive. Got ",
                    options.grad_clip ? options.grad_clip->clip_norm : 0);
}

void set_offload(ShardPlan& plan, const std::variant<bool, std::string>& offload) {
  const auto* text = std::get_if<std::string>(&offload);
  const std::string where = text ? *text : std::get<bool>(offload) ? "cpu" : "none";
  TORCH_CHECK_VALUE(!where.empty(),
                    "[group_sharded_parallel] offload must be none, cpu or a directory. Got ''");
  if (where == "none") return;
  plan.offload = where == "cpu" ? Offload::kHost : Offload::kDirectory;
  if (plan.offload == Offload::kDirectory) plan.offload_directory = where;
}

// `Module::name()` is the C++ type: of a layer that users call GroupNorm, it is
// torch::nn::GroupNormImpl.
bool is_type(const std::string& type, const std::string& text) {
  const size_t scope = type.substr(0, type.find('<')).rfind("::");
  const std::string unqualified = scope == std::string::npos ? type : type.substr(scope + 2);
  return type == text || unqualified == text || unqualified == text + "Impl";
}

bool is_excluded(const std::variant<std::string, const torch::nn::Module*>& which,
                 const std::string& name, const torch::nn::Module& module) {
  if (const auto* pointer = std::get_if<const torch::nn::Module*>(&which))
    return *pointer == &module;
  const std::string& text = std::get<std::string>(which);
  return text == name || is_type(module.name(), text);
}

// Returns the parameters of the excluded modules, and of the modules inside them.
std::vector<std::string> excluded_parameters(const torch::nn::Module& model,
                                             const GroupShardedOptions& options) {
  std::vector<std::string> names;
  for (const auto& which : options.exclude_layer) {
    bool found = false;
    for (const auto& item : model.named_modules("", /*include_self=*/false)) {
      if (!is_excluded(which, item.key(), *item.value())) continue;
      found = true;
      for (const auto& param : item.value()->named_parameters())
        names.push_back(item.key() + "." + param.key());
    }
    const auto* text = std::get_if<std::string>(&which);
    TORCH_CHECK_VALUE(found,
                      "[group_sharded_parallel] exclude_layer must name layers of the model, by "
                      "type, dotted name or address; it has none that is ",
                      text ? "'" + *text + "'" : "at the address given");
  }
  return names;
}

}  // namespace

ShardPlan detail::check_group_sharded(const torch::nn::Module& model,
                                      const torch::optim::Optimizer& optimizer,
                                      const std::string& level,
                                      const GroupShardedOptions& options) {
  ShardPlan plan;
  const ShardMesh mesh(options.group ? options.group : default_process_group(), options.dp_group);
  mesh.check();
  check_on_all_ranks(mesh, [&] {
    plan = group_sharded_plan(model, level, options);
    TORCH_CHECK_VALUE(!model.parameters().empty(),
                      "[group_sharded_parallel] the model must have parameters; it has none");
    check_class("group_sharded_parallel", optimizer);
    TORCH_CHECK_NOT_IMPLEMENTED(plan.partition == Partition::kWholeParam || options.elementwise ||
                                    steps_elementwise(optimizer),
                                "[group_sharded_parallel] the optimizer must be elementwise, as "
                                "level p_g_os cuts parameters; ",
                                ways_out_of_cuts(optimizer));
    check_optimized_once("group_sharded_parallel", named_tensors(model.named_parameters()),
                         {&optimizer});
  });
  return plan;
}

ShardPlan group_sharded_plan(const torch::nn::Module& model, const std::string& level,
                             const GroupShardedOptions& options) {
  ShardPlan plan;
  plan.level = parse_level(level);
  check_sizes(options);
  const auto params = model.parameters();
  const bool has_half = std::any_of(params.begin(), params.end(), [](const at::Tensor& param) {
    return param.scalar_type() == at::kHalf;
  });
  if (has_half && !options.scaler) {
    TORCH_WARN(
        "the input of scaler is None, please ensure the logic of your scaler outside is same as "
        "GroupShardedScaler.");
  }
  plan.unit_bytes = element_bytes(model, options.buffer_max_size);
  if (plan.level == ShardLevel::kParameters) {
    plan.whole_numel = options.segment_size;
    plan.whole = excluded_parameters(model, options);
    if (options.sync_comm) plan.prefetch = 0;
  } else {
    // Paddle's stage 2: parameters are never cut; the least loaded rank gets each one.
    plan.partition = Partition::kWholeParam;
  }
  plan.sync_buffers = options.sync_buffers;
  plan.process_group = options.group;
  plan.replicate_group = options.dp_group;
  plan.precision = options.precision;
  set_offload(plan, options.offload);
  return plan;
}

ShardedOptimizerOptions group_sharded_optimizer_options(const GroupShardedOptions& options) {
  ShardedOptimizerOptions result{.elementwise = options.elementwise};
  if (!options.grad_clip) return result;
  result.max_grad_norm = options.grad_clip->clip_norm;
  result.clip = {.norm_type = 2, .epsilon = 0, .exclude = options.grad_clip->no_clip};
  return result;
}

double GroupShardedOptimizer::get_lr() const {
  return inner().param_groups().front().options().get_lr();
}

void GroupShardedOptimizer::set_lr(double lr) {
  for (auto& param_group : inner().param_groups()) param_group.options().set_lr(lr);
}

void GroupShardedOptimizer::minimize(const at::Tensor&) {
  throw std::runtime_error("optimizer.minimize() not support now, please use optimizer.step()");
}

void save_group_sharded_model(const ShardedModule& model, const std::filesystem::path& output,
                              const GroupShardedOptimizer* optimizer) {
  check_on_all_ranks(model.state()->mesh(), [&] {
    TORCH_CHECK_VALUE(!std::filesystem::exists(output) || std::filesystem::is_directory(output),
                      "[save_group_sharded_model] Saving directory (", output.string(),
                      ") should be a directory, not a file");
  });
  save_checkpoint(output, model, optimizer,
                  {.whole_parameters = true, .scaler = optimizer ? optimizer->scaler() : nullptr});
}

void save_group_sharded_model(const torch::nn::Module& model, const std::filesystem::path& output,
                              const GroupShardedOptimizer* optimizer) {
  const auto state = state_of(model);
  TORCH_CHECK_VALUE(state != nullptr,
                    "[save_group_sharded_model] Please use the layer which is wrapped with "
                    "group_sharded_parallel.");
  save_group_sharded_model(ShardedModule(state), output, optimizer);
}

void load_group_sharded_model(ShardedModule& model, const std::filesystem::path& input,
                              GroupShardedOptimizer* optimizer) {
  load_checkpoint(input, model, optimizer, {.scaler = optimizer ? optimizer->scaler() : nullptr});
}

void load_group_sharded_model(torch::nn::Module& model, const std::filesystem::path& input,
                              torch::optim::Optimizer* optimizer, GradScaler* scaler) {
  load_checkpoint(input, model, optimizer, {.scaler = scaler});
}

}  // namespace tessera::paddle
