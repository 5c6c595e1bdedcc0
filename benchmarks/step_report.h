#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/step_bench.h"

namespace tessera::tools {

/// Returns the numbers that `tessera bench step --json` prints. Takes the largest of numbers per
/// process.
///
/// - `seconds`: median over the timed steps of all ranks. A step is zero_grad, forward, loss,
///   backward and optimizer step.
/// - `ratio`: sharded divided by local; `ratio_of_rounds`: that of the medians of each round;
///   `ratio_of_minimums`: that of the fastest steps, those least disturbed by noise.
/// - `optimizer_seconds`: median of the optimizer's part of a step.
/// - `limit_seconds`: median of local's steps with the optimizer's part divided by the number of
///   ranks: the limit of sharding if communication cost nothing; `ratio_to_limit`: sharded divided
///   by that.
/// - `in_step_seconds`, `ratio_to_in_step`, `ratio_to_in_step_of_rounds`,
///   `ratio_to_in_step_of_minimums`, `in_step_limit_seconds`, `ratio_to_in_step_limit`: the same of
///   `StepRole::kInStep`, with `--in-step`: both include the cost of noise for ranks that wait for
///   each other once a step.
/// - `native_seconds` and so on, with a dialect: the same of `StepRole::kNative`.
/// - `threads_seconds` and so on, with `--threads`: the same of `StepRole::kThreads`.
/// - `core_noise`: time that the cores took for arithmetic, by themselves, before each turn,
///   relative to the best (`CoreNoise`); median. `core_noise_of_rounds`: the largest of each round.
/// - `breakdown_ms`: medians of the parts of a step, including waits for other ranks.
/// - `kept_bytes`: bytes that a process keeps between steps, by Tessera's own accounting.
/// - `peak_unsharded_bytes`, `peak_in_flight_bytes`: bytes on top of that in a step
///   (`ShardMemory`).
/// - `peak_pss`: peak of a process's proportional memory, less its value before the model was made,
///   sampled in untimed steps: making the model, the warm-up and two steps after the last round.
/// - `bytes_sent_per_step`: payload, mean over the timed steps.
/// - `page_faults_per_step`: minor ones, mean over the timed steps.
/// - `final_loss`: of rank 0's last timed step, number `warmup_steps + rounds * steps`.
nlohmann::ordered_json step_report(const StepBenchOptions& options, const StepResult& result);

/// Returns the options of a measurement, with which a report begins.
nlohmann::ordered_json report_head(const char* bench, const StepBenchOptions& options);

/// Returns versions and date, for any report.
nlohmann::ordered_json report_origin();

/// Returns the median of the ratios of rounds, the interval in which it lies (`median_interval()`),
/// and the ratios themselves.
nlohmann::ordered_json ratio_of_rounds(const std::vector<double>& ratios);

/// Returns the value of a key as a text.
std::string text_of(const nlohmann::ordered_json& report, const char* key);

/// Formats `step_report()` for human readers.
std::string step_table(const nlohmann::ordered_json& report);

}  // namespace tessera::tools
