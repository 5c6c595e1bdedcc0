#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/checkpoint/checkpoint.h>

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

/// Returns the states of this rank's default generators, by device type.
std::map<std::string, at::Tensor> read_random_state();
/// Sets the generators that `state` contains. Throws `c10::ValueError` for an invalid state.
void write_random_state(const std::map<std::string, at::Tensor>& state);

}  // namespace tessera
