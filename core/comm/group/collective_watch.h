#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/group/progress.h"

namespace tessera {

class CollectiveForm;
struct CollectiveName;

/// How the cause of a failure is known; a later kind outranks an earlier one.
enum class Evidence : uint8_t {
  kNone,      ///< it is not
  kInferred,  ///< a rank has not done what others wait for, or they wait in a cycle
  kReported,  ///< the rank has said so: an exception has ended it, or it has left
  kSeen,      ///< its process has ended, or it issued another collective
};

/// Identifies a collective among all process groups of a world.
struct CollectiveId {
  std::string group;
  int channel = 0;
  int64_t number = 0;

  bool operator==(const CollectiveId&) const = default;
};

/// What the rank that found another one to issue another collective has issued itself: of two that
/// differ, a third rank can tell by its own which one is alone.
struct Disagreement {
  CollectiveId at = {};
  uint64_t fingerprint = 0;
  std::string issued = {};
};

/// The rank that made a wait fail, and how, as far as the ranks know.
struct WaitCause {
  int rank = -1;  ///< in the world; -1: unknown
  std::string why = {};
  Evidence evidence = Evidence::kNone;
  std::optional<Disagreement> found = {};  ///< if `rank` issued another collective
};

/// Records the collectives of one process group on this rank, and explains its waits: the ranks
/// tell each other where they are, and why they fail. Any thread may call any member.
class CollectiveWatch {
 public:
  /// Makes a wait fail soon, with an error that gives the reason. Called from another thread.
  using Abort = std::function<void(const WaitCause& cause)>;

  virtual ~CollectiveWatch() = default;

  /// Returns a watch for a process group of some of this one's ranks, in that order. `name` must be
  /// the same on all of them, and of no other part. `is_inner`: the part works for this process
  /// group, whose waits are the ones to report.
  virtual std::shared_ptr<CollectiveWatch> part(const std::string& name,
                                                const std::vector<int>& ranks, bool is_inner) = 0;

  /// Returns the number in the world of rank `rank` of the process group.
  virtual int world_rank(int rank) const = 0;
  virtual Progress& progress() = 0;
  /// Returns this rank's position in its training, as "in backward of step 5"; empty before the
  /// first step.
  virtual std::string place() const = 0;

  /// Records a collective that this rank issues; returns the number of the record.
  virtual int64_t issued(const CollectiveName& name, const CollectiveForm& form) = 0;
  virtual void completed(int64_t record) = 0;

  /// Registers a wait for a collective until the returned object is destroyed. A long wait is
  /// reported; one that can't succeed is aborted.
  virtual std::shared_ptr<void> begin_wait(const CollectiveName& name, Abort abort) = 0;

  /// Returns why a wait for `peer` (-1: for any rank) ends with an error, for which it looks for
  /// the best evidence. Asks the other ranks, and waits up to a second for their answers, unless
  /// `timed_out`. `has_ended`: the process of `peer` was seen to end.
  virtual WaitCause cause_of(const CollectiveName& name, int peer, bool timed_out,
                             bool has_ended) = 0;
  /// Tells the other ranks of the world that this one closes its connections, or that it takes no
  /// further part because of the error `why`. If `why` is empty, an exception that unwinds the
  /// stack is the cause.
  virtual void leave(const std::string& why = {}) noexcept = 0;
  /// Returns true if a collective has failed on this rank, or if it has left because of an error.
  virtual bool has_failed() const = 0;
  /// Tells the other ranks that the collective failed on this one, with the whole error.
  virtual void failed(const CollectiveName& name, const WaitCause& cause,
                      const std::string& error) = 0;
};

/// A process group whose collectives can be watched.
class Watchable : public HasProgress {
 public:
  /// Must be called before collectives are issued that should be watched.
  virtual void set_watch(std::shared_ptr<CollectiveWatch> watch) = 0;
  /// Returns null for a process group that is not watched.
  virtual const std::shared_ptr<CollectiveWatch>& watch() const = 0;

  Progress* progress() final { return watch() ? &watch()->progress() : nullptr; }
};

}  // namespace tessera
