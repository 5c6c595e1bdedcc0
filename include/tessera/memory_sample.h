#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

/// What has just happened to a sharded model.
enum class MemoryEvent : uint8_t {
  kStart,             ///< the tracer was made
  kForwardBegin,      ///< the first use of a parameter in a training pass
  kUnitUsed,          ///< use has come to this unit, which is gathered
  kGatherStarted,     ///< the unit's memory is there, its values are under way
  kUnitGathered,      ///< they have arrived
  kUnitFreed,         ///< the full parameters are gone
  kBackwardBegin,     ///< the first gradient of a backward
  kGradientMade,      ///< autograd has handed over a gradient of the unit
  kReductionStarted,  ///< the unit's gradients are being sent
  kUnitReduced,       ///< this rank's part of their sum is there
  kGradientsCleared,  ///< the unit's gradients are forgotten
  kBackwardEnd,
  kStepBegin,  ///< the optimizer begins
  kStepEnd,
};

/// Its name in files: "unit gathered".
TESSERA_API const char* memory_event_name(MemoryEvent event);

/// Bytes that one rank holds for a model, by kind.
struct MemoryBytes {
  int64_t parameters = 0;  ///< shards, and units that stay whole: `ShardMemory::parameters`
  int64_t gathered = 0;    ///< full parameters of units that are freed between uses
  int64_t gradients = 0;   ///< reduced: `ShardMemory::gradients`
  int64_t gradients_in_flight =
      0;  ///< as autograd made them: waiting for their unit, or being sent
  int64_t optimizer_state = 0;
  int64_t master_weights = 0;
  int64_t offloaded = 0;  ///< master weights and optimizer state
  /// Activations and all else: tensors on the model's device that were made since the tracer was,
  /// less those freed since, and less what is named above. Below 0 if older tensors were freed.
  int64_t other = 0;

  /// Bytes of the model itself: all but `other`.
  int64_t model() const {
    return parameters + gathered + gradients + gradients_in_flight + optimizer_state +
           master_weights + offloaded;
  }
  int64_t total() const { return model() + other; }
  bool operator==(const MemoryBytes&) const = default;
};

/// What a rank held at one moment.
struct MemorySample {
  int64_t time_us = 0;  ///< since the process started
  int64_t step = 0;     ///< steps of the optimizer that the tracer had seen end
  MemoryEvent event = MemoryEvent::kStart;
  std::string unit;  ///< its name; empty where the event is not one of a unit
  MemoryBytes bytes;
  /// Most bytes of `other` since the sample before: operators take more while they run than they
  /// leave. On the CPU; on other devices that of now.
  int64_t peak_other = 0;
  std::optional<int64_t> pss;  ///< of the process, where it was asked for
};

}  // namespace tessera
