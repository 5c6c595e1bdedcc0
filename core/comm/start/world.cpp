#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/env.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/comm/world.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "base/memory/process_mark.h"
#include "comm/group/environment.h"
#include "comm/group/interruption.h"
#include "comm/group/registered_backends.h"
#include "comm/start/connect.h"
#include "comm/start/deadline.h"
#include "comm/start/process_groups.h"
#include "comm/start/rank_processes.h"
#include "comm/start/rendezvous.h"
#include "comm/start/spawned_rank.h"
#include "comm/start/wait_report.h"

namespace tessera {

struct World::Impl {
  c10::intrusive_ptr<c10d::Store> store;  // closed after the process groups
  std::shared_ptr<ProcessGroups> process_groups;
  ProcessMark mark{};

  ~Impl() {
    if (mark.is_inherited()) {  // a forked child leaves its parent's connections as they are
      static_cast<void>(store.release());
    } else if (SpawnedRank* rank = SpawnedRank::current()) {
      rank->note_closing();
    }
    process_groups->close();
  }
};

namespace {

std::chrono::milliseconds timeout_of(const WorldOptions& options) {
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "[init] `timeout` must be positive; got ",
                    options.timeout.count(), " ms");
  if (options.timeout != WorldOptions().timeout) return options.timeout;
  const auto seconds = environment_number("TESSERA_TIMEOUT");
  TORCH_CHECK_VALUE(
      !seconds || *seconds > 0,
      "[init] TESSERA_TIMEOUT must be a positive number of seconds; got TESSERA_TIMEOUT=",
      *seconds);
  return seconds ? std::chrono::seconds(*seconds) : options.timeout;
}

// Returns the transport that `options` and the environment select.
Transport transport_of(const WorldOptions& options) {
  const auto name = environment("TESSERA_TRANSPORT").value_or("auto");
  TORCH_CHECK_VALUE(name == "auto" || name == "gloo" || name == "arena",
                    "[init] TESSERA_TRANSPORT must be gloo, arena or auto; got '", name, "'");
  if (options.transport != Transport::kAuto || name == "auto") return options.transport;
  return name == "gloo" ? Transport::kGloo : Transport::kArena;
}

// Backends of c10d for host memory that LibTorch's packages are built without.
void check_no_foreign_backend(const std::string& backend) {
  if (find_backend(backend)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      backend != "mpi",
      "[init] `backend` can't be mpi: LibTorch's packages are built without MPI, and Tessera needs "
      "none: a job that mpirun starts connects its ranks by gloo. Leave `backend` out");
  TORCH_CHECK_NOT_IMPLEMENTED(
      backend != "ucc",
      "[init] `backend` can't be ucc: LibTorch's packages are built without UCC. Leave `backend` "
      "out (gloo), or name an accelerator's backend: ",
      fmt::format("{}", fmt::join(backend_names(), ", ")));
}

void check_backend(const std::string& backend) {
  check_no_foreign_backend(backend);
  TORCH_CHECK_VALUE(backend.empty() || backend == "gloo" || find_backend(backend),
                    "[init] `backend` must be gloo or a registered backend (",
                    fmt::format("{}", fmt::join(backend_names(), ", ")), "); got \"", backend,
                    "\"");
}

// LibTorch's settings from Python: reads TORCH_CPP_LOG_LEVEL, and ends errors with stack frames
// only if TORCH_SHOW_CPP_STACKTRACES asks for them. Ten frames of a rank hide its message.
void settle_messages() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::initLogging();
    const auto shows = c10::utils::check_env("TORCH_SHOW_CPP_STACKTRACES");
    if (!shows.value_or(false)) c10::SetStackTraceFetcher([] { return std::string(); });
  });
}

// The settings of a call of init(), of which the deadline runs.
struct Settings {
  std::string backend;
  Transport transport;
  Deadline deadline;
};

// Refuses invalid settings before this rank meets others, who would wait for it.
Settings settings_of(const WorldOptions& options) {
  settle_messages();
  check_backend(options.backend);
  static_cast<void>(report_after());
  return {options.backend, transport_of(options), Deadline(timeout_of(options))};
}

// Joins the ranks that meet at `store`. `launched`: a launcher has started them, and given the
// local rank.
World join(RankInfo info, c10::intrusive_ptr<c10d::Store> store, const Settings& settings,
           bool launched) {
  const Connection made =
      connect({.info = info,
               .store = store,
               .backend = settings.backend,
               .transport = settings.transport,
               .deadline = settings.deadline,
               .launched = launched ? processes_of_launcher(info) : RankProcesses()},
              "init", "init()");
  if (info.rank == 0)
    LOG(INFO) << "[init] " << info.size
              << " ranks; transport: " << made.process_group->backend_name();
  if (!launched) {
    const auto own = made.hosts.begin() + info.rank;
    info.local_rank = static_cast<int>(std::count(made.hosts.begin(), own, *own));
    info.local_size = static_cast<int>(std::count(made.hosts.begin(), made.hosts.end(), *own));
  }
  return World(std::move(info), std::move(store), made.process_group, made.transport,
               settings.backend);
}

// The rank that a process is by its environment, while it has joined or joins: the other ranks wait
// for it once, and rank 0's port can be opened once.
struct EnvironmentRank {
  RankInfo info;
  ProcessMark mark{};
};

std::shared_ptr<const EnvironmentRank> take_environment_rank(const RankInfo& info) {
  static std::mutex mutex;
  static std::weak_ptr<const EnvironmentRank> taken;
  const std::lock_guard lock(mutex);
  const auto other = taken.lock();
  TORCH_CHECK(!other || other->mark.is_inherited(),
              "[init] a process can join the job of its environment once; this one is rank ",
              other->info.rank, " of ", other->info.size,
              " already. Keep its World (new_process_group() makes more process groups), or "
              "destroy it first");
  auto own = std::make_shared<const EnvironmentRank>(EnvironmentRank{info});
  taken = own;
  return own;
}

// Joins the ranks that share `store`.
World join_through(c10::intrusive_ptr<c10d::Store> store, RankInfo info, const Settings& settings) {
  if (info.size == 1) return World(std::move(info), std::move(store), single_process_group());
  const auto fresh = within(
      settings.deadline, [store, size = info.size] { return fresh_store(store, size); }, [] {});
  if (!fresh)
    C10_THROW_ERROR(
        DistNetworkError,
        c10::str("[init] the store must answer within the timeout; rank ", info.rank, " of ",
                 info.size, " waited ", settings.deadline.waited().count(), " s"));
  store = *fresh;
  return join(std::move(info), std::move(store), settings, /*launched=*/false);
}

}  // namespace

World::World(RankInfo info, c10::intrusive_ptr<c10d::Store> store, ProcessGroupPtr process_group,
             Transport transport, const std::string& backend)
    : impl_(new Impl{
          store, std::make_shared<ProcessGroups>(std::move(info), store, std::move(process_group),
                                                 transport, backend)}) {
  set_default(impl_->process_groups);
}

World::~World() = default;
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

int World::rank() const { return info().rank; }
int World::size() const { return info().size; }
int World::local_rank() const { return info().local_rank; }
const RankInfo& World::info() const { return impl_->process_groups->info(); }
const ProcessGroupPtr& World::process_group() const { return impl_->process_groups->world(); }
const c10::intrusive_ptr<c10d::Store>& World::store() const { return impl_->store; }
const std::shared_ptr<ProcessGroups>& World::process_groups() const {
  return impl_->process_groups;
}

ProcessGroupPtr World::new_process_group(const std::vector<int>& ranks) const {
  return impl_->process_groups->make(ranks);
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
  TORCH_CHECK_VALUE(
      process_group->rank() == rank() && process_group->size() == size(),
      "[set_process_group] `process_group` must have the ranks of the world; expected rank ",
      rank(), " of ", size(), ", got rank ", process_group->rank(), " of ", process_group->size());
  impl_->process_groups->set_world(std::move(process_group));
}

World init(const WorldOptions& options) {
  const Settings settings = settings_of(options);
  if (const SpawnedRank* rank = SpawnedRank::current())
    return join_through(rank->world().store, rank->info(), settings);
  RankInfo info = rank_info_from_environment();
  if (info.size == 1)
    return World(std::move(info), c10::make_intrusive<c10d::HashStore>(), single_process_group());
  auto environment_rank = take_environment_rank(info);
  auto store = interruptible(&rendezvous_store, info, settings.deadline);
  World world = join(info, std::move(store), settings, /*launched=*/true);
  if (info.rank == 0 && !options.accepts_clients) refuse_new_clients(info);
  default_process_groups()->keep(std::move(environment_rank));
  return world;
}

World init(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const WorldOptions& options) {
  const Settings settings = settings_of(options);
  TORCH_CHECK_VALUE(store.defined(), "[init] `store` must be given");
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size,
                    "[init] `rank` must be from 0 to `size` - 1; got rank ", rank, " of ", size);
  RankInfo info{.rank = rank, .size = size, .source = "store"};
  return join_through(std::move(store), std::move(info), settings);
}

}  // namespace tessera
