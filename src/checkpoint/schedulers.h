#pragma once

#include <tessera/checkpoint.h>

#include <map>
#include <string>

namespace tessera {

/// What a scheduler counts, by name. Learning rates are the optimizer's, whose options are saved.
std::map<std::string, double> read_scheduler(const SchedulerPtr& scheduler);

/// Empty, or why `state` is not of such a scheduler.
std::string check_scheduler(const SchedulerPtr& scheduler,
                            const std::map<std::string, double>& state);
void write_scheduler(const SchedulerPtr& scheduler, const std::map<std::string, double>& state);

}  // namespace tessera
