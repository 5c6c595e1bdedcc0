#include "launcher/cause.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cstring>

#include "launcher/rank_list.h"

namespace tessera::tools {
namespace {

std::string ranks_text(const LostHost& host) {
  std::vector<int> ranks;
  for (int i = 0; i < host.ranks; ++i) ranks.push_back(host.first_rank + i);
  return rank_list(ranks);
}

Cause cause_from(const LostHost& host) {
  return {.text = fmt::format("host {} with {} {}: {} {}", host.name, ranks_text(host),
                              host.started ? "was lost" : "did not start its ranks",
                              "the connection to its launcher ended with status", host.status),
          .status = host.status == 0 ? 1 : host.status};
}

Cause first_in_time(const RankEnd* rank, const LostHost* host) {
  if (host != nullptr && (rank == nullptr || host->seconds < rank->seconds))
    return cause_from(*host);
  return {.rank = rank,
          .text = fmt::format("rank {} failed first: {}", rank->rank, describe(*rank)),
          .status = rank->exit_status()};
}

/// The cause if the flight records blame `blamed`. If the launcher had to end that rank, its status
/// says nothing.
Cause blamed_cause(int blamed, const JobEnd& end, const Cause& first) {
  for (const LostHost& host : end.lost) {
    if (blamed >= host.first_rank && blamed < host.first_rank + host.ranks) return cause_from(host);
  }
  const auto rank = std::find_if(end.ranks.begin(), end.ranks.end(),
                                 [&](const RankEnd& r) { return r.rank == blamed; });
  const bool ended = rank != end.ranks.end() && !rank->by_launcher;
  const std::string how =
      ended ? describe(*rank) : "it did not fail by itself, and the launcher ended it";
  return {.rank = rank != end.ranks.end() ? &*rank : nullptr,
          .first = first.rank,
          .text = fmt::format("rank {} is the cause, by the flight records of the others: {}",
                              blamed, how),
          .status = ended && rank->failed() ? rank->exit_status() : first.status};
}

}  // namespace

std::optional<Cause> cause_of(const JobEnd& end, const MergedFlight& flight) {
  const auto rank =
      std::find_if(end.ranks.begin(), end.ranks.end(), [](const RankEnd& r) { return r.failed(); });
  const bool any_rank = rank != end.ranks.end();
  if (!any_rank && end.lost.empty()) return std::nullopt;
  Cause first =
      first_in_time(any_rank ? &*rank : nullptr, end.lost.empty() ? nullptr : &end.lost.front());
  const int blamed = blamed_rank(flight);
  const bool is_other = blamed >= 0 && (first.rank == nullptr || first.rank->rank != blamed);
  // Ranks that a passed-on signal ended blame each other, too.
  if (!is_other || end.interrupted_by != 0) return first;
  return blamed_cause(blamed, end, first);
}

std::string describe(const RankEnd& end) {
  if (!end.killed) return fmt::format("exit status {}", end.status);
  return fmt::format("killed by {}{}", signal_text(end.status),
                     end.dumped_core ? ", core dumped" : "");
}

std::string signal_text(int signal) {
  const char* name = ::sigdescr_np(signal);
  return fmt::format("signal {} ({})", signal, name != nullptr ? name : "unknown");
}

}  // namespace tessera::tools
