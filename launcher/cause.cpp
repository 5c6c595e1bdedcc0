#include "launcher/cause.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <cstring>

namespace tessera::tools {
namespace {

/// The cause if the flight records blame `blamed`. If the launcher had to end that rank, its status
/// says nothing.
Cause blamed_cause(int blamed, const JobEnd& end, const Cause& first) {
  const auto rank = std::find_if(end.ranks.begin(), end.ranks.end(),
                                 [&](const RankEnd& r) { return r.rank == blamed; });
  const bool is_here = rank != end.ranks.end();
  const bool ended = is_here && !rank->by_launcher;
  const std::string how = ended     ? describe(*rank)
                          : is_here ? "it did not fail by itself, and the launcher ended it"
                                    : "the launcher of its node says how it ended";
  return {.rank = is_here ? &*rank : nullptr,
          .first = first.rank,
          .text = fmt::format("rank {} is the cause, by the flight records of the others: {}",
                              blamed, how),
          .status = ended && rank->failed() ? rank->exit_status() : first.status};
}

}  // namespace

std::optional<Cause> cause_of(const JobEnd& end, int blamed) {
  const auto rank =
      std::find_if(end.ranks.begin(), end.ranks.end(), [](const RankEnd& r) { return r.failed(); });
  if (rank == end.ranks.end()) return std::nullopt;
  const Cause first{.rank = &*rank,
                    .text = fmt::format("rank {} failed first: {}", rank->rank, describe(*rank)),
                    .status = rank->exit_status()};
  const bool is_other = blamed >= 0 && rank->rank != blamed;
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
