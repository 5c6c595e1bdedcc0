#include "comm/arena/arena.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "base/memory/tensor_allocator.h"
#include "comm/arena/handshake.h"
#include "comm/group/interruption.h"

namespace tessera {

// [Note: Collectives without messages]
//
// Ranks of one host have mapped each other's heaps. In a collective each rank publishes where its
// data lies (a post), waits for the posts that it needs, and reads the data in place. No rank
// copies on behalf of another, and there are no helper threads: a rank does its share of a
// collective when it waits for it, and its share of all others under way whenever it calls into the
// arena. A rank keeps published data until all other ranks have reported that they have read it.
//
// A channel's collectives are numbered equally on all ranks; the post of number n lies in slot
// n % kSlots. The fingerprint detects a rank that issues a different collective than the rest.
//
// Each rank has a bell. A rank that publishes a post or finishes reading rings the others' bells. A
// waiting rank notes its bell's count, does the work it can, and sleeps only if the bell has not
// rung since: briefly by spinning, then in the kernel. It wakes at intervals to check that the
// others are alive.
namespace {

constexpr auto kLongestSleep = std::chrono::milliseconds(100);
// About the cost of going to sleep and being woken.
constexpr auto kSpin = std::chrono::microseconds(100);

uint32_t count_of(const ArenaTicket& ticket) { return static_cast<uint32_t>(ticket.number + 1); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// The cause for which another thread ends a wait of this one.
class AbortedBy {
 public:
  explicit AbortedBy(Bell& bell) : bell_(bell) {}

  void set(const WaitCause& cause) {
    {
      const std::lock_guard lock(mutex_);
      cause_ = cause;
    }
    bell_.ring();
  }
  std::optional<WaitCause> cause() const {
    const std::lock_guard lock(mutex_);
    return cause_;
  }

 private:
  Bell& bell_;
  mutable std::mutex mutex_;
  std::optional<WaitCause> cause_;
};

}  // namespace

// Another rank of this host, in another process or in another thread of this one. Gives access to
// its memory and reports whether it is alive.
class Arena::Neighbour {
 public:
  // `heap`: handle of the rank's shared heap; `base`: the heap's address in that rank.
  Neighbour(const SharedMemoryHandle& heap, uint64_t base) : pid_(heap.pid), base_(base) {
    auto memory = SharedMemory::open(heap);
    if (reinterpret_cast<uint64_t>(memory->data()) == base && pid_ == ::getpid()) return;
    heap_ = std::move(memory);
    heap_->close_descriptor();
    // A pidfd always refers to the same process, while a pid may be reused. The id of its memory
    // was checked just now, so this is the right process.
    pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
    if (pidfd_ < 0) {
      throw std::system_error(errno, std::generic_category(),
                              fmt::format("could not watch process {} (pidfd_open)", pid_));
    }
  }
  ~Neighbour() {
    if (pidfd_ >= 0) ::close(pidfd_);
  }
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;

  // Returns true if the rank is a thread of this process, with the same addresses.
  bool is_thread_here() const { return heap_ == nullptr; }
  int64_t pid() const { return pid_; }
  // Returns the address in this process of the rank's memory at `address`. It must be in the rank's
  // shared heap, unless the rank is a thread of this process.
  const std::byte* seen_from_here(uint64_t address) const {
    return is_thread_here() ? reinterpret_cast<const std::byte*>(address)
                            : heap_->data() + (address - base_);
  }
  // Returns true once its process has ended. Makes a system call.
  bool has_died() const {
    if (pidfd_ < 0) return false;
    pollfd entry{.fd = pidfd_, .events = POLLIN, .revents = 0};
    return ::poll(&entry, 1, 0) > 0;
  }

 private:
  int64_t pid_;
  uint64_t base_;
  std::shared_ptr<SharedMemory> heap_;  // null: a thread of this process
  int pidfd_ = -1;
};

struct Arena::Task {
  bool is_over() const { return is_done || error; }

  ArenaTicket awaited;
  Advance advance;
  bool is_done = false;
  std::exception_ptr error;
};

class Arena::TaskWork final : public Work {
 public:
  TaskWork(std::shared_ptr<Arena> arena, std::shared_ptr<Task> task)
      : arena_(std::move(arena)), task_(std::move(task)) {}

  void wait() override { interruptible(&Arena::wait, arena_, *task_, /*inputs=*/false); }
  void wait_inputs() override { interruptible(&Arena::wait, arena_, *task_, /*inputs=*/true); }
  bool is_completed() override { return arena_->is_done(*task_); }

 private:
  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<Task> task_;
};

Arena::Arena(int rank, std::chrono::milliseconds timeout, PageHeap& heap, Ledger ledger,
             std::vector<std::shared_ptr<Neighbour>> neighbours)
    : rank_(rank),
      timeout_(timeout),
      heap_(heap),
      ledger_(std::move(ledger)),
      neighbours_(std::move(neighbours)),
      all_are_threads_(
          std::all_of(neighbours_.begin(), neighbours_.end(),
                      [](const auto& other) { return !other || other->is_thread_here(); })),
      may_spin_(size() <= static_cast<int>(std::thread::hardware_concurrency())) {}

std::shared_ptr<Arena> Arena::connect(ProcessGroup& inner, const std::string& key,
                                      std::string& why_not) {
  PageHeap* heap = nullptr;
  std::shared_ptr<SharedMemory> ledger;
  std::vector<std::shared_ptr<Neighbour>> neighbours;
  const auto show = [&] {
    heap = &shared_heap(inner.size());
    const std::string own = fmt::format("{}\n{}", heap->shared()->handle().to_text(),
                                        reinterpret_cast<uint64_t>(heap->shared()->data()));
    if (inner.rank() != 0) return own;
    ledger = SharedMemory::create("tessera ledger", Ledger::nbytes(inner.size()));
    return own + "\n" + ledger->handle().to_text();
  };
  why_not = shake_hands(inner, key, show, [&](int rank, const std::vector<std::string>& lines) {
    std::shared_ptr<Neighbour>& neighbour = neighbours.emplace_back();
    if (rank == inner.rank()) return;
    if (rank == 0) ledger = SharedMemory::open(SharedMemoryHandle::from_text(lines.at(2)));
    neighbour = std::make_shared<Neighbour>(SharedMemoryHandle::from_text(lines.at(0)),
                                            std::stoull(lines.at(1)));
  });
  if (!why_not.empty()) return nullptr;
  ledger->close_descriptor();
  return std::shared_ptr<Arena>(new Arena(inner.rank(), inner.timeout(), *heap,
                                          Ledger(std::move(ledger), inner.size()),
                                          std::move(neighbours)));
}

ArenaTicket Arena::take_ticket(const char* collective, const CollectiveTag& tag,
                               const CollectiveForm& form, int count) {
  ArenaTicket ticket{
      .name = {collective, std::string(tag.subject), tag.channel, 0, rank_, size(), watch_},
      .what = form.text(),
      .fingerprint = form.fingerprint()};
  check_process(mark_, ticket.name);
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, !closed_, "[", collective, "] unit '", tag.subject,
                     "': rank ", rank_, " of ", size(), " has left: its world was destroyed");
    ticket.number = ticket.name.sequence = next_[ticket.channel()];
    next_[ticket.channel()] += count;
  }
  if (watch_) ticket.name.record = watch_->issued(ticket.name, form);
  for (ArenaTicket last = ticket; last.number < ticket.number + count; ++last.number)
    interruptible(&Arena::wait_for_slot, this, last);
  return ticket;
}

std::byte* Arena::allocate(size_t nbytes) {
  void* const block = heap_.allocate(nbytes);
  TORCH_CHECK_WITH(OutOfMemoryError, block, "[arena] rank ", rank_, " of ", size(),
                   " has no addresses left in its shared heap for ", nbytes, " bytes");
  return static_cast<std::byte*>(block);
}

bool Arena::reaches(const void* data) const { return all_are_threads_ || heap_.owns(data); }

void Arena::show(const ArenaTicket& ticket, const std::vector<ShownPiece>& pieces,
                 std::vector<at::Tensor> kept, void* block) {
  const size_t nbytes = sizeof(Post) + pieces.size() * sizeof(ShownPiece);
  auto* const post = new (allocate(nbytes)) Post();
  post->fingerprint = ticket.fingerprint;
  post->pieces = static_cast<int64_t>(pieces.size());
  ticket.what.copy(post->what, Post::kMaxText - 1);
  std::uninitialized_copy(pieces.begin(), pieces.end(), post->first_piece());
  {
    const std::lock_guard lock(mutex_);
    shown_.push_back({ticket, std::move(kept), post, block});
  }
  PostSlot& slot = ledger_.slot(rank_, ticket.channel(), ticket.number);
  slot.address = reinterpret_cast<uint64_t>(post);
  slot.shown.store(count_of(ticket), std::memory_order_release);
  ledger_.ring_others(rank_);
}

const Post* Arena::shown(int rank, const ArenaTicket& ticket) const {
  const PostSlot& slot = ledger_.slot(rank, ticket.channel(), ticket.number);
  if (slot.shown.load(std::memory_order_acquire) != count_of(ticket)) return nullptr;
  const auto* const post = reinterpret_cast<const Post*>(data(rank, slot.address));
  if (post->fingerprint != ticket.fingerprint) {
    const std::string theirs(post->what, strnlen(post->what, Post::kMaxText));
    const int named = watch_ ? watch_->world_rank(rank) : rank;
    throw_disagreement(ticket.name, rank,
                       differing_order(ticket.number, ticket.what, named, theirs));
  }
  return post;
}

bool Arena::all_show(const ArenaTicket& ticket) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (!shown(rank, ticket)) return false;
  }
  return true;
}

const std::byte* Arena::data(int rank, uint64_t address) const {
  return rank == rank_ ? reinterpret_cast<const std::byte*>(address)
                       : neighbours_[rank]->seen_from_here(address);
}

void Arena::done_reading(const ArenaTicket& ticket) {
  PostSlot& slot = ledger_.slot(rank_, ticket.channel(), ticket.number);
  slot.read.store(count_of(ticket), std::memory_order_release);
  ledger_.ring_others(rank_);
}

bool Arena::has_read(int rank, const ArenaTicket& ticket) const {
  const PostSlot& slot = ledger_.slot(rank, ticket.channel(), ticket.number);
  // Not a test for equality: a later collective may already use the slot.
  return static_cast<int32_t>(slot.read.load(std::memory_order_acquire) - count_of(ticket)) >= 0;
}

bool Arena::all_have_read(const ArenaTicket& ticket) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (!has_read(rank, ticket)) return false;
  }
  return true;
}

void Arena::free_what_is_read() {
  std::erase_if(shown_, [&](Shown& shown) {
    if (!all_have_read(shown.ticket)) return false;
    heap_.free(shown.post);
    if (shown.block) heap_.free(shown.block);
    return true;
  });
}

WorkPtr Arena::start(ArenaTicket ticket, Advance advance) {
  const auto task = std::make_shared<Task>(Task{std::move(ticket), std::move(advance)});
  const std::lock_guard lock(mutex_);
  tasks_.push_back(task);
  progress_locked();
  return std::make_shared<TaskWork>(shared_from_this(), task);
}

void Arena::progress_locked() {
  std::erase_if(tasks_, [&](const std::shared_ptr<Task>& task) {
    try {
      task->is_done = task->advance(*this, task->awaited);
      if (task->is_done && watch_) watch_->completed(task->awaited.name.record);
    } catch (...) {
      task->error = std::current_exception();  // waits for the task rethrow it
    }
    return task->is_over();
  });
  free_what_is_read();
}

void Arena::wait_until(const std::function<bool()>& done, const Lacks& lacks,
                       const CollectiveName& name, Lock& lock) {
  progress_locked();
  if (done()) return;
  const auto start = Clock::now();
  Bell& bell = ledger_.bell(rank_);
  AbortedBy aborted(bell);
  std::shared_ptr<void> watched;  // only a wait that is long enough to sleep
  while (true) {
    const uint32_t seen = bell.rings.load(std::memory_order_seq_cst);
    progress_locked();
    if (done()) return;
    TORCH_CHECK_WITH(DistBackendError, !gave_up_.load(std::memory_order_acquire), name.describe(),
                     " gave up waiting: the process group was closed");
    if (const auto cause = aborted.cause()) throw_wait_aborted(name, *cause);
    lock.unlock();
    if (watch_ && !watched && Clock::now() - start > kLongestSleep)
      watched = watch_->begin_wait(name, [&](const WaitCause& cause) { aborted.set(cause); });
    const bool has_slept = !may_spin_ || !spin(seen);
    if (has_slept) bell.sleep(seen, kLongestSleep);
    lock.lock();
    // No ring since `seen`, so all posts that a rank published before it left have been handled.
    if (has_slept && bell.rings.load(std::memory_order_acquire) == seen)
      check_neighbours(lacks, name, start);
  }
}

void Arena::wait(const Task& task, bool inputs) {
  const CollectiveName& name = task.awaited.name;
  if (mark_.is_inherited()) {
    // A task that was done before the fork stays done; any other never completes in the child.
    if (task.error) std::rethrow_exception(task.error);
    if (!task.is_done) check_process(mark_, name);
    return;
  }
  Lock lock(mutex_);
  wait_until([&] { return task.is_over(); }, [&](int rank) { return !shown(rank, task.awaited); },
             name, lock);
  if (task.error) std::rethrow_exception(task.error);
  if (!inputs) return;
  wait_until([&] { return all_have_read(task.awaited); },
             [&](int rank) { return !has_read(rank, task.awaited); }, name, lock);
}

bool Arena::is_done(const Task& task) {
  if (mark_.is_inherited()) return task.is_over();
  const std::lock_guard lock(mutex_);
  if (!task.is_over()) progress_locked();
  return task.is_over();
}

// Waits only if some rank is `kSlots` collectives behind.
void Arena::wait_for_slot(const ArenaTicket& ticket) {
  if (ticket.number < Ledger::kSlots) return;
  ArenaTicket last = ticket;
  last.number -= Ledger::kSlots;
  Lock lock(mutex_);
  // Waits for this rank's own reading, too: it would look like a reading of the new collective.
  wait_until([&] { return all_have_read(last); }, [&](int rank) { return !has_read(rank, last); },
             ticket.name, lock);
}

bool Arena::spin(uint32_t seen) const {
  const Bell& bell = ledger_.bell(rank_);
  const auto end = Clock::now() + kSpin;
  while (Clock::now() < end) {
    for (int i = 0; i < 32; ++i) {
      if (bell.rings.load(std::memory_order_acquire) != seen) return true;
      pause();
    }
  }
  return false;
}

void Arena::check_neighbours(const Lacks& lacks, const CollectiveName& name,
                             Clock::time_point start) const {
  const auto waited = Clock::now() - start;
  const auto fail = [&](int rank, bool has_ended, const std::string& why) {
    throw_wait_failed(name, Awaited::one(rank, has_ended), waited, timeout_,
                      std::make_exception_ptr(std::runtime_error(why)));
  };
  int missing = -1, left = -1;
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_ || !lacks(rank)) continue;
    if (missing < 0) missing = rank;
    if (left < 0 && ledger_.bell(rank).closed.load(std::memory_order_acquire) != 0) left = rank;
  }
  // A rank may have left because another one died; report the death.
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_ || !(left >= 0 || lacks(rank)) || !neighbours_[rank]->has_died()) continue;
    if (ledger_.bell(rank).closed.load(std::memory_order_acquire) == 0)
      fail(rank, true, fmt::format("its process, {}, has ended", neighbours_[rank]->pid()));
  }
  if (left >= 0) fail(left, false, "it has left: its world was destroyed");
  if (waited >= timeout_) throw_wait_failed(name, Awaited::one(missing), waited, timeout_, nullptr);
}

void Arena::give_up() noexcept {
  if (mark_.is_inherited()) return;
  gave_up_.store(true, std::memory_order_release);
  ledger_.bell(rank_).ring();
}

void Arena::close(std::chrono::milliseconds grace) noexcept {
  if (mark_.is_inherited()) return;
  Lock lock(mutex_);
  if (std::exchange(closed_, true)) return;
  ledger_.bell(rank_).closed.store(1, std::memory_order_release);
  ledger_.ring_others(rank_);
  const auto end = Clock::now() + grace;
  while (true) {
    progress_locked();
    if (!anybody_may_read() || Clock::now() >= end) break;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  // Tensors that others may still read are never freed; their tickets, which hold the watch, are.
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::vector<at::Tensor>>();
  const std::lock_guard kept_lock(mutex);
  for (Shown& shown : std::exchange(shown_, {})) kept->push_back(std::move(shown.kept));
}

// Returns true if a rank that is still in the arena has not read all posts of this one.
bool Arena::anybody_may_read() const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_ || ledger_.bell(rank).closed.load(std::memory_order_acquire) != 0 ||
        neighbours_[rank]->has_died())
      continue;
    for (const Shown& shown : shown_) {
      if (!has_read(rank, shown.ticket)) return true;
    }
  }
  return false;
}

}  // namespace tessera
