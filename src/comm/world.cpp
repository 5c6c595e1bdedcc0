#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <tessera/world.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "comm/closable.h"
#include "comm/collective_name.h"
#include "comm/environment.h"
#include "comm/rendezvous.h"
#include "comm/spawned_rank.h"
#include "comm/transport.h"

namespace tessera {

struct World::Impl {
  RankInfo info;
  Transport transport;
  c10::intrusive_ptr<c10d::Store> store;  // closed after the process group
  // Shared with the thread whose default world this is, so that it sees when the world has gone.
  std::shared_ptr<ProcessGroupPtr> process_group;
  // The process group that the world was made with; a decorator may have taken its place.
  std::shared_ptr<Closable> closable = std::dynamic_pointer_cast<Closable>(*process_group);
  std::vector<std::shared_ptr<Closable>> parts;  // process groups of some ranks
  std::map<std::string, int> made;               // how many by their ranks

  ~Impl() {
    if (SpawnedRank* rank = SpawnedRank::current()) rank->note_closing();
    for (const auto& part : parts) {
      part->close();
    }
    if (closable) {
      closable->close();
    }
  }
};

namespace {

// Worlds that this thread made, the newest last; some may have gone.
thread_local std::vector<std::weak_ptr<ProcessGroupPtr>> default_worlds;

std::chrono::milliseconds timeout_of(const WorldOptions& options) {
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "[init] `timeout` must be positive; got ",
                    options.timeout.count(), " ms");
  if (options.timeout != WorldOptions().timeout) {
    return options.timeout;
  }
  const auto seconds = environment_number("TESSERA_TIMEOUT");
  TORCH_CHECK_VALUE(!seconds || *seconds > 0,
                    "[init] TESSERA_TIMEOUT must be a positive number of seconds; got TESSERA_TIMEOUT=",
                    *seconds);
  return seconds ? std::chrono::seconds(*seconds) : options.timeout;
}

void check_backend(const std::string& backend) {
  TORCH_CHECK_VALUE(backend.empty() || backend == "gloo" || backend == "nccl",
                    "[init] `backend` must be \"gloo\" or \"nccl\"; got \"", backend, "\"");
}

ProcessGroupPtr make_process_group(const RankInfo& info,
                                   const c10::intrusive_ptr<c10d::Store>& store,
                                   const std::string& backend, Transport transport,
                                   std::chrono::milliseconds timeout) {
  const auto keys = c10::make_intrusive<c10d::PrefixStore>("world", store);
  if (backend == "nccl") {
    return nccl_process_group(keys, info.rank, info.size, timeout);
  }
  const bool one_host = info.local_size == info.size;
  return with_arena(
      gloo_process_group(keys, info.rank, info.size, timeout, one_host ? "127.0.0.1" : ""), keys,
      one_host, transport);
}

// Connects the ranks that find each other through `store`: all return, or fail, together. `call` is
// what all of them must call.
ProcessGroupPtr connect(const RankInfo& info, const c10::intrusive_ptr<c10d::Store>& store,
                        const std::string& backend, Transport transport,
                        std::chrono::milliseconds timeout, const std::string& function,
                        const std::string& call) {
  try {
    ProcessGroupPtr process_group = make_process_group(info, store, backend, transport, timeout);
    // Nobody may leave, and take the store along, while others still connect.
    process_group->barrier({.subject = "world", .channel = Channel::kControl});
    return process_group;
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (...) {
    C10_THROW_ERROR(DistNetworkError, "[" + function + "] rank " + std::to_string(info.rank) +
                                          " of " + std::to_string(info.size) +
                                          " could not connect to all other ranks; expected all of "
                                          "them to call " +
                                          call + ": " + exception_text(std::current_exception()));
  }
}

World join(RankInfo info, c10::intrusive_ptr<c10d::Store> store, const WorldOptions& options,
           std::chrono::milliseconds timeout) {
  const Transport transport = transport_of(options);
  ProcessGroupPtr process_group =
      connect(info, store, options.backend, transport, timeout, "init", "init()");
  if (info.rank == 0)
    LOG(INFO) << "[init] " << info.size << " ranks; transport: " << process_group->backend_name();
  return World(std::move(info), std::move(store), std::move(process_group), transport);
}

World world_of_one(RankInfo info) {
  return World(std::move(info), c10::make_intrusive<c10d::HashStore>(), single_process_group());
}

// Joins the ranks that share `store`.
World join_through(c10::intrusive_ptr<c10d::Store> store, RankInfo info,
                   const WorldOptions& options, std::chrono::milliseconds timeout) {
  if (info.size == 1) return World(std::move(info), std::move(store), single_process_group());
  store = fresh_store(store, info.size);
  const HostPlace place = compare_hosts(*store, info.rank, info.size, timeout);
  info.local_rank = place.local_rank;
  info.local_size = place.local_size;
  return join(std::move(info), std::move(store), options, timeout);
}

std::string text_of(const std::vector<int>& ranks) {
  return c10::str(at::IntArrayRef(std::vector<int64_t>(ranks.begin(), ranks.end())));
}

}  // namespace

World::World(RankInfo info, c10::intrusive_ptr<c10d::Store> store, ProcessGroupPtr process_group,
             Transport transport)
    : impl_(new Impl{std::move(info), transport, std::move(store),
                     std::make_shared<ProcessGroupPtr>(std::move(process_group))}) {
  std::erase_if(default_worlds, [](const auto& world) { return world.expired(); });
  default_worlds.push_back(impl_->process_group);
}

World::~World() = default;
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

int World::rank() const { return impl_->info.rank; }
int World::size() const { return impl_->info.size; }
int World::local_rank() const { return impl_->info.local_rank; }
const RankInfo& World::info() const { return impl_->info; }
const ProcessGroupPtr& World::process_group() const { return *impl_->process_group; }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return impl_->store; }

ProcessGroupPtr World::new_process_group(const std::vector<int>& ranks) const {
  const std::set<int> distinct(ranks.begin(), ranks.end());
  TORCH_CHECK_VALUE(!ranks.empty() && distinct.size() == ranks.size() && *distinct.begin() >= 0 &&
                        *distinct.rbegin() < size(),
                    "[new_process_group] `ranks` must be distinct ranks from 0 to ", size() - 1, "; got ",
                    text_of(ranks));
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  if (own == ranks.end()) return nullptr;
  if (ranks.size() == 1) return single_process_group();
  RankInfo info = impl_->info;
  info.rank = static_cast<int>(own - ranks.begin());
  info.size = static_cast<int>(ranks.size());
  info.local_size = impl_->info.local_size == size() ? info.size : 0;
  std::string name;
  for (const int rank : ranks) name += std::to_string(rank) + ",";
  name += std::to_string(impl_->made[name]++);
  const auto keys = c10::make_intrusive<c10d::PrefixStore>(name, impl_->store);
  const std::string backend = process_group()->backend_name() == "nccl" ? "nccl" : "gloo";
  ProcessGroupPtr made = connect(info, keys, backend, impl_->transport, process_group()->timeout(),
                                 "new_process_group", "new_process_group(" + text_of(ranks) + ")");
  if (auto closable = std::dynamic_pointer_cast<Closable>(made)) impl_->parts.push_back(closable);
  return made;
}

HybridProcessGroups World::hybrid_process_groups(int shard_size) const {
  TORCH_CHECK_VALUE(shard_size >= 1 && size() % shard_size == 0,
                    "[hybrid_process_groups] `shard_size` must divide the number of ranks; got ",
                    shard_size, " for ", size(), " ranks");
  std::vector<int> shard, replicate;
  for (int r = 0; r < size(); ++r) {
    if (r / shard_size == rank() / shard_size) shard.push_back(r);
    if (r % shard_size == rank() % shard_size) replicate.push_back(r);
  }
  return {.shard = new_process_group(shard), .replicate = new_process_group(replicate)};
}

void World::set_process_group(ProcessGroupPtr process_group) {
  TORCH_CHECK_VALUE(process_group != nullptr, "[set_process_group] `process_group` must be given");
  TORCH_CHECK_VALUE(process_group->rank() == rank() && process_group->size() == size(),
                    "[set_process_group] `process_group` must have the ranks of the world; expected rank ",
                    rank(), " of ", size(), ", got rank ", process_group->rank(), " of ",
                    process_group->size());
  *impl_->process_group = std::move(process_group);
}

World init(const WorldOptions& options) {
  check_backend(options.backend);
  const auto timeout = timeout_of(options);
  if (const SpawnedRank* rank = SpawnedRank::current()) {
    return join_through(rank->world().store, rank->info(), options, timeout);
  }
  RankInfo info = rank_info_from_environment();
  if (info.size == 1) {
    return world_of_one(std::move(info));
  }
  auto store = rendezvous_store(info, timeout);
  return join(std::move(info), std::move(store), options, timeout);
}

World init(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const WorldOptions& options) {
  check_backend(options.backend);
  TORCH_CHECK_VALUE(store.defined(), "[init] `store` must be given");
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size,
                    "[init] `rank` must be from 0 to `size` - 1; got rank ", rank, " of ", size);
  const auto timeout = timeout_of(options);
  RankInfo info{.rank = rank, .size = size, .source = "store"};
  return join_through(std::move(store), std::move(info), options, timeout);
}

ProcessGroupPtr default_process_group() {
  while (!default_worlds.empty()) {
    if (const auto process_group = default_worlds.back().lock()) {
      return *process_group;
    }
    default_worlds.pop_back();
  }
  return single_process_group();
}

}  // namespace tessera
