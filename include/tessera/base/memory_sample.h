#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

/// The event of a sharded model after which a sample is taken.
enum class MemoryEvent : uint8_t {
  kStart,             ///< the tracer was made
  kForwardBegin,      ///< the first use of a parameter in a training pass
  kUnitUsed,          ///< an operator begins to use this gathered unit
  kGatherStarted,     ///< the unit's buffer is allocated, and its gather has started
  kUnitGathered,      ///< the gather of the unit is complete
  kUnitFreed,         ///< the unit's full parameters were freed
  kBackwardBegin,     ///< the first gradient of a backward
  kGradientMade,      ///< autograd has produced a gradient of the unit
  kReductionStarted,  ///< the reduction of the unit's gradients has started
  kUnitReduced,       ///< this rank's part of the reduced gradients is available
  kGradientsCleared,  ///< the unit's gradients were cleared
  kBackwardEnd,
  kStepBegin,  ///< the optimizer begins
  kStepEnd,
};

/// Returns the event's name in files: "unit gathered".
TESSERA_API const char* memory_event_name(MemoryEvent event);

/// Bytes that one rank holds for a model, by kind.
struct MemoryBytes {
  int64_t parameters = 0;  ///< shards, and units that stay whole: `ShardMemory::parameters`
  int64_t gathered = 0;    ///< full parameters of units that are resharded between uses
  int64_t gradients = 0;   ///< reduced: `ShardMemory::gradients`
  int64_t gradients_in_flight =
      0;  ///< whole gradients that wait for the rest of their unit, or are being sent
  int64_t optimizer_state = 0;
  int64_t master_weights = 0;
  int64_t offloaded = 0;  ///< offloaded master weights and optimizer state
  /// Activations and all else: tensors on the model's device that were made since the tracer was,
  /// minus those freed since, and minus the kinds above. Negative if older tensors were freed.
  int64_t other = 0;

  /// Returns the bytes of the model itself: all but `other`.
  int64_t model() const {
    return parameters + gathered + gradients + gradients_in_flight + optimizer_state +
           master_weights + offloaded;
  }
  int64_t total() const { return model() + other; }
  bool operator==(const MemoryBytes&) const = default;
};

/// The memory of a rank at one moment.
struct MemorySample {
  int64_t time_us = 0;  ///< since the process started
  int64_t step = 0;     ///< number of optimizer steps that have ended since the tracer was made
  MemoryEvent event = MemoryEvent::kStart;
  std::string unit;  ///< its name; empty if the event does not concern a unit
  MemoryBytes bytes;
  /// Maximum of `other` since the previous sample: operators take more memory while they run than
  /// they leave. Known on the CPU; on other devices, the current value.
  int64_t peak_other = 0;
  /// Maximum of `bytes.total()` since the previous sample. The model may hold less of it at this
  /// sample, as when a unit has been freed. On other devices, the current value.
  int64_t peak_total = 0;
  std::optional<int64_t> pss;  ///< of the process, if requested
};

}  // namespace tessera
