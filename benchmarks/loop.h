#pragma once

#include <string>
#include <utility>

namespace tessera::tools {

/// The parts of a training loop beside forward, backward and step.
struct LoopSwitches {
  bool clip = false;        ///< gradients to a norm of at most 1
  bool schedule = false;    ///< another learning rate for each step
  bool accumulate = false;  ///< two backwards a step, each of half of the batch
  bool evaluate = false;    ///< after each tenth step the losses of two batches, without gradients
  bool bf16 = false;        ///< parameters of 16 bits, with masters of 32
  bool checkpoint = false;  ///< `checkpoint()` around each block of the model
  bool dropout = false;     ///< of a tenth of the numbers after each block of the model

  bool operator==(const LoopSwitches&) const = default;
  bool is_plain() const { return *this == LoopSwitches(); }
};

/// Its members by name, in their order.
inline constexpr std::pair<const char*, bool LoopSwitches::*> kLoopSwitches[] = {
    {"clip", &LoopSwitches::clip},
    {"schedule", &LoopSwitches::schedule},
    {"accumulate", &LoopSwitches::accumulate},
    {"evaluate", &LoopSwitches::evaluate},
    {"bf16", &LoopSwitches::bf16},
    {"checkpoint", &LoopSwitches::checkpoint},
    {"dropout", &LoopSwitches::dropout},
};

/// Parses names of switches with commas between them; "all" sets all of them, "none" and "" none.
/// Throws `c10::ValueError` for other names.
LoopSwitches loop_switches(const std::string& names);

}  // namespace tessera::tools
