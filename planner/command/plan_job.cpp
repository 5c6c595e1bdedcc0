#include "planner/command/plan_job.h"

#include <fmt/format.h>

#include <map>

#include "command/level_names.h"

namespace tessera::tools {

namespace {

std::string text_of(const ActivationOptions& how) {
  return fmt::format("{} {} {} {} {} {}", how.batch, how.sequence, c10::toString(how.dtype),
                     how.autocast ? c10::toString(*how.autocast) : "", how.fused_attention,
                     how.checkpoint);
}

// Returns the value of a key, which `make` makes at first.
template <class Value, class Make>
const Value& remembered(std::map<std::string, Value>& values, const std::string& key, Make make) {
  const auto [it, is_new] = values.try_emplace(key);
  if (is_new) it->second = make();
  return it->second;
}

}  // namespace

struct PlanJob::Known {
  std::map<std::string, std::vector<ActivationMoment>> moments;
  std::map<std::string, LevelNeed> needs;
};

std::shared_ptr<PlanJob::Known> PlanJob::make_known() { return std::make_shared<Known>(); }

PlanReport PlanJob::report(ShardLevel level, bool shares_memory) const {
  ShardPlan leveled = plan;
  leveled.level = level;
  PlanReportOptions with = options;
  with.shares_memory = shares_memory;
  if (config) {
    ActivationOptions how = activations;
    how.dtype = plan.precision.param_dtype.value_or(config->dtype);
    how.on_cpu = on_cpu;
    with.moments =
        remembered(known->moments, text_of(how), [&] { return activation_moments(*config, how); });
  }
  return plan_report(sizes, leveled, with);
}

namespace {

LevelNeed computed_need(const PlanJob& job, const std::string& level) {
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

}  // namespace

LevelNeed need_of(const PlanJob& job, const std::string& level) {
  const std::string key =
      fmt::format("{} {} {} {} {}", level, job.options.ranks, static_cast<int>(job.plan.offload),
                  c10::toString(job.plan.precision.param_dtype.value_or(at::ScalarType::Undefined)),
                  text_of(job.activations));
  return remembered(job.known->needs, key, [&] { return computed_need(job, level); });
}

}  // namespace tessera::tools
