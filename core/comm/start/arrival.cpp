#include "comm/start/arrival.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <utility>

#include "comm/group/ranks_text.h"
#include "comm/start/process_stat.h"
#include "comm/start/store_key.h"

namespace tessera {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankProcess, rank, pid, command)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankProcesses, own, all)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Arrival, rank, name, size, local_size, host, host_name, pid,
                                   processes, transport, backend, timeout, endpoint, launched)

namespace {

using std::chrono::milliseconds;

// Time in which a rank sees a contradiction while others are missing.
constexpr milliseconds kBetweenLooks{250};
constexpr milliseconds kRefusedTakes{1000};
// Time in which the ranks of a job come at the latest, as a rule.
constexpr milliseconds kAllCome{60'000};
constexpr milliseconds kEndedFor{1500};
// Facts read with one request: about 300 bytes each.
constexpr int64_t kMostAtOnce = 256;

std::string key_of_arrival(int64_t number) { return "arrival/" + std::to_string(number); }

// Returns why two ranks of one host are of different jobs, by what their launchers have started.
std::string two_jobs(const Arrival& a, const Arrival& b) {
  if (a.host != b.host || a.processes != b.processes || a.processes.empty()) return "";
  const auto told = [](const Arrival& knows, const Arrival& other) {
    const std::string why = contradiction_of(knows.launched, other.rank, other.launched.own);
    return why.empty() ? ""
                       : fmt::format("{} and {} are of two jobs: {}", knows.describe(),
                                     other.describe(), why);
  };
  const std::string why = told(a, b);
  return why.empty() ? told(b, a) : why;
}

// Arrivals in the order in which they came: all ranks see the same order, and so the same first
// contradiction.
class ArrivalList {
 public:
  ArrivalList(Attendance& attendance, c10d::Store& store)
      : attendance_(attendance), store_(store) {}

  void join() {
    number_ = store_.add("arrivals", 1);
    store_.set(key_of_arrival(number_), to_text(attendance_.own()));
  }

  // Reads new arrivals, up to the first that contradicts the ones before it.
  void read() {
    const int64_t count = store_.add("arrivals", 0);
    while (!complete() && refusal_.empty() && read_ < count) {
      const std::vector<std::string> texts = next_texts(count);
      if (texts.empty()) return;
      for (size_t i = 0; i < texts.size() && !complete() && refusal_.empty(); ++i) {
        ++read_;
        if (!texts[i].empty()) take(arrival_from_text(texts[i]));
      }
    }
  }

  bool complete() const { return !list_.empty() && std::ssize(list_) == list_.front().size; }
  const std::string& refusal() const { return refusal_; }
  bool has_own() const { return number_ <= read_; }
  // Why this rank is none of those that are there.
  std::string own_contradiction() const { return contradiction(attendance_.own()); }

  void wait_for_last(const Deadline& deadline) const {
    const int64_t strangers = read_ - std::ssize(list_);
    const int64_t last = strangers + (list_.empty() ? attendance_.own() : list_.front()).size;
    const int askers = attendance_.own().size;
    const auto time = std::max(kBetweenLooks, 8 * pause_between_questions(askers));
    wait_for_key(store_, key_of_arrival(last), Deadline(std::min(time, deadline.left())), askers);
  }

 private:
  // Returns the next facts: many with one request, as every rank reads those of all ranks. A rank
  // that has its number may not have written its facts yet: then those before it, or none.
  std::vector<std::string> next_texts(int64_t count) {
    const int64_t most = store_.hasExtendedApi() ? kMostAtOnce : 1;
    std::vector<std::string> keys;
    for (int64_t number = read_ + 1; number <= std::min(count, read_ + most); ++number)
      keys.push_back(key_of_arrival(number));
    while (!keys.empty() && !store_.check(keys)) keys.resize(keys.size() / 2);
    if (keys.empty()) return {};
    if (keys.size() == 1) return {store_.get_to_str(keys.front())};
    std::vector<std::string> texts;
    for (const auto& bytes : store_.multiGet(keys)) texts.emplace_back(bytes.begin(), bytes.end());
    return texts;
  }

  void take(Arrival next) {
    refusal_ = contradiction(next);
    if (next.rank < attendance_.own().size) attendance_.note(next);
    list_.push_back(std::move(next));
  }

  std::string contradiction(const Arrival& next) const {
    const std::string cause =
        "Does another job use the same MASTER_ADDR:MASTER_PORT, or the same store? Each job needs "
        "one of its own";
    if (list_.empty()) return "";
    const Arrival& first = list_.front();
    if (next.size != first.size)
      return fmt::format("all ranks must have one world size; got {} for {} and {} for {}. {}",
                         first.size, first.describe(), next.size, next.describe(), cause);
    for (const Arrival& other : list_) {
      if (other.rank == next.rank)
        return fmt::format("rank {} joined twice: processes {} on host {} and {} on host {}. {}",
                           next.rank, other.pid, other.host_name, next.pid, next.host_name, cause);
    }
    for (const Arrival& other : list_) {
      const std::string why = two_jobs(other, next);
      if (!why.empty())
        return fmt::format("{}. {}; if they are of one job, give all its ranks one TESSERA_JOB",
                           why, cause);
    }
    if (next.backend != first.backend)
      return fmt::format("all ranks must have one backend; got '{}' for {} and '{}' for {}",
                         first.backend, first.describe(), next.backend, next.describe());
    return "";
  }

  Attendance& attendance_;
  c10d::Store& store_;
  int64_t number_ = 0;  // of this rank, from 1
  int64_t read_ = 0;    // those of strangers, which a store with a secret reads as empty, too
  std::vector<Arrival> list_;
  std::string refusal_;
};

// Whether processes of this rank's launcher are still to come. If they found no store they would
// meet the late ranks of another job, and train with them.
bool expects_more(const RankProcesses& launched, c10d::Store& store) {
  if (launched.all.empty()) return false;
  std::set<int64_t> arrived;
  for (int64_t number = store.add("arrivals", 0); number > 0; --number)
    if (store.check({key_of_arrival(number)}))
      arrived.insert(arrival_from_text(store.get_to_str(key_of_arrival(number))).launched.own);
  return std::ranges::any_of(launched.all, [&](const RankProcess& process) {
    return !arrived.contains(process.pid) && process_stat(process.pid);
  });
}

const Arrival* first_that_asked(const std::vector<Arrival>& arrivals,
                                const std::string& transport) {
  const auto found = std::ranges::find(arrivals, transport, &Arrival::transport);
  return found == arrivals.end() ? nullptr : &*found;
}

void agree_on_transport(const std::vector<Arrival>& arrivals, Agreement& agreement) {
  const Arrival* const gloo = first_that_asked(arrivals, "gloo");
  const Arrival* const arena = first_that_asked(arrivals, "arena");
  if (gloo && arena) {
    agreement.refusal = fmt::format(
        "all ranks must use one transport; got gloo for {} and arena for {} "
        "(WorldOptions::transport "
        "or TESSERA_TRANSPORT)",
        gloo->describe(), arena->describe());
  } else if (gloo) {
    agreement.transport = Transport::kGloo;
    if (const Arrival* const other = first_that_asked(arrivals, "auto"))
      agreement.warnings.push_back(fmt::format(
          "all ranks communicate over Gloo, because {} has transport gloo; rank {} has auto",
          gloo->describe(), other->name));
  } else if (arena) {
    agreement.transport = Transport::kArena;
  }
}

// A rank that waits for less time fails first, and the others with it: its timeout is that of all.
void agree_on_timeout(const std::vector<Arrival>& arrivals, Agreement& agreement) {
  const auto [least, most] = std::ranges::minmax_element(arrivals, {}, &Arrival::timeout);
  agreement.timeout = milliseconds(least->timeout);
  if (least->timeout != most->timeout)
    agreement.warnings.push_back(
        fmt::format("the timeout of all ranks is {:.1f} s, that of {}; rank {} has {:.1f} s",
                    static_cast<double>(least->timeout) / 1000, least->describe(), most->name,
                    static_cast<double>(most->timeout) / 1000));
}

}  // namespace

std::string Arrival::describe() const {
  return fmt::format("rank {} (process {} on host {})", name, pid, host_name);
}

std::string to_text(const Arrival& arrival) { return nlohmann::json(arrival).dump(); }

Arrival arrival_from_text(const std::string& text) {
  std::string why = "its rank or world size is wrong";
  try {
    auto arrival = nlohmann::json::parse(text).get<Arrival>();
    if (arrival.rank >= 0 && arrival.rank < arrival.size) return arrival;
  } catch (const nlohmann::json::exception& error) {
    why = error.what();
  }
  TORCH_CHECK_VALUE(false, "[init] the store must hold the facts of a rank; got '", text,
                    "': ", why);
}

Attendance::Attendance(Arrival own, std::vector<int> names)
    : own_(std::move(own)), names_(std::move(names)), present_{{own_.rank, own_}} {}

std::string Attendance::own_name() const {
  if (names_.empty())
    return fmt::format("rank {} of {} (host {})", own_.rank, own_.size, own_.host_name);
  return fmt::format("rank {} of ranks {} (host {})", names_[own_.rank], fmt::join(names_, ", "),
                     own_.host_name);
}

void Attendance::note(const Arrival& arrival) {
  const std::lock_guard lock(mutex_);
  present_.insert_or_assign(arrival.rank, arrival);
}

std::vector<Arrival> Attendance::arrivals() const {
  const std::lock_guard lock(mutex_);
  std::vector<Arrival> result;
  for (const auto& [rank, arrival] : present_) result.push_back(arrival);
  return result;
}

std::vector<int> Attendance::missing() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (int rank = 0; rank < own_.size; ++rank)
    if (!present_.contains(rank)) ranks.push_back(rank);
  return ranks;
}

std::string Attendance::describe(const std::vector<int>& ranks) const {
  std::vector<int> named;
  for (const int rank : ranks) named.push_back(names_.empty() ? rank : names_[rank]);
  return ranks_text(named);
}

std::string Attendance::describe_present() const {
  std::vector<int> ranks;
  std::vector<std::string> hosts;
  for (const Arrival& arrival : arrivals()) {
    ranks.push_back(arrival.rank);
    hosts.push_back(arrival.host_name);
  }
  const bool one = ranks.size() == 1;
  const bool all = static_cast<int>(ranks.size()) == own_.size;
  return fmt::format("{} {} there ({} {})", all ? "all ranks" : describe(ranks), one ? "is" : "are",
                     one ? "host" : "hosts", fmt::join(hosts, ", "));
}

bool Attendance::is_first() const {
  const std::lock_guard lock(mutex_);
  return present_.begin()->first == own_.rank;
}

// The state of a process of this host as in /proc ('T': stopped), 'X' if it has ended, 0 if
// unknown.
char Attendance::state_of(const Arrival& arrival) const {
  if (arrival.pid == own_.pid || arrival.host != own_.host || arrival.processes != own_.processes ||
      arrival.processes.empty())
    return 0;
  const auto stat = process_stat(arrival.pid);
  return !stat ? 'X' : stat->state == 't' ? 'T' : stat->state;
}

std::string Attendance::describe_halted() const {
  std::vector<std::string> sentences;
  for (const Arrival& arrival : arrivals()) {
    const char state = state_of(arrival);
    if (state == 'X') sentences.push_back(arrival.describe() + " has ended");
    if (state == 'T') sentences.push_back(arrival.describe() + " is stopped");
  }
  return fmt::format("{}", fmt::join(sentences, ", "));
}

std::string Attendance::long_ended() {
  const auto now = Deadline::Clock::now();
  for (const Arrival& arrival : arrivals()) {
    if (state_of(arrival) != 'X') continue;
    if (now - ended_.emplace(arrival.rank, now).first->second >= kEndedFor)
      return arrival.describe() + " has ended";
  }
  return "";
}

std::string arrive(Attendance& attendance, c10d::Store& store, const Deadline& deadline) {
  ArrivalList list(attendance, store);
  list.join();
  while (true) {
    list.read();
    if (!list.refusal().empty()) return list.refusal();
    if (list.complete()) return list.has_own() ? "" : list.own_contradiction();
    if (deadline.has_passed()) C10_THROW_ERROR(DistNetworkError, "the time is over");
    list.wait_for_last(deadline);
  }
}

void leave_refused(const Attendance& attendance, c10d::Store& store, const Deadline& deadline) {
  store.add("refused", 1);
  if (attendance.own().rank != 0) return;
  const Deadline come(std::min(kAllCome, deadline.left()));
  while (expects_more(attendance.own().launched, store) && !come.has_passed())
    std::this_thread::sleep_for(milliseconds(20));
  const Deadline told(kRefusedTakes);
  while (store.add("refused", 0) < store.add("arrivals", 0) && !told.has_passed())
    std::this_thread::sleep_for(milliseconds(10));
}

Agreement agree(const std::vector<Arrival>& arrivals) {
  Agreement agreement;
  agree_on_transport(arrivals, agreement);
  agree_on_timeout(arrivals, agreement);
  agreement.one_host =
      std::ranges::all_of(arrivals, [&](const Arrival& a) { return a.host == arrivals[0].host; }) ||
      std::ranges::all_of(arrivals, [](const Arrival& a) { return a.local_size == a.size; });
  return agreement;
}

std::string transport_name(Transport transport) {
  switch (transport) {
    case Transport::kGloo:
      return "gloo";
    case Transport::kArena:
      return "arena";
    case Transport::kAuto:
      break;
  }
  return "auto";
}

}  // namespace tessera
