#pragma once

#include <tessera/process_group.h>

#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "group/collective_name.h"

namespace tessera {

/// Two rounds in which ranks exchange the locations of resources and then open them. A failure on
/// any rank is reported to all ranks, and every rank still takes part in both rounds.
class Handshake {
 public:
  explicit Handshake(ProcessGroup& process_group) : process_group_(process_group) {}

  /// Round one: sends the text returned by `make` to all ranks. Collective.
  void show(const std::function<std::string()>& make) {
    std::string own;
    try {
      own = "ok\n" + make();
    } catch (...) {
      own = "failed\n" + exception_text(std::current_exception());
    }
    told_ = exchange(own);
  }

  /// Round two: calls `open` with the lines of each rank's text, unless a rank has failed.
  /// Collective.
  void take(const std::function<void(int, const std::vector<std::string>&)>& open) {
    std::string own = "ok\n";
    try {
      for (size_t rank = 0; rank < told_.size() && failure_.empty(); ++rank)
        open(static_cast<int>(rank), lines_of(told_[rank]));
    } catch (...) {
      own = "failed\n" + exception_text(std::current_exception());
    }
    exchange(own);
  }

  /// The error of the first rank that failed, as "rank 1: why"; empty if none did.
  const std::string& failure() const { return failure_; }

 private:
  static std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    lines.erase(lines.begin());  // "ok"
    return lines;
  }

  std::vector<std::string> exchange(const std::string& own) {
    const auto all = all_gather_bytes(process_group_, own, {"shared memory", Channel::kControl});
    for (size_t rank = 0; rank < all.size() && failure_.empty(); ++rank) {
      if (all[rank].starts_with("failed\n"))
        failure_ = "rank " + std::to_string(rank) + ": " + all[rank].substr(7);
    }
    return all;
  }

  ProcessGroup& process_group_;
  std::vector<std::string> told_;
  std::string failure_;
};

}  // namespace tessera
