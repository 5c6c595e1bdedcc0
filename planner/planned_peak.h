#pragma once

#include <tessera/planner/plan_report.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/access/use_order.h"
#include "engine/grad/grad_bucket.h"
#include "engine/unit/layout.h"

namespace tessera {

/// Fills in the orders in which the moments use the units, unless the options have one. Throws
/// `c10::ValueError` for impossible activations.
PlanReportOptions with_order_of_moments(const std::vector<UnitLayout>& units, const ShardPlan& plan,
                                        const PlanReportOptions& options);

/// Finds the moment of a step at which a rank holds most.
class PeakSearch {
 public:
  /// `gathered`: the bytes of gathered parameters at each position of `order`. `buckets`: in the
  /// order of reductions. `units` and `options` must outlive this object.
  PeakSearch(const std::vector<UnitLayout>& units, const PlanReportOptions& options,
             const PassOrder& order, const std::vector<int64_t>& gathered,
             const std::vector<GradBucket>& buckets);

  /// Sets `peak` and `peak_at` of a rank whose other memory is known. `reduced`: its bytes of
  /// reduced gradients, by unit.
  void find(PlannedRank& rank, const std::vector<int64_t>& reduced) const;

 private:
  struct Moment {
    std::string name;
    int64_t activations = 0, gathered = 0;
    int64_t in_flight = 0;         // whole gradients, before reductions begin
    int64_t in_flight_after = 0;   // and when they have begun
    std::vector<size_t> launched;  // units whose gradients begin to be reduced
  };

  void follow(const UseOrder& order, const std::vector<int64_t>& gathered);
  void follow_gradients(const std::vector<GradBucket>& buckets);

  const std::vector<UnitLayout>& units_;
  const PlanReportOptions& options_;
  std::vector<Moment> moments_;
  int64_t largest_unit_ = 0;  // of whole gradients
  int64_t first_gathered_ = 0;
};

}  // namespace tessera
