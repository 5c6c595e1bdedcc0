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

/// Ranks abort themselves when they lose a peer.
bool was_killed(const RankEnd& rank) {
  return rank.killed && rank.status != SIGABRT && !rank.by_launcher;
}

bool blames_another(const RankEnd& rank, const std::vector<FlightReport>& flights) {
  const auto own = std::ranges::find(flights, rank.rank, &FlightReport::rank);
  return own != flights.end() && own->culprit >= 0 && own->culprit != rank.rank;
}

}  // namespace

std::optional<Cause> cause_of(const JobEnd& end, const std::vector<FlightReport>& flights) {
  const auto rank = std::ranges::find_if(end.ranks, &RankEnd::failed);
  if (rank == end.ranks.end()) return std::nullopt;
  const Cause first{.rank = &*rank,
                    .text = fmt::format("rank {} failed first: {}", rank->rank, describe(*rank)),
                    .status = rank->exit_status()};
  // Ranks that a passed-on signal ended blame each other, too.
  if (end.interrupted_by != 0) return first;
  const auto died = std::ranges::find_if(
      end.ranks, [&](const RankEnd& r) { return was_killed(r) && !blames_another(r, flights); });
  if (died == rank) return first;
  if (died != end.ranks.end()) {
    return Cause{.rank = &*died,
                 .first = &*rank,
                 .text = fmt::format("rank {} is the cause: {}", died->rank, describe(*died)),
                 .status = died->exit_status()};
  }
  const int blamed = blamed_rank(flights);
  return blamed < 0 || blamed == rank->rank ? first : blamed_cause(blamed, end, first);
}

std::string describe(const RankEnd& end) {
  if (!end.killed) return fmt::format("exit status {}", end.status);
  return fmt::format("killed by {}{}{}", signal_text(end.status),
                     end.dumped_core ? ", core dumped" : "",
                     end.out_of_memory ? ": out of memory, as the kernel counts" : "");
}

std::string signal_text(int signal) {
  const char* name = ::sigdescr_np(signal);
  return fmt::format("signal {} ({})", signal, name != nullptr ? name : "unknown");
}

}  // namespace tessera::tools
