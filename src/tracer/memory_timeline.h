#pragma once

#include <tessera/memory_sample.h>

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace tessera {

/// What one rank held over time.
struct MemoryTimeline {
  int rank = 0;
  int64_t clock_us = 0;  ///< of day, where the samples' time begins: for several ranks in one file
  bool knows_other = true;  ///< false: nobody can tell what tensors there are; `other` is 0
  std::vector<MemorySample> samples;  ///< ascending in time
};

/// A kind of bytes, as files and pictures name it.
struct MemoryKind {
  const char* name;
  int64_t MemoryBytes::*bytes;
};
/// All kinds; the first ones change least, and lie at the bottom of a picture.
extern const std::array<MemoryKind, 8> kMemoryKinds;

/// All bytes of a sample, `other` at its most.
int64_t peak_bytes(const MemorySample& sample);

/// The sample with most `peak_bytes()`; null if there are none.
const MemorySample* peak_of(const std::vector<MemorySample>& samples);

/// Something that took a while: a gather, a unit's stay, a forward.
struct MemorySpan {
  std::string name;  ///< "gather", "gathered", "reduction", "forward", "backward" or "step"
  std::string unit;  ///< may be empty
  int64_t begin_us = 0, end_us = 0;
};
/// What the samples tell; what has not ended ends with the last of them.
std::vector<MemorySpan> spans_of(const std::vector<MemorySample>& samples);

/// The samples of the last step that the samples show from its beginning to its end; all if there
/// is none.
MemoryTimeline last_step_of(const MemoryTimeline& timeline);

/// Events in the format of Chrome's trace viewer and Perfetto. Counters for each kind, an instant
/// event for each sample, spans. `shift_us` is added to all times.
nlohmann::json chrome_events(const MemoryTimeline& timeline, int64_t shift_us = 0);
/// A whole file of them.
std::string chrome_trace(const nlohmann::json& events);

/// A picture: areas by kind over time, with the peak and what caused it.
std::string memory_svg(const MemoryTimeline& timeline);

/// A table of the samples, a line each, after a few lines about the peak.
std::string memory_table(const MemoryTimeline& timeline);

/// "1.5 MiB".
std::string readable_bytes(int64_t nbytes);

}  // namespace tessera
