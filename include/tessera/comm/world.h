#pragma once

#include <tessera/comm/process_group.h>
#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

class ProcessGroups;

/// How data of tensors in host memory moves between ranks.
enum class Transport : uint8_t {
  kAuto,   ///< the arena where ranks share a host and its memory, otherwise Gloo
  kGloo,   ///< messages over TCP, also between ranks of one host
  kArena,  ///< ranks of one host read each other's memory; between hosts, messages over Gloo
};

/// How this process joins a job.
struct WorldOptions {
  /// Longest time that any wait may take, `init()` as a whole included. The environment variable
  /// `TESSERA_TIMEOUT` (seconds) overrides the default. If ranks differ, the least holds for all
  /// later waits.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);

  /// `gloo`; or the name of a registered backend, such as `nccl`, over which tensors on devices go,
  /// beside Gloo for those in host memory; empty: `gloo`. See `register_backend()`.
  std::string backend;

  /// For tensors in host memory. If the arena is not available, `kAuto` uses Gloo, and warns unless
  /// this is expected (with one rank per host, or unequal numbers of ranks on the hosts); `kArena`
  /// throws `c10::NotImplementedError` on all ranks. The environment variable `TESSERA_TRANSPORT`
  /// (`gloo`, `arena` or `auto`) overrides `kAuto`. Ranks agree: if some have `kAuto`, they use the
  /// transport of the others.
  Transport transport = Transport::kAuto;

  /// Whether the store at MASTER_PORT goes on to accept connections once all ranks are there, as
  /// those of another library of the job that meets there, too (`torch.distributed`; the Python
  /// package sets it). Otherwise new ones are ignored. c10d's store asks nobody for a password.
  bool accepts_clients = false;
};

/// The position of a rank in its job, as given by the launcher.
struct RankInfo {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::string master_addr;  ///< empty in a world of one
  int master_port = 0;
  /// "torchrun", "mpirun", "srun", "tessera run", "environment", "spawn", "store", "fake" or
  /// "single".
  std::string source;
};

/// Reads the environment of torchrun, `tessera run` or a plain RANK/WORLD_SIZE (first choice),
/// mpirun (OMPI_COMM_WORLD_*) or srun (SLURM_*). Without any of them, returns a world of one.
///
/// Throws `c10::ValueError` for settings that contradict each other or are invalid (a rank not
/// below the world size, a missing MASTER_ADDR, text where a number is expected).
TESSERA_API RankInfo rank_info_from_environment();

/// The process groups for hybrid sharding; see `World::hybrid_process_groups`.
struct HybridProcessGroups {
  ProcessGroupPtr shard;      ///< `ShardPlan::process_group`
  ProcessGroupPtr replicate;  ///< `ShardPlan::replicate_group`
};

/// The ranks of one job: owns the rendezvous store and the process group of all ranks.
///
/// A `World` made by `init()` is the default of the thread that made it until it is destroyed, and
/// of the process's other threads, if one thread has made all existing worlds. Several threads may
/// each have one: then several ranks live in one process. The destructor closes the connections,
/// even if a model still holds the process group, whose collectives throw from then on.
class TESSERA_API World {
 public:
  World(RankInfo info, c10::intrusive_ptr<c10d::Store> store, ProcessGroupPtr process_group,
        Transport transport = Transport::kAuto, const std::string& backend = "");
  ~World();
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;

  int rank() const;
  int size() const;
  int local_rank() const;
  const RankInfo& info() const;
  const ProcessGroupPtr& process_group() const;
  const c10::intrusive_ptr<c10d::Store>& store() const;

  /// Makes a process group of some ranks of this world, in this order.
  ///
  /// Collective over `ranks` alone; a rank that is not one of them gets null at once. Process
  /// groups with ranks in common must be made in the same order by those ranks. It is closed with
  /// the world. Throws `c10::ValueError` for ranks that the world does not have and for duplicate
  /// ranks, and `c10::DistNetworkError` if one of the ranks does not call this within the timeout.
  ProcessGroupPtr new_process_group(const std::vector<int>& ranks) const;

  /// Splits the world into process groups of `shard_size` neighbouring ranks to shard a model over,
  /// and connects the ranks that then hold the same shard. Collective over the world. Throws
  /// `c10::ValueError` unless `shard_size` divides the number of ranks.
  HybridProcessGroups hybrid_process_groups(int shard_size) const;

  /// Replaces the world's process group, say by a decorator of it (counting, tracing, faults).
  void set_process_group(ProcessGroupPtr process_group);

 private:
  friend class DeviceMesh;
  const std::shared_ptr<ProcessGroups>& process_groups() const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Joins the job that the environment describes, or, on a rank of `spawn()`, the job of that call,
/// and makes it the default world of this thread.
///
/// Collective: returns when all ranks have called it, or throws on every rank within the timeout
/// and a second. Every 10 seconds (`TESSERA_REPORT_AFTER`) a line on stderr names the ranks that
/// are missing. Keep the returned object until training ends; its destructor closes the
/// connections. Children of this process do not have the connections.
///
/// From the first call on, errors of LibTorch, and so those of Tessera, show no stack frames,
/// unless the environment has `TORCH_SHOW_CPP_STACKTRACES=1`, as in Python.
///
/// Throws `c10::ValueError` for a contradictory environment, and `c10::DistNetworkError` if the
/// rendezvous is not reached within the timeout (naming the address), if ranks do not come (naming
/// them), if ranks differ in world size, backend or transport, if a rank comes twice, and if
/// another job or service has the port.
[[nodiscard]] TESSERA_API World init(const WorldOptions& options = {});

/// Joins a world whose ranks share `store` (for example threads with one `c10d::HashStore`), as
/// `init(options)` does otherwise.
[[nodiscard]] TESSERA_API World init(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                     const WorldOptions& options = {});

/// Returns the default process group of this thread: that of the newest `World` that the thread has
/// made, else that of the rank that it works for, else one of a single rank. Throws `c10::Error` on
/// a thread that has made no world if the ranks of the process are threads: its rank is then
/// unknown.
TESSERA_API ProcessGroupPtr default_process_group();

/// Ends a wait of the process's first thread for other ranks within half a second, and their errors
/// name this rank. The wait throws what the function of `on_interruption()` throws, or else
/// `c10::DistBackendError`. Async-signal-safe: for handlers of signals.
TESSERA_API void interrupt_waits() noexcept;

/// Sets a function that the first thread calls when `interrupt_waits()` has ended its wait, and
/// before its next wait if it was in none. The function may throw.
TESSERA_API void on_interruption(void (*raise)());

}  // namespace tessera
