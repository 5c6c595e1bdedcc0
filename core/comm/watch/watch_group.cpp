#include "comm/watch/watch_group.h"

#include <fmt/format.h>

#include <chrono>
#include <optional>

namespace tessera {

WaitCause Watch::Group::cause_of(const CollectiveName& name, int peer, bool timed_out,
                                 bool has_ended) {
  Watch& watch = *watch_;
  const int rank =
      peer >= 0 && peer < static_cast<int>(state_->ranks.size()) ? state_->ranks[peer] : -1;
  const CollectiveId id{state_->label, static_cast<int>(name.channel), name.sequence};
  const auto end = Clock::now() + kCauseLimit;
  Lock lock(watch.mutex_);
  std::optional<WaitCause> best;
  while (!watch.has_left_) {
    best = watch.best_cause(id);
    // What the rank itself has said before it ended tells more.
    if (has_ended && (!best || (best->rank != rank && best->evidence < Evidence::kSeen)))
      best = Watch::ended_cause(rank);
    if (best && best->evidence >= Evidence::kReported) return *best;
    if (timed_out) {
      RankView own = watch.own_view_locked();
      const auto found = std::ranges::find(watch.waits_, id, &Wait::id);
      if (best || found == watch.waits_.end()) break;
      own.wait = watch.view_of_locked(**found);
      const std::vector<int>& lacking = own.wait->lacking;
      return {lacking.size() == 1 ? lacking[0] : rank,
              wait_report(own, watch.views_for(*state_)).substr(10), Evidence::kInferred};
    }
    if (Clock::now() >= end) break;
    watch.ask_all_locked({id});
    watch.heard_.wait_for(lock, std::chrono::milliseconds(100));
  }
  return best.value_or(WaitCause());
}

void Watch::Group::failed(const CollectiveName& name, const WaitCause& cause,
                          const std::string& error) {
  const CollectiveId id{state_->label, static_cast<int>(name.channel), name.sequence};
  WaitCause known = cause.why.empty() ? WaitCause{cause.rank, error} : cause;
  if (const auto own = state_->record.find(name.channel, name.sequence); own && known.found)
    known.found = {id, own->fingerprint, own->text};
  {
    const std::lock_guard lock(watch_->mutex_);
    if (watch_->has_left_) return;
    watch_->failure_ = {known, watch_->progress_.state()};
  }
  if (state_->is_inner) return;  // the process group for which it works tells more
  watch_->send_to_all(Failure{id, known});
  watch_->write_flight_file(error, cause.rank, watch_->progress_.state());
}

}  // namespace tessera
