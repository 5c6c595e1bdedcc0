#pragma once

#include <tessera/planner/plan_report.h>
#include <tessera/planner/transformer_config.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

/// A model, a plan and the machines: all that the memory of a step depends on, but the level.
struct PlanJob {
  std::vector<ParameterSize> sizes;
  ShardPlan plan;
  PlanReportOptions options;

  /// Set if activations are estimated, for `activations`.
  std::optional<TransformerConfig> config;
  ActivationOptions activations;

  bool on_cpu = false;     ///< ranks compute on their host, else each on a device of its own
  int ranks_per_host = 1;  ///< at most

  bool knows_activations() const {
    return config || options.activations > 0 || !options.moments.empty();
  }
  int64_t all_ranks() const { return int64_t{options.ranks} * options.replicas; }
  /// Returns how many ranks are on a host.
  int64_t hosted() const { return std::min<int64_t>(ranks_per_host, all_ranks()); }
  /// Returns true if ranks share memory: on the CPU, where all of them are on one host.
  bool shares_memory() const {
    return on_cpu && options.replicas == 1 && options.ranks > 1 && hosted() == options.ranks;
  }

  /// Returns the report of a level; `shares_memory` as in `PlanReportOptions`.
  PlanReport report(ShardLevel level, bool shares_memory = false) const;

  /// What was computed for this job and changed ones, by a text of all that may be changed.
  struct Known;
  std::shared_ptr<Known> known = make_known();
  static std::shared_ptr<Known> make_known();
};

/// The memory that one level needs.
struct LevelNeed {
  std::string level;
  PlannedRank rank;    ///< the one that keeps the most
  PlannedRank shared;  ///< the same, where ranks share their host's memory; on the CPU only
  int64_t device = 0;  ///< bytes of that rank, on its device; on the CPU all of its bytes
  /// Bytes on each host: what is offloaded to it, or on the CPU all of its ranks' bytes, where they
  /// share memory if they are the only ones.
  int64_t host = 0;
  int64_t host_messages = 0;  ///< on the CPU, the same if its ranks send messages
};

LevelNeed need_of(const PlanJob& job, const std::string& level);

/// The memory that there is.
struct MemoryLimits {
  std::optional<int64_t> device;  ///< of each rank
  std::optional<int64_t> host;    ///< of each host, beside its devices

  bool any() const { return device || host; }
  bool hold(const LevelNeed& need) const {
    return (!device || need.device <= *device) && (!host || need.host <= *host);
  }
};

}  // namespace tessera::tools
