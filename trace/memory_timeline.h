#pragma once

#include <tessera/base/memory_sample.h>

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace tessera {

/// The memory that one rank held over time.
struct MemoryTimeline {
  int rank = 0;
  int64_t clock_us = 0;     ///< time of day at which the samples' time begins: to align ranks
  bool knows_other = true;  ///< false: no way to tell which tensors there are; `other` is 0
  std::vector<MemorySample> samples;  ///< ascending in time
};

/// A kind of bytes, with its name in files and pictures.
struct MemoryKind {
  const char* name;
  int64_t MemoryBytes::*bytes;
};
/// All kinds; the first ones change least and lie at the bottom of a picture.
extern const std::array<MemoryKind, 8> kMemoryKinds;

/// Returns the sample with the largest `peak_total`; null if there are none.
const MemorySample* peak_of(const std::vector<MemorySample>& samples);

/// Something with a duration: a gather, the time that a unit stays gathered, a forward.
struct MemorySpan {
  std::string name;  ///< "gather", "gathered", "reduction", "forward", "backward" or "step"
  std::string unit;  ///< may be empty
  int64_t begin_us = 0, end_us = 0;
};
/// Returns the spans in the samples; those that have not ended end with the last sample.
std::vector<MemorySpan> spans_of(const std::vector<MemorySample>& samples);

/// Returns the samples of the last step that the samples cover from its beginning to its end; all
/// samples if there is none.
MemoryTimeline last_step_of(const MemoryTimeline& timeline);

/// Returns events in the format of Chrome's trace viewer and Perfetto: counters for each kind, an
/// instant event for each sample, and spans. `shift_us` is added to all times.
nlohmann::json chrome_events(const MemoryTimeline& timeline, int64_t shift_us = 0);
/// Returns the text of a trace file with these events.
std::string chrome_trace(const nlohmann::json& events);

/// Draws a picture: areas by kind over time, with the peak and its cause.
std::string memory_svg(const MemoryTimeline& timeline);

/// Returns a table of the samples, a line each, after a few lines about the peak.
std::string memory_table(const MemoryTimeline& timeline);

/// Formats a number of bytes, as in "1.5 MiB".
std::string readable_bytes(int64_t nbytes);

}  // namespace tessera
