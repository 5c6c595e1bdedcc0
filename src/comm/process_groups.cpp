#include "comm/process_groups.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "comm/connect.h"

namespace tessera {
namespace {

// Those of the worlds that this thread made, the newest last; some may have gone.
thread_local std::vector<std::weak_ptr<ProcessGroups>> default_worlds;

bool has_gone(const std::weak_ptr<ProcessGroups>& world) {
  const auto process_groups = world.lock();
  return !process_groups || process_groups->closed();
}

std::string text_of(const std::vector<int>& ranks) { return c10::str(c10::ArrayRef<int>(ranks)); }

std::string name_of(const std::vector<int>& ranks) {
  std::string name;
  for (const int rank : ranks) name += std::to_string(rank) + ",";
  return name;
}

bool is_world(const std::vector<int>& ranks, int size) {
  if (static_cast<int>(ranks.size()) != size) return false;
  for (int rank = 0; rank < size; ++rank)
    if (ranks[rank] != rank) return false;
  return true;
}

}  // namespace

ProcessGroups::ProcessGroups(RankInfo info, c10::intrusive_ptr<c10d::Store> store,
                             ProcessGroupPtr world, Transport transport)
    : info_(std::move(info)),
      transport_(transport),
      world_(std::move(world)),
      closable_(std::dynamic_pointer_cast<Closable>(world_)),
      part_maker_(std::dynamic_pointer_cast<PartMaker>(world_)),
      store_(std::move(store)) {}

ProcessGroups::~ProcessGroups() { close(); }

void ProcessGroups::check(const char* function, const std::vector<int>& ranks) const {
  const std::set<int> distinct(ranks.begin(), ranks.end());
  TORCH_CHECK_VALUE(!ranks.empty() && distinct.size() == ranks.size() && *distinct.begin() >= 0 &&
                        *distinct.rbegin() < size(),
                    "[", function, "] `ranks` must be distinct ranks from 0 to ", size() - 1, "; got ",
                    text_of(ranks));
}

ProcessGroupPtr ProcessGroups::make(const std::vector<int>& ranks) {
  const char* const function = "new_process_group";
  check(function, ranks);
  if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) return nullptr;
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
  if (is_world(ranks, size())) return world_;
  Place* place = nullptr;
  {
    const std::lock_guard lock(mutex_);
    auto found = places_.find(ranks);
    if (found == places_.end()) {
      check(function, ranks);
      TORCH_CHECK_VALUE(std::find(ranks.begin(), ranks.end(), rank()) != ranks.end(), "[", function,
                        "] this rank must be one of `ranks`; expected rank ", rank(),
                        " among them, got ", text_of(ranks));
      found = places_.emplace(ranks, std::make_unique<Place>()).first;
    }
    place = found->second.get();
  }
  // Not `mutex_`: see [Note: Order of process groups].
  const std::lock_guard lock(place->making);
  if (place->made) return place->made;
  if (ranks.size() == 1) return place->made = single_process_group();
  const std::string name = "shared " + name_of(ranks) + std::to_string(place->attempts++);
  return place->made = connect_part(ranks, name, function);
}

ProcessGroupPtr ProcessGroups::connect_part(const std::vector<int>& ranks, const std::string& name,
                                            const char* function) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  RankInfo info = info_;
  info.rank = static_cast<int>(own - ranks.begin());
  info.size = static_cast<int>(ranks.size());
  if (part_maker_) {
    open_store(function);  // throws if the world has gone
    return part_maker_->make_part(info.rank, info.size);
  }
  info.local_size = info_.local_size == size() ? info.size : 0;
  const Meeting meeting{.info = std::move(info),
                        .store = c10::make_intrusive<c10d::PrefixStore>(name, open_store(function)),
                        .backend = world_->backend_name() == "nccl" ? "nccl" : "gloo",
                        .transport = transport_,
                        .timeout = world_->timeout()};
  ProcessGroupPtr made =
      connect(meeting, function, std::string(function) + "(" + text_of(ranks) + ")");
  add(made);
  return made;
}

void ProcessGroups::add(const ProcessGroupPtr& process_group) {
  const auto closable = std::dynamic_pointer_cast<Closable>(process_group);
  if (!closable) return;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      parts_.push_back(closable);
      return;
    }
  }
  // The world went while another thread connected.
  closable->close();
}

c10::intrusive_ptr<c10d::Store> ProcessGroups::open_store(const char* function) const {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, !closed_, "[", function,
                   "] the world must be there; got one that was closed (rank ", rank(), " of ",
                   size(), ")");
  return store_;
}

void ProcessGroups::close() noexcept {
  std::vector<std::shared_ptr<Closable>> parts;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    parts = std::move(parts_);
    store_.reset();
  }
  for (const auto& part : parts) part->close();
  if (closable_) closable_->close();
}

bool ProcessGroups::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

std::shared_ptr<ProcessGroups> default_process_groups() {
  std::erase_if(default_worlds, has_gone);
  if (!default_worlds.empty()) {
    if (auto process_groups = default_worlds.back().lock()) return process_groups;
  }
  return std::make_shared<ProcessGroups>(RankInfo(), c10::make_intrusive<c10d::HashStore>(),
                                         single_process_group(), Transport::kAuto);
}

void set_default(const std::shared_ptr<ProcessGroups>& process_groups) {
  std::erase_if(default_worlds, has_gone);
  default_worlds.push_back(process_groups);
}

ProcessGroupPtr default_process_group() { return default_process_groups()->world(); }

}  // namespace tessera
