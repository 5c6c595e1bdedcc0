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

/// Another rank than the one that failed first.
Cause other_cause(const RankEnd& rank, const Cause& first, const std::string& how) {
  return {.rank = &rank,
          .first = first.rank,
          .text = fmt::format("rank {} is the cause: {}", rank.rank, how),
          .status = rank.by_launcher ? first.status : rank.exit_status()};
}

/// Ranks abort themselves when they lose a peer.
bool was_killed(const RankEnd& rank) {
  return rank.killed && rank.status != SIGABRT && !rank.by_launcher;
}

bool blames_another(const FlightReport& report) {
  return report.culprit >= 0 && report.culprit != report.rank;
}
bool blames_another(const RankEnd& rank, const std::vector<FlightReport>& flights) {
  const auto own = std::ranges::find(flights, rank.rank, &FlightReport::rank);
  return own != flights.end() && blames_another(*own);
}

/// All ranks ended by themselves, with one exit status, and none because of another: an argument
/// that all of them check, say.
bool failed_alike(const JobEnd& end, const std::vector<FlightReport>& flights) {
  const auto is_alike = [&](const RankEnd& rank) {
    return !rank.killed && !rank.by_launcher && rank.status == end.ranks.front().status;
  };
  const auto blames = [](const FlightReport& report) { return blames_another(report); };
  return end.ranks.size() > 1 && std::ranges::all_of(end.ranks, is_alike) &&
         std::ranges::none_of(flights, blames);
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
  if (died != end.ranks.end()) return other_cause(*died, first, describe(*died));
  const auto stopped =
      std::ranges::find_if(end.ranks, [](const RankEnd& r) { return r.stopped_by != 0; });
  if (stopped != end.ranks.end())
    return other_cause(*stopped, first, "stopped by " + signal_text(stopped->stopped_by));
  const bool alike = failed_alike(end, flights);
  const int blamed = alike ? rank_in_another_step(flights) : blamed_rank(flights);
  if (blamed < 0 && alike) {
    return Cause{.rank = first.rank,
                 .text = fmt::format("all ranks failed alike, rank {} first: {}", rank->rank,
                                     describe(*rank)),
                 .status = first.status};
  }
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
