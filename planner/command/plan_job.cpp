#include "planner/command/plan_job.h"

#include "command/level_names.h"

namespace tessera::tools {

PlanReport PlanJob::report(ShardLevel level, bool shares_memory) const {
  ShardPlan leveled = plan;
  leveled.level = level;
  PlanReportOptions with = options;
  with.shares_memory = shares_memory;
  if (config) {
    ActivationOptions how = activations;
    how.dtype = plan.precision.param_dtype.value_or(config->dtype);
    how.on_cpu = on_cpu;
    with.moments = activation_moments(*config, how);
  }
  return plan_report(sizes, leveled, with);
}

LevelNeed need_of(const PlanJob& job, const std::string& level) {
  LevelNeed need{.level = level};
  need.rank = job.report(kLevels.at(level)).fullest;
  if (job.on_cpu) need.shared = job.report(kLevels.at(level), /*shares_memory=*/true).fullest;
  // Files of offloaded state are not in memory between steps.
  const bool is_in_files = job.plan.offload == Offload::kDirectory;
  const auto bytes = [&](const PlannedRank& rank) {
    return job.on_cpu && !is_in_files ? rank.peak.total() : rank.needed();
  };
  need.device = bytes(job.shares_memory() ? need.shared : need.rank);
  if (job.on_cpu) {
    need.host = job.hosted() * need.device;
    need.host_messages = job.hosted() * bytes(need.rank);
  } else if (!is_in_files) {
    need.host = job.hosted() * need.rank.memory.offloaded;
  }
  return need;
}

}  // namespace tessera::tools
