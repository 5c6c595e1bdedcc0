#include "comm/start/process_groups.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <ranges>
#include <set>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "comm/group/capability.h"
#include "comm/start/connect.h"
#include "comm/start/spawned_rank.h"

namespace tessera {
namespace {

// [Note: Default worlds]
//
// Ranks may be threads, so each thread has a default world of its own: the newest of those that it
// has made. A thread that has made none may work for a rank: a data loader, an evaluation, a thread
// of autograd. To treat it as alone in a world would be a silent error: a model that it shards
// would be whole on each rank. If one thread made all worlds of the process, the process is one
// rank, and its other threads share them. LibTorch's own threads carry the rank that they work for.
// Otherwise the rank of a thread is unknown, and to ask for its world is an error.

// A world, while it exists, and the thread that made it.
struct MadeWorld {
  std::weak_ptr<ProcessGroups> process_groups;
  uint64_t thread;
  const SpawnedRank* rank;  // null: no rank of spawn()
};

std::mutex made_worlds_mutex;
std::vector<MadeWorld> made_worlds;  // of all threads; the newest last

uint64_t number_of_thread() {
  static std::atomic<uint64_t> next = 0;
  thread_local const uint64_t number = next++;
  return number;
}

bool has_gone(const MadeWorld& world) {
  const auto process_groups = world.process_groups.lock();
  return !process_groups || process_groups->closed();
}

std::vector<MadeWorld> open_worlds() {
  const std::lock_guard lock(made_worlds_mutex);
  std::erase_if(made_worlds, has_gone);
  return made_worlds;
}

// Returns the world of other threads that the calling thread belongs to. Null: it is alone.
std::shared_ptr<ProcessGroups> world_of_others(std::vector<MadeWorld> worlds) {
  const SpawnedRank* const rank = SpawnedRank::current();
  std::erase_if(worlds, [rank](const MadeWorld& world) {
    const auto process_groups = world.process_groups.lock();
    return !process_groups || process_groups->size() == 1 || (rank && world.rank != rank);
  });
  if (worlds.empty()) return nullptr;
  const MadeWorld& newest = worlds.back();
  const bool is_one_rank = std::all_of(worlds.begin(), worlds.end(), [&](const MadeWorld& world) {
    return world.thread == newest.thread && world.rank == rank;
  });
  TORCH_CHECK(is_one_rank,
              "[default_process_group] this thread must belong to a rank; it has made no world, "
              "and the ranks of this process are other threads. Call this on the thread that "
              "called init(), or name the process group (ShardPlan::process_group)");
  return newest.process_groups.lock();
}

std::string text_of(const std::vector<int>& ranks) { return c10::str(c10::ArrayRef<int>(ranks)); }

std::string name_of(const std::vector<int>& ranks) {
  std::string name;
  for (const int rank : ranks) name += std::to_string(rank) + ",";
  return name;
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

}  // namespace

ProcessGroups::ProcessGroups(RankInfo info, c10::intrusive_ptr<c10d::Store> store,
                             ProcessGroupPtr world, Transport transport, std::string backend)
    : info_(std::move(info)),
      transport_(transport),
      backend_(std::move(backend)),
      connected_(std::move(world)),
      world_(connected_),
      store_(std::move(store)) {}

ProcessGroups::~ProcessGroups() { close(); }

void ProcessGroups::check(const char* function, const std::vector<int>& ranks) const {
  const std::set<int> distinct(ranks.begin(), ranks.end());
  TORCH_CHECK_VALUE(!ranks.empty() && distinct.size() == ranks.size() && *distinct.begin() >= 0 &&
                        *distinct.rbegin() < size(),
                    "[", function, "] `ranks` must be distinct ranks from 0 to ", size() - 1,
                    "; got ", text_of(ranks));
}

ProcessGroupPtr ProcessGroups::make(const std::vector<int>& ranks) {
  const char* const function = "new_process_group";
  check(function, ranks);
  if (!contains(ranks, rank())) return nullptr;
  if (ranks.size() == 1) return single_process_group();
  std::string name = name_of(ranks);
  {
    const std::lock_guard lock(mutex_);
    name += std::to_string(made_[name]++);
  }
  return connect_part(ranks, name, function);
}

const ProcessGroupPtr& ProcessGroups::shared(const std::vector<int>& ranks) {
  const char* const function = "process_group";
  if (std::ranges::equal(ranks, std::views::iota(0, size()))) return world_;
  SharedGroup* group = nullptr;
  {
    const std::lock_guard lock(mutex_);
    auto found = shared_.find(ranks);
    if (found == shared_.end()) {
      check(function, ranks);
      TORCH_CHECK_VALUE(contains(ranks, rank()), "[", function,
                        "] this rank must be one of `ranks`; expected rank ", rank(),
                        " among them, got ", text_of(ranks));
      found = shared_.emplace(ranks, std::make_unique<SharedGroup>()).first;
    }
    group = found->second.get();
  }
  // Not `mutex_`: see [Note: Order of process groups].
  const std::lock_guard lock(group->making);
  if (group->made) return group->made;
  if (ranks.size() == 1) return group->made = single_process_group();
  const std::string name = "shared " + name_of(ranks) + std::to_string(group->attempts++);
  return group->made = connect_part(ranks, name, function);
}

ProcessGroupPtr ProcessGroups::connect_part(const std::vector<int>& ranks, const std::string& name,
                                            const char* function) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  RankInfo info = info_;
  info.rank = static_cast<int>(own - ranks.begin());
  info.size = static_cast<int>(ranks.size());
  if (const auto* const part_maker = capability<MakesParts>(*connected_)) {
    open_store(function);  // throws if the world was closed
    return part_maker->make_part(info.rank, info.size);
  }
  info.local_size = info_.local_size == size() ? info.size : 0;
  const Meeting meeting{.info = std::move(info),
                        .store = c10::make_intrusive<c10d::PrefixStore>(name, open_store(function)),
                        .backend = backend_,
                        .transport = transport_,
                        .deadline = Deadline(world_->timeout()),
                        .names = ranks,
                        .watch = watch_of_part(ranks, name)};
  const ProcessGroupPtr made =
      connect(meeting, function, std::string(function) + "(" + text_of(ranks) + ")").process_group;
  add(made);
  return made;
}

std::shared_ptr<CollectiveWatch> ProcessGroups::watch() const {
  const auto* const watchable = capability<Watchable>(*connected_);
  return watchable ? watchable->watch() : nullptr;
}

std::shared_ptr<CollectiveWatch> ProcessGroups::watch_of_part(const std::vector<int>& ranks,
                                                              const std::string& name) const {
  const auto whole = watch();
  return whole ? whole->part(name, ranks, /*is_inner=*/false) : nullptr;
}

void ProcessGroups::add(const ProcessGroupPtr& process_group) {
  if (!capability<Closable>(*process_group)) return;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) return parts_.push_back(process_group);
  }
  tessera::close(process_group);  // the world was closed while another thread connected
}

c10::intrusive_ptr<c10d::Store> ProcessGroups::open_store(const char* function) const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, "[", function,
                   "] the world must be open; got one that was closed (rank ", rank(), " of ",
                   size(), ")");
  return store_;
}

void ProcessGroups::close() noexcept {
  std::vector<ProcessGroupPtr> parts;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    parts = std::move(parts_);
    store_.reset();
  }
  if (const auto watching = watch()) watching->leave();
  for (const ProcessGroupPtr& part : parts) tessera::close(part);
  tessera::close(connected_);
  kept_.reset();
}

bool ProcessGroups::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

std::shared_ptr<ProcessGroups> default_process_groups() {
  const std::vector<MadeWorld> worlds = open_worlds();
  const auto own = std::find_if(
      worlds.rbegin(), worlds.rend(),
      [thread = number_of_thread()](const auto& world) { return world.thread == thread; });
  auto found = own != worlds.rend() ? own->process_groups.lock() : world_of_others(worlds);
  if (found) return found;
  return std::make_shared<ProcessGroups>(RankInfo(), c10::make_intrusive<c10d::HashStore>(),
                                         single_process_group(), Transport::kAuto);
}

void set_default(const std::shared_ptr<ProcessGroups>& process_groups) {
  const std::lock_guard lock(made_worlds_mutex);
  std::erase_if(made_worlds, has_gone);
  made_worlds.push_back({process_groups, number_of_thread(), SpawnedRank::current()});
}

ProcessGroupPtr default_process_group() { return default_process_groups()->world(); }

}  // namespace tessera
