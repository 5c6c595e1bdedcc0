#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bench/step_result.h"

namespace tessera::tools {

/// The numbers that `tessera bench step --json` prints. Of those given per process, the largest.
///
/// - `seconds`: median over the timed steps of all ranks. A step is zero_grad, forward, loss,
///   backward and optimizer step.
/// - `ratio`: sharded by local; `ratio_of_rounds`: that of the medians of each round;
///   `ratio_of_minimums`: that of the fastest steps, which noise has disturbed least.
/// - `optimizer_seconds`: median of the optimizer's part of a step.
/// - `limit_seconds`: median of local's steps with the optimizer's part divided by the number of
///   ranks: what sharding could reach if communication cost nothing; `ratio_to_limit`: sharded by
///   that.
/// - `in_step_seconds`, `ratio_to_in_step`, `in_step_limit_seconds`, `ratio_to_in_step_limit`: the
///   same of `StepRole::kInStep`, with `--in-step`: what noise costs any ranks that wait for each
///   other once a step is in both.
/// - `native_seconds`, `ratio_to_native`, `ratio_to_native_of_rounds` and
///   `ratio_to_native_of_minimums`, with a dialect: the same of `StepRole::kNative`.
/// - `threads_seconds`, `ratio_to_threads`, with `threads`: the same of `StepRole::kThreads`.
/// - `core_noise`: how many times as long as at best the cores took for arithmetic, by themselves,
///   before each turn (`CoreNoise`); median. `core_noise_of_rounds`: the largest of each round.
/// - `breakdown_ms`: medians of the parts of a step, waits for other ranks included.
/// - `kept_bytes`: what a process keeps between steps, by our own accounting.
/// - `peak_unsharded_bytes`, `peak_in_flight_bytes`: what comes on top in a step (`ShardMemory`).
/// - `peak_pss`: most proportional memory of a process over what it had before the model was made,
///   sampled in untimed steps: making the model, the warm-up and two steps after the last round.
/// - `bytes_sent_per_step`: payload, mean over the timed steps.
/// - `page_faults_per_step`: minor ones, mean over the timed steps.
/// - `final_loss`: of rank 0's last timed step, number `warmup_steps + rounds * steps`.
nlohmann::ordered_json step_report(const StepBenchOptions& options, const StepResult& result);

/// What was measured, with which a report begins.
nlohmann::ordered_json report_head(const char* bench, const StepBenchOptions& options);

/// Versions and date, for any report.
nlohmann::ordered_json report_origin();

/// The same as `step_report()` for people.
std::string step_table(const nlohmann::ordered_json& report);

}  // namespace tessera::tools
