#include <fmt/format.h>
#include <fmt/ranges.h>

#include "differential/program.h"

namespace tessera::differential {

std::string describe(const Program& program) {
  static const char* const kLevels[] = {"kNone", "kOptimizerState", "kGradients", "kParameters"};
  static const char* const kOps[] = {
      "forward",    "backward", "zero_grad", "clip", "clamp_grad", "step",  "schedule", "evaluate",
      "full_state", "edit",     "average",   "save", "load",       "throw", "thaw",     "reduce"};
  const ShardPlan& plan = program.plan;
  std::string text = fmt::format(
      "seed {}: {} ranks over {}, width {}, rows {}{}, {}\n  plan: level {}", program.seed,
      program.ranks, program.transport == Transport::kArena ? "arena" : "gloo", program.width,
      program.rows, program.uneven_rows ? " and more" : "", c10::toString(program.dtype),
      kLevels[static_cast<int>(plan.level)]);
  const ShardPlan usual;
  const auto add = [&](const char* name, const auto& value, const auto& otherwise) {
    if (value != otherwise) text += fmt::format(", {} {}", name, value);
  };
  add("partition", static_cast<int>(plan.partition), 0);
  add("unit_bytes", plan.unit_bytes.value_or(-1), -1);
  add("whole_numel", plan.whole_numel, usual.whole_numel);
  add("resident_bytes", plan.resident_bytes, usual.resident_bytes);
  add("prefetch", plan.prefetch, usual.prefetch);
  add("average", plan.average, usual.average);
  add("predivide", plan.predivide, usual.predivide);
  add("bucket_bytes", plan.bucket_bytes, usual.bucket_bytes);
  add("offload", static_cast<int>(plan.offload), 0);
  add("memory_budget", plan.memory_budget.value_or(0), 0);
  add("keeps start", plan.start_values == StartValues::kKeep, false);
  if (plan.outer)
    text += fmt::format(", outer every {} rate {} momentum {} nesterov {}", plan.outer->every,
                        plan.outer->learning_rate, plan.outer->momentum, plan.outer->nesterov);
  add("shard_size", program.shard_size, 0);
  const auto dtype_of = [](const std::optional<at::ScalarType>& dtype) {
    return std::string(dtype ? c10::toString(*dtype) : "none");
  };
  const Precision& precision = plan.precision;
  add("param_dtype", dtype_of(precision.param_dtype), "none");
  add("master_dtype", dtype_of(precision.master_dtype), "none");
  add("reduce_dtype", dtype_of(precision.reduce_dtype), "none");
  add("buffer_dtype", dtype_of(precision.buffer_dtype), "none");
  add("gather_dtype", dtype_of(precision.gather_dtype), "none");
  add("cast_inputs", precision.cast_inputs, true);
  add("error_feedback", precision.error_feedback, true);
  add("master_only", precision.master_only, false);
  add("reduce_gradients", plan.reduce_gradients, true);
  add("sync_buffers", plan.sync_buffers, false);
  add("own_start", program.own_start, false);
  add("own_units", program.own_units, false);
  add("owners", program.owners, false);
  add("whole", program.whole, false);
  add("ignored", program.ignored, false);
  add("scale", program.scale, 0.0);
  add("simulated", program.simulated, false);
  add("processes", program.processes, false);
  if (program.reload_ranks > 0)
    text += fmt::format(", reloaded on {} ranks at {}", program.reload_ranks,
                        kLevels[static_cast<int>(program.reload_level)]);
  if (!program.ends.empty()) text += fmt::format(", ends {}", fmt::join(program.ends, " "));
  for (size_t i = 0; i < program.layers.size(); ++i) {
    const Layer& layer = program.layers[i];
    text += fmt::format("\n  l{} {} {}", i, layer.kind, c10::toString(layer.dtype));
    add("ranks", layer.ranks, 15);
    add("times", layer.times, 1);
    add("residual", layer.residual, false);
    add("checkpoint", layer.checkpoint, false);
    add("frozen", layer.frozen, false);
    add("tied", layer.tied, -1);
  }
  text += fmt::format("\n  registered {}", fmt::join(program.registration, " "));
  for (const Optimizer& own : program.optimizers)
    text += fmt::format(
        "\n  {} lr {} decay {} momentum {} beta2 {} flag {} groups {} reversed {} fused {} "
        "schedule {} declared {}",
        own.kind, own.lr, own.decay, own.momentum, own.beta2, own.flag, own.groups, own.reversed,
        own.fused, own.schedule, own.declared);
  for (const Op& op : program.ops)
    text += fmt::format("\n  {} {} {}", kOps[static_cast<int>(op.kind)], op.value, op.how);
  return text;
}

}  // namespace tessera::differential
