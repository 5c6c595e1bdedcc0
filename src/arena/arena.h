#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena/ledger.h"
#include "arena/neighbour.h"
#include "group/collective_form.h"
#include "group/collective_name.h"
#include "memory/process_mark.h"

namespace tessera {

/// A range of a flat buffer, and where the rank that shows it has it.
struct ShownPiece {
  int64_t begin = 0, numel = 0;  ///< elements; of an all-to-all, `begin` is the dtype
  uint64_t address = 0;          ///< 0: zeros
};

/// What a rank shows for a collective. Lies in its shared heap.
struct Post {
  static constexpr size_t kMaxText = 256;

  uint64_t fingerprint = 0;  ///< of all that ranks must agree on
  int64_t pieces = 0;        ///< how many follow
  char what[kMaxText] = {};  ///< for errors

  ShownPiece* first_piece() { return reinterpret_cast<ShownPiece*>(this + 1); }
  const ShownPiece* first_piece() const { return reinterpret_cast<const ShownPiece*>(this + 1); }
};

class ArenaTask;

/// What ranks must agree on for one collective, and its place in the order of its channel.
struct ArenaTicket {
  CollectiveName name;
  std::string what;  ///< for errors, of what ranks must agree on
  uint64_t fingerprint = 0;
  int64_t number = 0;  ///< of the slot

  int channel() const { return static_cast<int>(name.channel); }
};

/// The ranks of one host that read each other's memory. See [Note: Collectives without messages] in
/// arena.cpp. Its members may be called by several threads of a rank.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// `inner` connects the ranks already. Collective; null, on all ranks, if one of them can't, and
  /// then `why_not` says why.
  static std::shared_ptr<Arena> connect(ProcessGroup& inner, std::string& why_not);

  int rank() const { return rank_; }
  int size() const { return ledger_->size(); }
  std::chrono::milliseconds timeout() const { return timeout_; }

  /// Takes the next `count` places in the order of a channel, and returns the first. Waits only if
  /// very many collectives are under way.
  ArenaTicket take_ticket(const char* collective, const CollectiveTag& tag,
                        const CollectiveForm& form, int count = 1);

  /// Shows the other ranks `pieces`, which lie in memory that they can reach, and keeps `kept` and
  /// `block` (of `allocate`) until they have read it.
  void show(const ArenaTicket& ticket, const std::vector<ShownPiece>& pieces,
            std::vector<at::Tensor> kept, void* block = nullptr);
  /// What `rank` shows at `ticket`; null as long as it does not. Throws `c10::DistBackendError` if
  /// it came with another collective.
  const Post* shown(int rank, const ArenaTicket& ticket) const;
  bool all_show(const ArenaTicket& ticket) const;
  /// False until `rank` has read what all ranks show at `ticket`.
  bool has_read(int rank, const ArenaTicket& ticket) const;
  bool all_have_read(const ArenaTicket& ticket) const;
  /// Where a piece that `rank` shows lies here.
  const std::byte* data(int rank, const ShownPiece& piece) const;
  /// Tells all other ranks that this one has read what they show at `ticket`.
  void done_reading(const ArenaTicket& ticket);

  /// True if the other ranks can read what lies at `data`.
  bool reaches(const void* data) const;
  /// Memory that the other ranks can read. Throws `c10::OutOfMemoryError`.
  std::byte* allocate(size_t nbytes);
  void free(void* block) { heap_.free(block); }

  /// Has `task` done by the waits and calls that follow, now if it can be.
  void start(const std::shared_ptr<ArenaTask>& task);
  /// True if `wait()` for its outputs would return at once; does what can be done of all tasks.
  bool is_done(ArenaTask& task);
  /// Waits until `task` has written its outputs, or also until its inputs are read.
  void wait(ArenaTask& task, bool inputs);

  /// Makes the waits of this rank's threads fail soon. Called from another thread.
  void give_up() noexcept;
  /// This rank takes part no more: the others' waits for it fail. What they have not read within
  /// `grace` is kept for ever.
  void close(std::chrono::milliseconds grace) noexcept;

 private:
  struct Shown {
    ArenaTicket ticket;
    std::vector<at::Tensor> kept;
    void* post;
    void* block;
  };
  using Clock = std::chrono::steady_clock;

  Arena(int rank, std::chrono::milliseconds timeout, PageHeap& heap, std::shared_ptr<Ledger> ledger,
        std::vector<std::unique_ptr<Neighbour>> neighbours);

  using Lock = std::unique_lock<std::recursive_mutex>;
  /// True for a rank that has not done yet what is waited for.
  using Lacks = std::function<bool(int rank)>;

  void* seen(int rank, uint64_t address) const;
  template <class F>
  void call_locked(ArenaTask& task, F&& f);
  void progress_locked();
  void free_what_is_read();
  void wait_for_slot(const ArenaTicket& ticket);
  void wait_until(const std::function<bool()>& done, const Lacks& lacks, const CollectiveName& name,
                  Lock& lock);
  void wait_in_child(ArenaTask& task) const;
  void keep_all_for_ever();
  bool anybody_may_read() const;
  bool spin(uint32_t seen) const;
  void check_neighbours(const Lacks& lacks, const CollectiveName& name,
                        Clock::time_point start) const;

  const ProcessMark mark_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  PageHeap& heap_;  // of this process
  const std::shared_ptr<Ledger> ledger_;
  const std::vector<std::unique_ptr<Neighbour>> neighbours_;  // by rank; null: this one
  const bool all_are_threads_;
  const bool may_spin_;

  std::recursive_mutex mutex_;  // a task that advances may show something
  bool closed_ = false;
  std::atomic<bool> gave_up_ = false;
  std::array<int64_t, Ledger::kChannels> next_{};
  std::vector<std::shared_ptr<ArenaTask>> tasks_;  // under way, oldest first
  std::deque<Shown> shown_;                        // oldest first
};

/// This rank's part of a collective.
class ArenaTask {
 public:
  explicit ArenaTask(ArenaTicket ticket) : ticket_(std::move(ticket)) {}
  virtual ~ArenaTask() = default;

  /// Does what the other ranks' posts allow; true when the outputs are written. Never waits.
  virtual bool advance(Arena& arena) = 0;
  /// What it waits for: the posts of the other ranks for this ticket.
  virtual const ArenaTicket& awaited() const { return ticket_; }
  const ArenaTicket& ticket() const { return ticket_; }

 protected:
  const ArenaTicket ticket_;

 private:
  friend class Arena;
  bool is_over() const { return is_done_ || error_; }

  bool is_done_ = false;
  std::exception_ptr error_;
};

}  // namespace tessera
