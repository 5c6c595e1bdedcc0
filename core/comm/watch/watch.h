#pragma once

#include <tessera/comm/process_group.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/memory/process_mark.h"
#include "comm/group/collective_watch.h"
#include "comm/group/flight_record.h"
#include "comm/group/progress.h"
#include "comm/watch/datagrams.h"
#include "comm/watch/flight_file.h"
#include "comm/watch/message_seal.h"
#include "comm/watch/rank_view.h"

namespace tessera {

/// This rank's part of the watch that the ranks of a world keep over each other. See [Note: Watch]
/// in watch.cpp. Any thread may call any member.
class Watch : public std::enable_shared_from_this<Watch> {
 public:
  struct Options {
    /// A wait is reported after so long, and again each time it has lasted twice as long.
    std::chrono::milliseconds report_after = std::chrono::seconds(10);
    std::string flight_folder;  ///< empty: no file is written
    std::string secret = {};    ///< of the job; empty: it has none, and the token is the secret
  };

  /// Returns the text that the ranks exchange before `start()`: the endpoint of `socket`, and a
  /// token. Empty for null.
  static std::string endpoint_of(const Datagrams* socket);
  /// Begins the watch of a world. `endpoints`: the texts of all ranks, by rank. Returns null, on
  /// all ranks, if one of them is empty.
  static std::shared_ptr<Watch> start(std::unique_ptr<Datagrams> socket, int rank,
                                      const std::vector<std::string>& endpoints,
                                      const Options& options);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  /// Returns the watch of a process group of `ranks` of the world, in its order, named `label` on
  /// each of them. `is_inner`: the process group works for another one, whose waits are reported.
  std::shared_ptr<CollectiveWatch> group(std::string label, std::vector<int> ranks,
                                         bool is_inner = false);

  /// Tells the other ranks that this one leaves, before it closes its connections. With `why`, or
  /// while an exception unwinds the stack, as the cause of what fails next. Then this rank answers
  /// no more. May be called again.
  void leave(const std::string& why = "") noexcept;
  /// See `CollectiveWatch::has_failed()`.
  bool has_failed() const;

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  // How long the cause of a failed wait is asked for.
  static constexpr auto kCauseLimit = std::chrono::seconds(1);
  // Why a collective of this rank failed, and where it was then: an exception that ends it changes
  // its phase.
  struct OwnFailure {
    WaitCause cause;
    Progress::State at;
  };
  class Group;
  struct GroupState;
  struct Wait;
  struct Peer;

  Watch(int rank, int size, std::string key, Options options, std::unique_ptr<Datagrams> socket);

  void run();
  bool attend();
  void handle(const Message& message);
  void answer(int to, const Question& question);
  void look_at_waits();
  void judge(const std::shared_ptr<Wait>& wait, std::vector<std::function<void()>>& actions);
  static WaitCause ended_cause(int rank);
  static bool has_left_before(const Peer& peer, const CollectiveId& id);
  std::optional<WaitCause> cause_for(const Wait& wait, int rank) const;
  std::optional<WaitCause> told_cause(int peer) const;
  std::shared_ptr<GroupState> group_locked(const CollectiveId& id) const;
  std::optional<WaitCause> best_cause(const CollectiveId& id) const;
  void ask_all_locked(const std::vector<CollectiveId>& ids);
  void send(int to, const Content& content) noexcept;
  void send_to_all(const Content& content) noexcept;
  RankView own_view_locked() const;
  std::string last_collective_locked() const;
  RankView view_of(int rank) const;
  std::vector<RankView> views_for(const GroupState& group) const;
  bool is_blocked_locked() const;
  WaitView view_of_locked(const Wait& wait) const;
  std::vector<int> lacking_locked(const Wait& wait) const;
  void write_flight_file(const std::string& reason, int culprit,
                         const Progress::State& at) noexcept;
  Farewell farewell_locked(const std::string& why, bool by_exception);
  bool take_leave(const std::string& why, bool by_exception, WaitCause& cause);

  const ProcessMark mark_;
  const int rank_;
  const int size_;
  MessageSeal seal_;
  const Options options_;
  const std::unique_ptr<Datagrams> socket_;
  Progress progress_;
  std::atomic<bool> stops_ = false;

  mutable std::mutex mutex_;  // guards the members below
  std::condition_variable heard_;
  std::map<std::string, std::weak_ptr<GroupState>> groups_;
  std::vector<std::shared_ptr<Wait>> waits_;
  std::set<pid_t> issuers_;  // threads that have issued collectives
  std::vector<Peer> peers_;  // by rank
  Clock::time_point last_issued_;
  Clock::time_point last_asked_;
  std::optional<OwnFailure> failure_;
  bool has_left_ = false;
  std::thread thread_;
};

}  // namespace tessera
