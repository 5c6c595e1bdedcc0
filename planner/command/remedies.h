#pragma once

#include <string>
#include <vector>

#include "planner/command/plan_job.h"

namespace tessera::tools {

/// Changes of a job, and what each level needs after them.
struct Remedy {
  std::vector<std::string> options;  ///< of the command: `--offload host`
  std::vector<LevelNeed> needs;      ///< by level
  std::vector<bool> fits;

  bool any_fits() const;
};

/// What to try.
struct RemedySearch {
  std::vector<std::string> levels;  ///< those that do not fit
  bool may_raise_level = false;     ///< other levels are changes, too: `levels` has one
  bool may_combine = true;  ///< if no change suffices alone, tries two at once, then up to four
};

/// Tries changes of a job and returns those with which a level fits, the cheapest first; of ranks
/// and batches, the number that is nearest to the job's. If none suffice, tries shorter sequences,
/// and changes of those. If nothing suffices, returns the changes that were tried alone.
std::vector<Remedy> find_remedies(const PlanJob& job, const RemedySearch& search,
                                  const MemoryLimits& limits);

}  // namespace tessera::tools
