#pragma once

#include <tessera/process_group.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "group/collective_name.h"
#include "memory/process_mark.h"

namespace tessera {

/// Numbers the collectives of a transport, from 0 in each channel.
class ChannelOrder {
 public:
  /// Returns the name of the next collective of the channel of `tag`. Throws
  /// `c10::DistBackendError` in a forked child.
  CollectiveName next(const ProcessGroup& process_group, const char* collective,
                      const CollectiveTag& tag) {
    std::atomic<int64_t>& sequence = sequences_.at(static_cast<size_t>(tag.channel));
    CollectiveName name{.collective = collective,
                        .subject = std::string(tag.subject),
                        .channel = tag.channel,
                        .sequence = sequence++,
                        .rank = process_group.rank(),
                        .size = process_group.size()};
    check_process(mark_, name);
    return name;
  }

  /// Returns true in a forked child.
  bool is_inherited() const { return mark_.is_inherited(); }

 private:
  const ProcessMark mark_;
  std::array<std::atomic<int64_t>, 3> sequences_{};
};

}  // namespace tessera
