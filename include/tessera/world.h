#pragma once

#include <tessera/export.h>
#include <tessera/process_group.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

class ProcessGroups;

/// How tensors in host memory get from rank to rank.
enum class Transport : uint8_t {
  kAuto,   ///< the arena where ranks share a host and its memory, else Gloo
  kGloo,   ///< messages over TCP, also between ranks of one host
  kArena,  ///< ranks of one host read each other's memory; between hosts, messages over Gloo
};

/// How this process takes part in a job.
struct WorldOptions {
  /// Longest time that any wait may take, and that the rendezvous may take. The environment
  /// variable `TESSERA_TIMEOUT` (seconds) wins over the default.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);

  /// `gloo` or `nccl`; empty: `gloo`.
  std::string backend;

  /// On the `gloo` backend. Where the arena can't be had, `kAuto` takes Gloo, and warns if that is
  /// unexpected (it can't with a rank per host, or unequal numbers of them); `kArena` throws
  /// `c10::NotImplementedError` on all ranks. The environment variable `TESSERA_TRANSPORT` (`gloo`,
  /// `arena` or `auto`) wins over `kAuto`.
  Transport transport = Transport::kAuto;
};

/// Where a rank stands, as told by the launcher.
struct RankInfo {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  std::string master_addr;  ///< empty in a world of one
  int master_port = 0;
  /// "torchrun", "mpirun", "srun", "tessera run", "environment", "spawn", "store" or "single".
  std::string source;
};

/// Reads the environment of torchrun, `tessera run` or a plain RANK/WORLD_SIZE (first choice),
/// mpirun (OMPI_COMM_WORLD_*) or srun (SLURM_*). With none of them: a world of one.
///
/// Throws `c10::ValueError` for settings that contradict each other (a rank not below the world
/// size, a missing MASTER_ADDR, text where a number is due).
TESSERA_API RankInfo rank_info_from_environment();

/// The process groups that hybrid sharding needs; see `World::hybrid_process_groups`.
struct HybridProcessGroups {
  ProcessGroupPtr shard;      ///< `ShardPlan::process_group`
  ProcessGroupPtr replicate;  ///< `ShardPlan::replicate_group`
};

/// The ranks of one job: owns the rendezvous store and the process group of all ranks.
///
/// A `World` made by `init()` is the default of the thread that made it until it is destroyed, and
/// of the process's other threads, if one thread has made all worlds that are there. Several
/// threads may each have one: then several ranks live in one process. The destructor closes the
/// connections, even if a model still holds the process group, whose collectives throw from then
/// on.
class TESSERA_API World {
 public:
  World(RankInfo info, c10::intrusive_ptr<c10d::Store> store, ProcessGroupPtr process_group,
        Transport transport = Transport::kAuto);
  ~World();
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;

  int rank() const;
  int size() const;
  int local_rank() const;
  const RankInfo& info() const;
  const ProcessGroupPtr& process_group() const;
  const c10::intrusive_ptr<c10d::Store>& store() const;

  /// Connects some ranks of this world, in this order, as a process group of their own.
  ///
  /// Collective over `ranks` alone; a rank that is not one of them gets null at once. Process
  /// groups that have ranks in common must be made in the same order by those ranks. Closed with
  /// the world. Throws `c10::ValueError` for ranks that the world does not have or that come twice,
  /// and `c10::DistNetworkError` when one of them does not call it within the timeout.
  ProcessGroupPtr new_process_group(const std::vector<int>& ranks) const;

  /// Splits the world into process groups of `shard_size` neighbouring ranks, which shard a model,
  /// and connects the ranks that then hold the same shard. Collective over the world.
  /// Throws `c10::ValueError` unless `shard_size` divides the number of ranks.
  HybridProcessGroups hybrid_process_groups(int shard_size) const;

  /// Puts a decorator (counting, tracing, faults) in place of the process group.
  void set_process_group(ProcessGroupPtr process_group);

 private:
  friend class DeviceMesh;
  const std::shared_ptr<ProcessGroups>& process_groups() const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Joins the job that the environment describes, or that of `spawn()` on one of its ranks, and
/// makes it the default world of this thread.
///
/// Collective: returns when all ranks have called it. Keep the returned object until training ends;
/// its destructor closes the connections.
///
/// From the first call on, errors of LibTorch (and Tessera's are such) end without the frames of
/// the stack, unless the environment has `TORCH_SHOW_CPP_STACKTRACES=1`, as in Python.
///
/// Throws `c10::ValueError` for a contradictory environment, and `c10::DistNetworkError` naming the
/// address when the rendezvous is not reached within the timeout.
[[nodiscard]] TESSERA_API World init(const WorldOptions& options = {});

/// Joins a world whose ranks share `store` (for example threads with one `c10d::HashStore`).
[[nodiscard]] TESSERA_API World init(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                     const WorldOptions& options = {});

/// The default process group of this thread: that of the newest `World` that it has made, else of
/// the rank that it works for, else one rank alone. Throws `c10::Error` on a thread that has made
/// none where the ranks of the process are threads: nobody knows which rank it is.
TESSERA_API ProcessGroupPtr default_process_group();

}  // namespace tessera
