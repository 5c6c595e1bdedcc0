#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collective.h>
#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera {

/// Handle of a collective that was started and may still run.
class TESSERA_API Work {
 public:
  virtual ~Work() = default;

  /// Waits until the outputs are written.
  ///
  /// Throws `c10::DistBackendError` when the process group's timeout passes or a peer fails; the
  /// message names the collective, the unit, this rank and the seconds waited. May be called again.
  virtual void wait() = 0;

  /// Waits until the inputs may be overwritten, too: peers may still be reading them after
  /// `wait()`.
  virtual void wait_inputs() { wait(); }

  /// True if `wait()` would return at once. Never blocks.
  virtual bool is_completed() = 0;
};

using WorkPtr = std::shared_ptr<Work>;

/// An ordered set of ranks that communicate.
///
/// The collectives are called by every rank of the group, in the same order per channel, with
/// tensors of equal dtype (see `ReduceScatterOptions::dtype` for the exception). They throw
/// `c10::ValueError` for arguments that no rank may give. A flat buffer of `bounds.back()` elements
/// is split over the ranks by `bounds` (`size() + 1` elements, ascending, from 0): rank `r` has
/// `[bounds[r], bounds[r + 1])`, which may be empty.
///
/// A subclass is a transport, which implements `issue()`, or a `ProcessGroupDecorator`.
class TESSERA_API ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  virtual std::string backend_name() const = 0;
  /// False if all channels share one order, as on a backend that matches collectives by it.
  virtual bool has_channels() const { return true; }
  /// True if all tensors must lie in host memory.
  virtual bool needs_host_memory() const { return false; }
  /// The ranks to which this one sends messages. Ranks that it shares memory with are not among
  /// them.
  virtual std::vector<int> sends_to() const;
  /// The process group that does the work: this one, unless it is a decorator.
  virtual ProcessGroup& transport() { return *this; }

  /// Writes the shards of all ranks into `flat`, `shard` being this rank's. `flat` may alias
  /// `shard` in place. `shard` must not change before `wait_inputs()`.
  WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds, const CollectiveTag& tag);

  /// Sums the ranks' flat buffers, in rank order, and stores this rank's part times `scale` in
  /// `out`.
  ///
  /// The flat buffer is given as `pieces`, ascending and disjoint; all ranks must cut it alike.
  /// Gaps between pieces leave `out` as it is (zero it before). The tensors of the pieces are kept
  /// until nobody reads them any more.
  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag);

  /// Reduces `tensor` (contiguous) over all ranks, in place.
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag);

  /// Copies `tensor` (contiguous) of rank `root` to all ranks, in place.
  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag);

  /// Sends `to[r]` to each rank `r`, and receives in `from[r]` what `r` sends to this rank.
  ///
  /// Both have `size()` entries: 1-D, contiguous, of one dtype; an undefined or empty tensor stands
  /// for nothing. The `to` of one rank must have as many elements as the `from` of the other. `to`
  /// must not change before `wait_inputs()`. No `from` may overlap a `to` or another `from`, except
  /// that `from[rank()]` may be `to[rank()]` itself.
  WorkPtr all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                     const CollectiveTag& tag);

  /// Returns when all ranks have called it.
  void barrier(const CollectiveTag& tag) { arrive(tag)->wait(); }

  /// A barrier in two steps: `wait()` of the result returns when all ranks have called this.
  WorkPtr arrive(const CollectiveTag& tag);

 protected:
  /// Has `inner` issue a collective that this process group has checked.
  static WorkPtr issue_on(ProcessGroup& inner, Collective collective);

 private:
  // Starts a collective whose arguments are right and whose tensors' memory holds their values.
  // `bounds` may go when it returns.
  virtual WorkPtr issue(Collective collective) = 0;

  WorkPtr start(Collective collective);
};

using ProcessGroupPtr = std::shared_ptr<ProcessGroup>;

/// Returns each rank's `bytes`, in rank order. Collective; blocks. For small host data.
TESSERA_API std::vector<std::string> all_gather_bytes(ProcessGroup& process_group,
                                                      const std::string& bytes,
                                                      const CollectiveTag& tag);

/// Makes a process group over Gloo. Collective: all `size` ranks call it with stores that see the
/// same keys. `hostname` is the address that the other ranks can reach this one at; empty asks
/// c10d.
TESSERA_API ProcessGroupPtr gloo_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size,
                                               std::chrono::milliseconds timeout,
                                               const std::string& hostname = "");

/// Makes a process group over any c10d backend (NCCL, or the user's own). A backend matches
/// collectives by their order, so all channels share one order: ranks must then use units alike. It
/// also sums in its own order, and in the dtype of the messages. Over all but NCCL, `all_to_all()`
/// returns when all ranks have called it: they compare the lengths first.
TESSERA_API ProcessGroupPtr backend_process_group(c10::intrusive_ptr<c10d::Backend> backend,
                                                  std::chrono::milliseconds timeout);

/// Makes a process group over NCCL. Throws `c10::NotImplementedError` where LibTorch has no CUDA.
TESSERA_API ProcessGroupPtr nccl_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size,
                                               std::chrono::milliseconds timeout);

/// Makes a process group of ranks of one host that read each other's memory in place of sending
/// messages; `inner` connects them, and serves to find each other only. For tensors in host memory;
/// sums are those of `gloo_process_group`, to the bit. Collective.
///
/// Throws `c10::NotImplementedError`, on every rank, naming the rank and the reason, where the
/// system does not allow it or the ranks are on several hosts.
TESSERA_API ProcessGroupPtr arena_process_group(ProcessGroupPtr inner);

/// The process group of one rank: nothing is sent.
TESSERA_API ProcessGroupPtr single_process_group();

}  // namespace tessera
