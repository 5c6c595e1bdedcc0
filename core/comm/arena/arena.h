#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/memory/page_heap.h"
#include "base/memory/process_mark.h"
#include "comm/arena/ledger.h"
#include "comm/group/collective_form.h"
#include "comm/group/collective_name.h"

namespace tessera {

/// A range of a flat buffer and the address of its data in the rank that published it.
struct ShownPiece {
  int64_t begin = 0, numel = 0;  ///< in elements; in an all-to-all, `begin` is the dtype
  uint64_t address = 0;          ///< 0: no data; reductions read zeros
};

/// The data that a rank publishes for one collective. It lies in the rank's shared heap.
struct Post {
  static constexpr size_t kMaxText = 256;

  uint64_t fingerprint = 0;  ///< hash of everything the ranks must agree on
  int64_t pieces = 0;        ///< number of `ShownPiece`s that follow this struct
  char what[kMaxText] = {};  ///< description of the collective, for errors

  ShownPiece* first_piece() { return reinterpret_cast<ShownPiece*>(this + 1); }
  const ShownPiece* first_piece() const { return reinterpret_cast<const ShownPiece*>(this + 1); }
};

/// Identifies one collective: its form, on which ranks must agree, and its position in its channel.
struct ArenaTicket {
  CollectiveName name;
  std::string what;  ///< text of the collective's form, for errors
  uint64_t fingerprint = 0;
  int64_t number = 0;  ///< the collective's number in its channel; selects the slot

  int channel() const { return static_cast<int>(name.channel); }
};

/// The ranks of one host. They read each other's memory. See [Note: Collectives without messages]
/// in arena.cpp. Several threads of a rank may call its members concurrently.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// Does as much of this rank's share of a collective as the posts published so far allow; returns
  /// true when the outputs are written. Never waits. `awaited`: the ticket whose posts it needs
  /// next; a collective of two rounds moves it to the second.
  using Advance = std::function<bool(Arena& arena, ArenaTicket& awaited)>;

  /// Makes an arena of the ranks that `inner` already connects. Collective. Returns null on all
  /// ranks, with the reason in `why_not`, if any of them can't share memory. `key`: see
  /// `shake_hands()`.
  static std::shared_ptr<Arena> connect(ProcessGroup& inner, const std::string& key,
                                        std::string& why_not);

  int rank() const { return rank_; }
  int size() const { return ledger_.size(); }
  std::chrono::milliseconds timeout() const { return timeout_; }

  /// Reserves the next `count` positions in the order of a channel and returns the first. Waits
  /// only if very many collectives are under way.
  ArenaTicket take_ticket(const char* collective, const CollectiveTag& tag,
                          const CollectiveForm& form, int count = 1);

  void set_watch(std::shared_ptr<CollectiveWatch> watch) { watch_ = std::move(watch); }
  const std::shared_ptr<CollectiveWatch>& watch() const { return watch_; }

  /// Publishes `pieces`; they must lie in memory that the other ranks can reach. Keeps `kept` and
  /// `block` (from `allocate()`, or null) alive until all ranks have read them.
  void show(const ArenaTicket& ticket, const std::vector<ShownPiece>& pieces,
            std::vector<at::Tensor> kept, void* block = nullptr);
  /// Returns the post of `rank` for `ticket`, or null if it has not published one yet. Throws
  /// `c10::DistBackendError` if `rank` issued a different collective at this position.
  const Post* shown(int rank, const ArenaTicket& ticket) const;
  bool all_show(const ArenaTicket& ticket) const;
  /// Returns true once all ranks, this one included, have finished reading the posts for `ticket`.
  bool all_have_read(const ArenaTicket& ticket) const;
  /// Returns the address in this process of the memory that `rank` has published at `address`.
  const std::byte* data(int rank, uint64_t address) const;
  /// Tells all other ranks that this rank has finished reading their posts for `ticket`.
  void done_reading(const ArenaTicket& ticket);

  /// Returns true if the other ranks can read the memory at `data`.
  bool reaches(const void* data) const;
  /// Allocates `nbytes` of memory that the other ranks can read. Throws `c10::OutOfMemoryError`.
  std::byte* allocate(size_t nbytes);

  /// Starts the work of a collective: advances it now as far as possible; later calls and waits do
  /// the rest. Waits for its inputs end when the other ranks have read them.
  WorkPtr start(ArenaTicket ticket, Advance advance);

  /// Makes the waits of this rank's threads fail soon. Called from another thread than theirs.
  void give_up() noexcept;
  /// Removes this rank from the arena: the other ranks' waits for it fail. Waits at most `grace`
  /// for them to read its posts; memory still unread after that is never freed.
  void close(std::chrono::milliseconds grace) noexcept;

 private:
  class Neighbour;
  struct Task;
  class TaskWork;
  struct Shown {
    ArenaTicket ticket;
    std::vector<at::Tensor> kept;
    void* post;
    void* block;
  };
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::recursive_mutex>;
  /// True for a rank that the caller is still waiting for.
  using Lacks = std::function<bool(int rank)>;

  Arena(int rank, std::chrono::milliseconds timeout, PageHeap& heap, Ledger ledger,
        std::vector<std::shared_ptr<Neighbour>> neighbours);

  bool has_read(int rank, const ArenaTicket& ticket) const;
  void progress_locked();
  void wait(const Task& task, bool inputs);
  bool is_done(const Task& task);
  void free_what_is_read();
  void wait_for_slot(const ArenaTicket& ticket);
  void wait_until(const std::function<bool()>& done, const Lacks& lacks, const CollectiveName& name,
                  Lock& lock);
  bool anybody_may_read() const;
  bool spin(uint32_t seen) const;
  void check_neighbours(const Lacks& lacks, const CollectiveName& name,
                        Clock::time_point start) const;

  const ProcessMark mark_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  PageHeap& heap_;  // of this process
  const Ledger ledger_;
  const std::vector<std::shared_ptr<Neighbour>> neighbours_;  // by rank; null for this rank
  const bool all_are_threads_;
  const bool may_spin_;

  std::shared_ptr<CollectiveWatch> watch_;
  std::recursive_mutex mutex_;  // recursive: a task may publish while it advances
  bool closed_ = false;
  std::atomic<bool> gave_up_ = false;
  std::array<int64_t, Ledger::kChannels> next_{};
  std::vector<std::shared_ptr<Task>> tasks_;  // under way, oldest first
  std::deque<Shown> shown_;                   // oldest first
};

}  // namespace tessera
