#pragma once

#include <tessera/checkpoint.h>

#include <map>
#include <string>

namespace tessera {

/// Returns a scheduler's counters by name. Learning rates are options of the optimizer, saved
/// there.
std::map<std::string, double> read_scheduler(const SchedulerPtr& scheduler);

/// Returns why `state` is not of such a scheduler; empty if it is.
std::string check_scheduler(const SchedulerPtr& scheduler,
                            const std::map<std::string, double>& state);
void write_scheduler(const SchedulerPtr& scheduler, const std::map<std::string, double>& state);

}  // namespace tessera
