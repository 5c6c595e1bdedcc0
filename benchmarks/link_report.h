#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "benchmarks/link_bench.h"

namespace tessera::tools {

/// Returns the numbers that `tessera bench link --json` prints.
///
/// - `seconds`: median over the timed steps of all ranks and rounds.
/// - `compute_seconds`: median of the steps of processes that train alone, with the optimizer's
///   part divided by the number of ranks.
/// - `wire_nbytes`: bytes that the host that sends most sends per step, by its link's counters;
///   median of the rounds. `payload_nbytes`: the same without headers. `formula_nbytes`: the
///   payload that `plan_report()` computes: of one rank per host where the ranks of a host share
///   memory; otherwise of all ranks of a host, without what stays inside it. `payload_ratio`: the
///   ratio of the two.
/// - `transfer_seconds`: time in which each host sends as many bytes to the next one, and nothing
///   else happens.
/// - `link_seconds`: `wire_nbytes` at the links' bandwidth; without a limit, `transfer_seconds`.
/// - `roofline_seconds`: the longer of `compute_seconds` and `link_seconds`.
/// - `ratio_to_roofline`: median over the rounds of the step by the roofline of its round, and the
///   interval in which that median lies (`median_interval()`).
/// - `both_seconds`: the longer of computation and transfer while both are done at once by separate
///   processes: on cores that move the bytes, too, no step is shorter. `ratio_to_both`: the step by
///   it, as `ratio_to_roofline`.
/// - `others`: for each other system its `seconds`, `wire_nbytes` and `ratio`, its step by the
///   sharded one in the same round: above 1, the sharded one is faster.
nlohmann::ordered_json link_report(const LinkBenchOptions& options, const LinkResult& result);

/// Formats `link_report()` for human readers.
std::string link_table(const nlohmann::ordered_json& report);

}  // namespace tessera::tools
