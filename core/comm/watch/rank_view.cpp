#include "comm/watch/rank_view.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>

#include "comm/group/ranks_text.h"

namespace tessera {
namespace {

// A rank that answers within a few milliseconds when it can, and is asked several times a second.
constexpr double kSilentSeconds = 3;

std::string state_text(const RankView& view) {
  const std::string last =
      view.last.empty() ? "no collective yet" : fmt::format("last collective {}", view.last);
  if (view.silent_seconds < 0)
    return fmt::format("rank {} has not answered at all (stopped, unreachable, or UDP is blocked)",
                       view.rank);
  if (view.silent_seconds > kSilentSeconds)
    return fmt::format(
        "rank {} has not answered for {:.0f} s (its process is stopped, or the network to it "
        "is down); it was in {}, {}",
        view.rank, view.silent_seconds, place_text(view.phase, view.step), last);
  return fmt::format("rank {} is in {} since {:.0f} s, {}", view.rank,
                     place_text(view.phase, view.step), view.phase_seconds, last);
}

}  // namespace

std::string place_text(Phase phase, int64_t step) {
  return fmt::format("{} of step {}", phase_name(phase), step);
}

std::string wait_report(const RankView& own, const std::vector<RankView>& views) {
  const WaitView& wait = *own.wait;
  std::vector<std::string> clauses;
  std::vector<int> waiting{own.rank};
  for (const RankView& view : views) {
    const bool is_silent = view.silent_seconds < 0 || view.silent_seconds > kSilentSeconds;
    const bool lacks = std::ranges::find(wait.lacking, view.rank) != wait.lacking.end();
    if (lacks || is_silent) {
      clauses.push_back(state_text(view));
    } else if (view.wait && view.wait->id == wait.id) {
      waiting.push_back(view.rank);
    }
  }
  if (clauses.empty())
    clauses.emplace_back("all ranks have issued it, and its data does not arrive");
  std::ranges::sort(waiting);
  return fmt::format("[tessera] {}; {} wait{} for {} in {} ({}, since {:.0f} s)",
                     fmt::join(clauses, "; "), ranks_text(waiting), waiting.size() == 1 ? "s" : "",
                     clauses.size() == 1 ? "it" : "them", wait.subject,
                     place_text(own.phase, own.step), wait.seconds);
}

std::vector<int> wait_cycle(const RankView& own, const std::vector<RankView>& views,
                            double min_seconds) {
  std::map<int, const RankView*> stuck;
  const auto add = [&](const RankView& view) {
    const bool is_recent = view.silent_seconds >= 0 && view.silent_seconds < min_seconds;
    if (view.is_blocked && view.wait && view.wait->seconds >= min_seconds && is_recent)
      stuck[view.rank] = &view;
  };
  add(own);
  for (const RankView& view : views) add(view);
  std::vector<int> path;
  std::vector<int> visited;
  const std::function<bool(int)> reaches_own = [&](int rank) {
    const auto found = stuck.find(rank);
    if (found == stuck.end()) return false;
    path.push_back(rank);
    for (const int next : found->second->wait->lacking) {
      if (next == own.rank) return true;
      if (std::ranges::find(visited, next) != visited.end()) continue;
      visited.push_back(next);
      if (reaches_own(next)) return true;
    }
    path.pop_back();
    return false;
  };
  return reaches_own(own.rank) ? path : std::vector<int>();
}

}  // namespace tessera
