#pragma once

#include <string>
#include <vector>

#include "differential/training.h"

namespace tessera::differential {

enum class Verdict : uint8_t { kEqual, kBothRefuse, kRefused, kFinding };
struct Outcome {
  Verdict verdict = Verdict::kEqual;
  std::string text;  // what was refused or found
};

/// True if ranks may come to wait for each other in operation `at`, or after it, by those so far:
/// because they use different layers. This is an error on all.
bool may_disagree(const Program& program, int at);

/// Trains in plain LibTorch, and compares with what the ranks have seen.
Outcome judge(const Program& program, const std::vector<Trace>& ranks);

/// Runs programs in child processes, `jobs` at a time, and calls `report` with the outcome of each,
/// in the order in which they end. A child that crashes or does not go on is a finding of the
/// program that it was running.
void run(const std::vector<Program>& programs, int jobs,
         const std::function<void(const Program&, const Outcome&)>& report);

}  // namespace tessera::differential
