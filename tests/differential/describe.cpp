#include <fmt/format.h>
#include <fmt/ranges.h>

#include <type_traits>

#include "differential/program.h"

namespace tessera::differential {

const char* name_of(ShardLevel level) { return plan_choice(level).enumerator; }

std::string describe(const Program& program) {
  static const char* const kOps[] = {
      "forward",    "backward", "zero_grad", "clip", "clamp_grad", "step",  "schedule", "evaluate",
      "full_state", "edit",     "average",   "save", "load",       "throw", "thaw",     "reduce"};
  const ShardPlan& plan = program.plan;
  std::string text = fmt::format(
      "seed {}: {} ranks over {}, width {}, rows {}{}, {}\n  plan: level {}", program.seed,
      program.ranks, program.transport == Transport::kArena ? "arena" : "gloo", program.width,
      program.rows, program.uneven_rows ? " and more" : "", c10::toString(program.dtype),
      name_of(plan.level));
  const auto add = [&](const char* name, const auto& value, const auto& otherwise) {
    if (value != otherwise) text += fmt::format(", {} {}", name, value);
  };
  add("partition", static_cast<int>(plan.partition), 0);
  for_each_changed(plan, [&](std::string name, const auto& value) {
    name = name.substr(name.find('.') + 1);
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::ScalarType>) {
      text += fmt::format(", {} {}", name, c10::toString(value));
    } else {
      text += fmt::format(", {} {}", name, value);
    }
  });
  add("offload", static_cast<int>(plan.offload), 0);
  add("keeps start", plan.start_values == StartValues::kKeep, false);
  if (plan.outer)
    text += fmt::format(", outer every {} rate {} momentum {} nesterov {}", plan.outer->every,
                        plan.outer->learning_rate, plan.outer->momentum, plan.outer->nesterov);
  add("shard_size", program.shard_size, 0);
  add("own_start", program.own_start, false);
  add("own_units", program.own_units, false);
  for (const CutRule& rule : plan.cuts)
    text += fmt::format(", '{}' {} {} from {} dims", rule.names, plan_choice(rule.cut).name,
                        rule.size, rule.min_dim);
  add("owners", program.owners, false);
  add("grouped", program.grouped, false);
  add("whole", program.whole, false);
  add("ignored", program.ignored, false);
  add("scale", program.scale, 0.0);
  add("simulated", program.simulated, false);
  add("processes", program.processes, false);
  if (program.reload_ranks > 0)
    text += fmt::format(", reloaded on {} ranks at {}", program.reload_ranks,
                        name_of(program.reload_level));
  if (program.joined > 0)
    text += fmt::format(", joined {}, ends {}", program.joined, fmt::join(program.ends, " "));
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
        "schedule {} declared {} state {}",
        own.kind, own.lr, own.decay, own.momentum, own.beta2, own.flag, own.groups, own.reversed,
        own.fused, own.schedule, own.declared, at::toString(own.state));
  for (const Op& op : program.ops)
    text += fmt::format("\n  {} {} {}", kOps[static_cast<int>(op.kind)], op.value, op.how);
  return text;
}

}  // namespace tessera::differential
