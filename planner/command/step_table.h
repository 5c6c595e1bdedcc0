#pragma once

#include <tessera/planner/step_time.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace tessera::tools {

/// A level's name, and the time of its step.
using StepTimes = std::vector<std::pair<std::string, StepTime>>;

/// A table with a column for each level, and all that was assumed.
std::string step_table(const StepTimes& times, const StepTimeOptions& options);

/// The same numbers; `times` has an object for each level.
nlohmann::ordered_json step_json(const StepTimes& times, const StepTimeOptions& options);

}  // namespace tessera::tools
