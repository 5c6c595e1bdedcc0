#pragma once

#include <fmt/format.h>
#include <tessera/comm/process_group.h>

#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "comm/group/authentication.h"
#include "comm/group/collective_name.h"

namespace tessera {

/// Two rounds in which ranks exchange the locations of resources and then open them: the text
/// returned by `make` is sent to all ranks, and `open` is called with each rank and the lines of
/// its text, unless a rank has failed. Collective; every rank takes part in both rounds.
///
/// Returns the error of the first rank that failed, as "rank 1: why", on all ranks; empty if none
/// did. `key`: of the codes by which ranks know each other's texts; empty: they carry none.
inline std::string shake_hands(
    ProcessGroup& process_group, const std::string& key, const std::function<std::string()>& make,
    const std::function<void(int, const std::vector<std::string>&)>& open) {
  int round = 0;
  const auto context = [&](int rank) { return fmt::format("round {} of rank {}", round, rank); };
  std::string failure;
  const auto exchange = [&](const std::function<std::string()>& text) {
    std::string own;
    try {
      own = "ok\n" + text();
    } catch (...) {
      own = "failed\n" + exception_text(std::current_exception());
    }
    auto all =
        all_gather_bytes(process_group, authenticated(key, context(process_group.rank()), own),
                         {"shared memory", Channel::kControl});
    for (int rank = 0; rank < std::ssize(all) && failure.empty(); ++rank) {
      const auto text = authentic_text(key, context(rank), all[rank]);
      all[rank] = text.value_or("failed\nits message is not from a rank of this job");
      if (all[rank].starts_with("failed\n"))
        failure = fmt::format("rank {}: {}", rank, all[rank].substr(7));
    }
    ++round;
    return all;
  };
  const std::vector<std::string> told = exchange(make);
  exchange([&] {
    for (size_t rank = 0; rank < told.size() && failure.empty(); ++rank) {
      std::vector<std::string> lines;
      std::istringstream text(told[rank]);
      for (std::string line; std::getline(text, line);) lines.push_back(line);
      lines.erase(lines.begin());  // "ok"
      open(static_cast<int>(rank), lines);
    }
    return std::string();
  });
  return failure;
}

}  // namespace tessera
