#include "comm/watch/watch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <random>
#include <ranges>
#include <utility>

#include "comm/group/authentication.h"
#include "comm/group/collective_form.h"
#include "comm/group/collective_name.h"
#include "comm/group/interruption.h"
#include "comm/watch/last_words.h"
#include "comm/watch/watch_group.h"
#include "comm/watch/watch_state.h"

namespace tessera {

// [Note: Watch]
//
// The ranks of a world ask each other where they are, by UDP messages to a thread of each. It
// answers even while its rank computes or waits. Nothing is sent in a world in which no wait is
// long.
//
// A rank that has waited for a quarter of a second asks all ranks, some times a second, whether
// they have issued the collective, and with which form. The answers show at once whether a rank
// issued another collective at this position, or left, or is behind; after `report_after` the rank
// prints them. Ranks that wait for each other in a cycle, and can issue nothing meanwhile, get an
// error. A rank whose wait fails, or that leaves, tells all others why, so that they name the cause
// and not the first rank that closed its connections. The answers decide nothing that goes well.
namespace {

constexpr auto kPeriod = std::chrono::milliseconds(250);
constexpr auto kAskAfter = std::chrono::milliseconds(250);
// The shortest time between two questions: an answer, too, wakes the threads that would ask again.
constexpr auto kAskPeriod = std::chrono::milliseconds(100);
// From then on a failure of another rank in the same collective is passed on.
constexpr auto kFailureDelay = std::chrono::milliseconds(500);
// The waits in a cycle.
constexpr auto kCycleAge = std::chrono::milliseconds(700);
// A failure that came before is of another wait.
constexpr auto kOldFailure = std::chrono::seconds(5);
constexpr size_t kMaxAsked = 8;

bool thread_exists(pid_t id) {
  return ::access(fmt::format("/proc/self/task/{}", id).c_str(), F_OK) == 0;
}

double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string subject_of(const std::string& collective, int64_t number, const std::string& subject) {
  return fmt::format("{} #{} of unit '{}'", collective, number, subject);
}

WaitCause another_collective(const CollectiveId& id, const FlightEntry& own, int rank,
                             const std::string& theirs) {
  return {rank, differing_order(id.number, own.text, rank, theirs), Evidence::kSeen,
          Disagreement{id, own.fingerprint, own.text}};
}

}  // namespace

WaitCause Watch::ended_cause(int rank) {
  return {rank, fmt::format("rank {}: its process has ended", rank), Evidence::kSeen};
}

std::string Watch::endpoint_of(const Datagrams* socket) {
  std::random_device random;
  return socket ? fmt::format("{} {:08x}{:08x}{:08x}", socket->endpoint(), random(), random(),
                              random())
                : "";
}

std::shared_ptr<Watch> Watch::start(std::unique_ptr<Datagrams> socket, int rank,
                                    const std::vector<std::string>& endpoints,
                                    const Options& options) {
  if (std::ranges::any_of(endpoints, &std::string::empty)) return nullptr;
  socket->set_endpoints(endpoints);
  // All ranks use rank 0's.
  const std::string token = endpoints[0].substr(endpoints[0].rfind(' ') + 1);
  const std::shared_ptr<Watch> watch(new Watch(rank, static_cast<int>(endpoints.size()),
                                               hmac_sha256(options.secret, token), options,
                                               std::move(socket)));
  watch->thread_ = std::thread([raw = watch.get()] { raw->run(); });
  if (!options.flight_folder.empty()) count_flight_requests();
  LastWords::of_process().add(watch);
  return watch;
}

Watch::Watch(int rank, int size, std::string key, Options options,
             std::unique_ptr<Datagrams> socket)
    : rank_(rank),
      size_(size),
      seal_(std::move(key), rank, size),
      options_(std::move(options)),
      socket_(std::move(socket)),
      peers_(size) {}

Watch::~Watch() {
  if (mark_.is_inherited()) {  // the thread is the parent's
    thread_.detach();
    return;
  }
  leave();
}

std::shared_ptr<CollectiveWatch> Watch::group(std::string label, std::vector<int> ranks,
                                              bool is_inner) {
  const auto state = std::make_shared<GroupState>(label, std::move(ranks), is_inner);
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& entry) { return entry.second.expired(); });
    groups_[std::move(label)] = state;
  }
  return std::make_shared<Group>(shared_from_this(), state);
}

void Watch::run() {
  int requests = flight_requests();
  bool has_told = false;
  while (true) {
    try {
      if (!attend()) return;
    } catch (const std::exception& error) {  // must not end a rank that can go on
      if (!std::exchange(has_told, true))
        fmt::print(stderr, "[tessera] rank {} may answer the other ranks late: {}\n", rank_,
                   error.what());
    }
    const int now = flight_requests();
    if (std::exchange(requests, now) != now) write_flight_file("SIGUSR1", -1, progress_.state());
  }
}

// Takes what others say, and looks at the own waits; returns false once this rank has left.
bool Watch::attend() {
  const Datagrams::Events events = socket_->receive(kPeriod);
  {
    const std::lock_guard lock(mutex_);
    if (stops_) return false;
    for (const int rank : events.refused) {
      Peer& peer = peers_[rank];
      if (!peer.refused) peer.refused = Clock::now();
      peer.has_receipt = true;  // nobody is left who could confirm
    }
  }
  for (const std::string& bytes : events.texts) {
    if (const auto message = seal_.message_in(bytes)) handle(*message);
  }
  heard_.notify_all();
  look_at_waits();
  return true;
}

void Watch::handle(const Message& message) {
  const int from = message.from;
  if (const auto* const question = std::get_if<Question>(&message.content)) {
    answer(from, *question);
    return;
  }
  if (std::holds_alternative<Farewell>(message.content)) send(from, Receipt());
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[from];
  if (const auto* const told = std::get_if<Answer>(&message.content)) {
    peer.answer = *told;
    peer.answered = Clock::now();
    peer.asked.reset();
    peer.refused.reset();
  } else if (const auto* const failure = std::get_if<Failure>(&message.content)) {
    peer.failure = *failure;
    peer.told = Clock::now();
  } else if (const auto* const farewell = std::get_if<Farewell>(&message.content)) {
    if (!peer.farewell) peer.told = Clock::now();  // it is repeated until it is confirmed
    peer.farewell = *farewell;
  } else {
    peer.has_receipt = true;
  }
}

void Watch::answer(int to, const Question& question) {
  Answer answer;
  {
    const std::lock_guard lock(mutex_);
    answer.view = own_view_locked();
    for (const CollectiveId& id : question.ids) {
      const auto state = group_locked(id);
      if (!state) continue;
      IssuedAnswer& one = answer.issued.emplace_back();
      one.id = id;
      one.issued = state->issued[id.channel].load();
      if (const auto entry = state->record.find(static_cast<Channel>(id.channel), id.number)) {
        one.fingerprint = entry->fingerprint;
        one.text = entry->text;
      }
    }
  }
  send(to, answer);
}

// Returns null if this rank is not in the group, or if it has no such channel.
std::shared_ptr<Watch::GroupState> Watch::group_locked(const CollectiveId& id) const {
  const auto found = groups_.find(id.group);
  const auto state = found == groups_.end() ? nullptr : found->second.lock();
  const bool has = state && id.channel >= 0 && id.channel < std::ssize(state->issued);
  return has ? state : nullptr;
}

RankView Watch::own_view_locked() const {
  const auto [phase, step, since] = progress_.state();
  RankView view;
  view.rank = rank_;
  view.silent_seconds = 0;
  view.phase = phase;
  view.step = step;
  view.phase_seconds = seconds(Clock::now() - since);
  view.last = last_collective_locked();
  view.is_blocked = is_blocked_locked();
  for (const auto& wait : waits_) {
    if (wait->group->is_inner) continue;
    view.wait = view_of_locked(*wait);
    break;
  }
  return view;
}

std::string Watch::last_collective_locked() const {
  std::optional<FlightEntry> newest;
  for (const auto& [label, weak] : groups_) {
    const auto state = weak.lock();
    if (!state || state->is_inner) continue;
    const auto last = state->record.last();
    if (last && (!newest || last->issued_us > newest->issued_us)) newest = last;
  }
  return newest ? subject_of(newest->name, newest->number, newest->subject) : "";
}

// Other ranks' answers are up to a third of a second old: they may not know of a collective that
// this one has issued since.
bool Watch::is_blocked_locked() const {
  if (Clock::now() - last_issued_ < kCycleAge) return false;
  return std::ranges::all_of(issuers_, [&](pid_t issuer) {
    const auto waits = [issuer](const auto& wait) { return wait->thread == issuer; };
    return std::ranges::any_of(waits_, waits) || !thread_exists(issuer);
  });
}

WaitView Watch::view_of_locked(const Wait& wait) const {
  return {wait.id, subject_of(wait.name.collective, wait.name.sequence, wait.name.subject),
          seconds(Clock::now() - wait.since), lacking_locked(wait)};
}

// Returns the ranks that have not issued the collective, as far as they have reported.
std::vector<int> Watch::lacking_locked(const Wait& wait) const {
  std::vector<int> ranks;
  for (const int rank : wait.group->ranks) {
    if (rank == rank_) continue;
    const auto& issued = peers_[rank].answer.issued;
    const auto found = std::ranges::find(issued, wait.id, &IssuedAnswer::id);
    if (found != issued.end() && found->issued <= wait.id.number) ranks.push_back(rank);
  }
  return ranks;
}

RankView Watch::view_of(int rank) const {
  const Peer& peer = peers_[rank];
  RankView view = peer.answer.view;
  view.rank = rank;
  view.silent_seconds = 0;
  if (peer.asked) {
    view.silent_seconds = seconds(Clock::now() - *peer.asked);
    if (!peer.answered && view.silent_seconds > 1) view.silent_seconds = -1;
  }
  return view;
}

// Returns the ranks that may be to blame for a wait in `group`: its ranks may wait for any other.
std::vector<RankView> Watch::views_for(const GroupState& group) const {
  std::vector<RankView> views;
  for (int rank = 0; rank < size_; ++rank) {
    const bool is_member = std::ranges::find(group.ranks, rank) != group.ranks.end();
    if (rank != rank_ && (is_member || !peers_[rank].farewell)) views.push_back(view_of(rank));
  }
  return views;
}

void Watch::look_at_waits() {
  std::vector<std::function<void()>> actions;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    std::vector<CollectiveId> ids;
    for (const auto& wait : waits_) {
      if (now - wait->since < kAskAfter || wait->is_aborted) continue;
      if (ids.size() < kMaxAsked) ids.push_back(wait->id);
      judge(wait, actions);
    }
    if (!ids.empty()) ask_all_locked(ids);
  }
  for (const auto& action : actions) action();
}

void Watch::ask_all_locked(const std::vector<CollectiveId>& ids) {
  const auto now = Clock::now();
  if (now - last_asked_ < kAskPeriod) return;
  last_asked_ = now;
  for (Peer& peer : peers_) {
    if (!peer.asked) peer.asked = now;
  }
  send_to_all(Question{ids});
}

// Decides by the answers whether `wait` can succeed, and whether to report it.
void Watch::judge(const std::shared_ptr<Wait>& wait, std::vector<std::function<void()>>& actions) {
  const auto abort = [&](const WaitCause& cause) {
    wait->is_aborted = true;
    actions.emplace_back([wait, cause] {
      const std::lock_guard calling(wait->calling);
      if (wait->abort) wait->abort(cause);
    });
  };
  if (is_interrupted(wait->thread))
    return abort({rank_, fmt::format("rank {}: it was interrupted", rank_), Evidence::kReported});
  std::optional<WaitCause> best;
  for (const int rank : wait->group->ranks) {
    auto cause = rank == rank_ ? std::nullopt : cause_for(*wait, rank);
    if (cause && (!best || cause->evidence > best->evidence)) best = std::move(cause);
  }
  if (best) return abort(*best);
  RankView own = own_view_locked();
  if (wait->group->is_inner && own.wait) return;  // the collective for which it works tells more
  const std::vector<RankView> views = views_for(*wait->group);
  const std::vector<int> cycle = wait_cycle(own, views, seconds(kCycleAge));
  if (!cycle.empty() && own.wait && own.wait->id == wait->id) {
    std::string text = "ranks wait for each other:";
    for (size_t i = 0; i < cycle.size(); ++i) {
      const auto& waits = cycle[i] == rank_ ? own.wait : peers_[cycle[i]].answer.view.wait;
      text += fmt::format("{} rank {} waits for rank {} in {}", i == 0 ? "" : ",", cycle[i],
                          cycle[(i + 1) % cycle.size()], waits->subject);
    }
    return abort({cycle.size() > 1 ? cycle[1] : -1, text, Evidence::kInferred});
  }
  const auto now = Clock::now();
  if (now < wait->next_report) return;
  wait->next_report = now + (now - wait->since);
  own.wait = view_of_locked(*wait);
  actions.emplace_back([line = wait_report(own, views)] { fmt::print(stderr, "{}\n", line); });
}

// True if the rank has left before it issued the collective.
bool Watch::has_left_before(const Peer& peer, const CollectiveId& id) {
  if (!peer.farewell) return false;
  const auto& counts = peer.farewell->issued;
  const auto count = counts.find(id.group);
  return count == counts.end() || count->second.at(id.channel) <= id.number;
}

// Returns why `rank` makes it impossible that the wait succeeds, if it does.
std::optional<WaitCause> Watch::cause_for(const Wait& wait, int rank) const {
  const Peer& peer = peers_[rank];
  const auto now = Clock::now();
  const auto& issued = peer.answer.issued;
  const auto found = std::ranges::find(issued, wait.id, &IssuedAnswer::id);
  if (found != issued.end() && found->fingerprint) {
    const auto own = wait.group->record.find(wait.name.channel, wait.id.number);
    if (own && own->fingerprint != *found->fingerprint)
      return another_collective(wait.id, *own, rank, found->text);
  }
  const bool has_failed = peer.failure && peer.failure->id == wait.id;
  if (has_left_before(peer, wait.id) || (has_failed && now - peer.told >= kFailureDelay)) {
    auto cause = told_cause(rank);
    // Another rank may know more.
    if (cause->evidence >= Evidence::kReported || now - peer.told >= kCauseLimit) return cause;
  }
  const bool lacks = found != issued.end() && found->issued <= wait.id.number;
  if (peer.refused && lacks && now - *peer.refused >= kFailureDelay) return ended_cause(rank);
  return std::nullopt;
}

// Returns the cause that rank `peer` has reported, if it has left or failed.
std::optional<WaitCause> Watch::told_cause(int peer) const {
  const Peer& told = peers_[peer];
  const auto named = [&](WaitCause cause) {
    if (cause.found) {
      const CollectiveId& at = cause.found->at;
      const auto group = group_locked(at);
      const auto own =
          group ? group->record.find(static_cast<Channel>(at.channel), at.number) : std::nullopt;
      // Who says so is itself the one that differs.
      if (own && own->fingerprint != cause.found->fingerprint)
        return another_collective(at, *own, peer, cause.found->issued);
    }
    if (cause.rank != peer && cause.rank != rank_)
      cause.why += fmt::format(" (rank {} said so)", peer);
    return cause;
  };
  if (told.farewell && !told.farewell->cause.why.empty()) return named(told.farewell->cause);
  if (told.failure) return named(told.failure->cause);
  if (told.farewell) {
    return WaitCause{peer,
                     fmt::format("rank {} has left in {}: its world was destroyed", peer,
                                 place_text(told.farewell->phase, told.farewell->step)),
                     Evidence::kReported};
  }
  return std::nullopt;
}

// Returns the cause with the best evidence, and of several the one that was known first, of the
// failure of a collective.
std::optional<WaitCause> Watch::best_cause(const CollectiveId& id) const {
  std::optional<WaitCause> best;
  Clock::time_point since;
  const auto consider = [&](std::optional<WaitCause> cause, Clock::time_point at) {
    const bool is_better = !best || cause->evidence > best->evidence ||
                           (cause->evidence == best->evidence && at < since);
    if (is_better) best = std::move(cause), since = at;
  };
  for (int rank = 0; rank < size_; ++rank) {
    const Peer& peer = peers_[rank];
    const bool is_fresh = Clock::now() - peer.told < kOldFailure;
    if (rank == rank_) continue;
    if ((peer.failure && is_fresh) || (peer.farewell && !peer.farewell->cause.why.empty()) ||
        has_left_before(peer, id)) {
      consider(told_cause(rank), peer.told);
    } else if (peer.refused && !peer.farewell) {
      consider(ended_cause(rank), *peer.refused);
    }
  }
  return best;
}

void Watch::send(int to, const Content& content) noexcept {
  try {
    socket_->send(to, seal_.bytes_of(content));
  } catch (...) {  // no memory for the text: it counts as lost
  }
}

void Watch::send_to_all(const Content& content) noexcept {
  try {
    const std::string text = seal_.bytes_of(content);
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_) socket_->send(rank, text);
    }
  } catch (...) {  // as above
  }
}

void Watch::write_flight_file(const std::string& reason, int culprit,
                              const Progress::State& at) noexcept {
  if (options_.flight_folder.empty()) return;
  try {
    FlightFile file{rank_, size_, reason, culprit, at, seal_.dropped(), {}};
    std::vector<std::shared_ptr<GroupState>> states;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [label, weak] : groups_) states.push_back(weak.lock());
    }
    for (const auto& state : states) {
      if (!state) continue;
      for (FlightEntry& entry : state->record.entries())
        file.records.emplace_back(state->label, std::move(entry));
    }
    tessera::write_flight_file(options_.flight_folder, file);
  } catch (const std::exception& error) {
    fmt::print(stderr, "[tessera] rank {} could not write its flight record: {}\n", rank_,
               error.what());
  }
}

bool Watch::has_failed() const {
  const std::lock_guard lock(mutex_);
  return failure_.has_value();
}

void Watch::leave(const std::string& why) noexcept {
  if (mark_.is_inherited()) return;
  const bool by_exception = !why.empty() || std::uncaught_exceptions() > 0;
  WaitCause cause;
  bool leaves_now = false;
  try {
    leaves_now = take_leave(why, by_exception, cause);
  } catch (const std::exception& error) {
    fmt::print(stderr, "[tessera] rank {} could not tell the others that it leaves: {}\n", rank_,
               error.what());
    stops_ = true;
  }
  if (leaves_now && by_exception)
    write_flight_file(cause.why, cause.rank, failure_ ? failure_->at : progress_.state());
  socket_->wake();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else if (thread_.joinable() && stops_) {
    thread_.join();
  }
}

Farewell Watch::farewell_locked(const std::string& why, bool by_exception) {
  const bool by_failure = by_exception && why.empty() && failure_;
  const auto [phase, step, since] = by_failure ? failure_->at : progress_.state();
  Farewell farewell{.phase = phase, .step = step};
  if (by_failure) {
    farewell.cause = failure_->cause;
  } else if (by_exception) {
    farewell.cause = {rank_,
                      fmt::format("rank {}: an exception ended it in {}{}", rank_,
                                  place_text(phase, step), why.empty() ? "" : ": " + why),
                      Evidence::kReported};
  }
  for (const auto& [label, weak] : groups_) {
    const auto state = weak.lock();
    if (!state) continue;
    auto& counts = farewell.issued[label];
    std::ranges::transform(state->issued, counts.begin(), [](const auto& n) { return n.load(); });
  }
  return farewell;
}

// Returns false if this rank has left before, or can't leave.
bool Watch::take_leave(const std::string& why, bool by_exception, WaitCause& cause) {
  // An exception that ends the process may have been thrown by this thread while it has the lock.
  Lock lock(mutex_, std::defer_lock);
  for (int attempt = 0; attempt < 100 && !lock.try_lock(); ++attempt)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (!lock || has_left_) return false;
  has_left_ = true;
  const Farewell farewell = farewell_locked(why, by_exception);
  if (by_exception && !failure_) failure_ = {farewell.cause, progress_.state()};
  cause = farewell.cause;
  const auto lacks = [&](int rank) {
    return rank != rank_ && !peers_[rank].has_receipt && !peers_[rank].farewell;
  };
  const auto ranks = std::views::iota(0, size_);
  // Until all ranks have it, or for a moment: a message may get lost.
  for (int attempt = 0; attempt < 4; ++attempt) {
    for (const int rank : ranks) {
      if (lacks(rank)) send(rank, farewell);
    }
    if (heard_.wait_for(lock, std::chrono::milliseconds(50),
                        [&] { return std::ranges::none_of(ranks, lacks); }))
      break;
  }
  stops_ = true;
  return true;
}

}  // namespace tessera
