#pragma once

#include <c10/util/intrusive_ptr.h>
#include <tessera/comm/world.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "comm/group/collective_watch.h"

namespace tessera {

/// The process groups of a world: that of all ranks, and those of some of them, made on request.
/// The world closes them all; other holders of this object then see them closed.
///
/// [Note: Order of process groups]
/// Ranks that make a process group find each other under keys that contain only its ranks, the kind
/// of request (`make` or `shared`), and the number of earlier requests for these ranks. So a rank
/// need not know which groups other ranks have made, and groups made for other ranks, or for these
/// on another thread, cause no confusion. A thread that waits for a process group holds no lock
/// that another thread needs: that thread can make the next one meanwhile. The condition of all
/// collectives that block remains: there must be one order of all process groups in which the ranks
/// make theirs.
///
/// Threads may use it at the same time, except for `set_world()` and `keep()`.
class ProcessGroups {
 public:
  /// `world` has all ranks. They find each other through `store`, over `transport` and `backend`.
  ProcessGroups(RankInfo info, c10::intrusive_ptr<c10d::Store> store, ProcessGroupPtr world,
                Transport transport, std::string backend = "");
  ~ProcessGroups();
  ProcessGroups(const ProcessGroups&) = delete;
  ProcessGroups& operator=(const ProcessGroups&) = delete;

  const RankInfo& info() const { return info_; }
  int rank() const { return info_.rank; }
  int size() const { return info_.size; }

  const ProcessGroupPtr& world() const { return world_; }
  /// Replaces it by a decorator.
  void set_world(ProcessGroupPtr process_group) { world_ = std::move(process_group); }

  /// See `World::new_process_group()`.
  ProcessGroupPtr make(const std::vector<int>& ranks);

  /// Returns the process group of `ranks`, this rank among them: made on the first call, and the
  /// same one later. Collective over `ranks` when it is made. For all ranks in their order it is
  /// `world()`, also behind a decorator. The reference lives as long as this object.
  ///
  /// Throws `c10::ValueError` as `make()` does, and if this rank is not in `ranks`;
  /// `c10::DistNetworkError` if a rank does not arrive within the timeout, after which the next
  /// call tries again; `c10::DistBackendError` if it would have to be made and the world was
  /// closed.
  const ProcessGroupPtr& shared(const std::vector<int>& ranks);

  /// Keeps `object` until all process groups are closed.
  void keep(std::shared_ptr<const void> object) { kept_ = std::move(object); }

  /// Closes all process groups; no more can be made. May be called again.
  void close() noexcept;
  bool closed() const;

 private:
  /// A process group that is shared, or will be.
  struct SharedGroup {
    std::mutex making;
    ProcessGroupPtr made;  // written once, under `making`
    int attempts = 0;
  };

  void check(const char* function, const std::vector<int>& ranks) const;
  ProcessGroupPtr connect_part(const std::vector<int>& ranks, const std::string& name,
                               const char* function);
  /// Returns null if the ranks do not watch each other.
  std::shared_ptr<CollectiveWatch> watch() const;
  std::shared_ptr<CollectiveWatch> watch_of_part(const std::vector<int>& ranks,
                                                 const std::string& name) const;
  /// Registers it to be closed with the world.
  void add(const ProcessGroupPtr& process_group);
  c10::intrusive_ptr<c10d::Store> open_store(const char* function) const;

  const RankInfo info_;
  const Transport transport_;
  const std::string backend_;
  const ProcessGroupPtr connected_;  // the world as it was connected
  ProcessGroupPtr world_;            // the same, or a decorator
  std::shared_ptr<const void> kept_;

  mutable std::mutex mutex_;  // guards the members below
  bool closed_ = false;
  c10::intrusive_ptr<c10d::Store> store_;                            // null once closed
  std::vector<ProcessGroupPtr> parts_;                               // process groups of some ranks
  std::map<std::string, int> made_;                                  // how many by their ranks
  std::map<std::vector<int>, std::unique_ptr<SharedGroup>> shared_;  // of shared ones
};

/// Returns those of this thread's default world; without one, those of one rank alone.
std::shared_ptr<ProcessGroups> default_process_groups();

/// Makes their world this thread's default one, until they are closed.
void set_default(const std::shared_ptr<ProcessGroups>& process_groups);

}  // namespace tessera
