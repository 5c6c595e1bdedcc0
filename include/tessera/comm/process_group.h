#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/collective.h>
#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera {

/// Handle of a collective that was started and may still be running.
class TESSERA_API Work {
 public:
  virtual ~Work() = default;

  /// Waits until the outputs are written.
  ///
  /// Throws `c10::DistBackendError` when the process group's timeout passes or a peer fails; the
  /// message names the collective, the unit, this rank and the seconds waited. May be called again.
  virtual void wait() = 0;

  /// Waits until the inputs may be overwritten, too: after `wait()`, peers may still be reading
  /// them.
  virtual void wait_inputs() { wait(); }

  /// Returns true if `wait()` would return at once. Never blocks.
  virtual bool is_completed() = 0;
};

using WorkPtr = std::shared_ptr<Work>;

/// An ordered set of ranks that communicate.
///
/// Every rank of the group calls the collectives, in the same order per channel, with tensors of
/// equal dtype (see `ReduceScatterOptions::dtype` for the exception). Invalid arguments throw
/// `c10::ValueError`. A flat buffer of `bounds.back()` elements is split over the ranks by `bounds`
/// (`size() + 1` elements, ascending, from 0): rank `r` has
/// `[bounds[r], bounds[r + 1])`, possibly empty.
///
/// A subclass is a transport that implements `issue()`, or a `ProcessGroupDecorator`.
class TESSERA_API ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  virtual std::string backend_name() const = 0;
  /// False if all channels share one order, as on a backend that matches collectives by their
  /// order.
  virtual bool has_channels() const { return true; }
  /// True if tensors can only be sent as they are: any other `Encoding` is refused. As the next
  /// one, a fact of the transport: decorators don't pass it on.
  virtual bool sends_plain() const { return false; }
  /// True if reductions can also gather their sums (`ReduceScatterOptions::gather_into`).
  virtual bool gathers_sums() const { return false; }
  /// The type of the devices in whose memory all tensors must be; none: any.
  virtual std::optional<c10::DeviceType> device_type() const { return std::nullopt; }
  /// Returns the ranks to which this rank sends messages. Ranks that share memory with it are not
  /// included.
  virtual std::vector<int> sends_to() const;
  /// Returns the process group that does the work: this one, unless it is a decorator.
  virtual ProcessGroup& transport() { return *this; }

  /// Gathers the shards of all ranks into `flat`; `shard` is this rank's, and may be its own range
  /// of `flat` (in place). `shard` must not change before `wait_inputs()`.
  ///
  /// Messages are sent in the form `encoding`. The values of `shard` must be such that this loses
  /// nothing, as ranks that share memory get them as they are.
  WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds, const CollectiveTag& tag,
                     Encoding encoding = Encoding::kPlain) {
    return start({tag, AllGather{flat, shard, bounds, encoding}});
  }

  /// Sums the ranks' flat buffers, in rank order, and stores this rank's part times `scale` in
  /// `out`.
  ///
  /// The flat buffer is given as `pieces`, ascending and disjoint; all ranks must cut it in the
  /// same way. Gaps between pieces leave `out` unchanged (zero it before). The tensors of the
  /// pieces are kept until no rank reads them any more.
  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag) {
    return start({tag, ReduceScatter{out, std::move(pieces), bounds, options}});
  }

  /// Reduces `tensor` (contiguous) over all ranks, in place.
  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) {
    return start({tag, AllReduce{tensor, op}});
  }

  /// Copies `tensor` (contiguous) of rank `root` to all ranks, in place. For `encoding`, see
  /// `all_gather()`.
  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag,
                    Encoding encoding = Encoding::kPlain) {
    return start({tag, Broadcast{tensor, root, encoding}});
  }

  /// Sends `to[r]` to each rank `r`, and receives the message of `r` to this rank in `from[r]`.
  ///
  /// Both have `size()` entries: 1-D, contiguous, of one dtype; an undefined or empty tensor stands
  /// for no message. The sender's `to` must have as many elements as the receiver's `from`. `to`
  /// must not change before `wait_inputs()`. No `from` may overlap a `to` or another `from`, except
  /// that `from[rank()]` may be `to[rank()]` itself.
  WorkPtr all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                     const CollectiveTag& tag) {
    return start({tag, AllToAll{std::move(from), std::move(to)}});
  }

  /// Returns when all ranks have called it.
  void barrier(const CollectiveTag& tag) { arrive(tag)->wait(); }

  /// A barrier in two steps: `wait()` of the result returns when all ranks have called `arrive()`.
  WorkPtr arrive(const CollectiveTag& tag) { return start({tag, Barrier{}}); }

 protected:
  /// Issues on `inner` a collective that this process group has already checked.
  static WorkPtr issue_on(ProcessGroup& inner, Collective collective) {
    return inner.issue(std::move(collective));
  }

 private:
  // Starts a collective whose arguments were checked and whose tensors' memory holds their values.
  // `bounds` may become invalid when this returns.
  virtual WorkPtr issue(Collective collective) = 0;

  WorkPtr start(Collective collective);
};

using ProcessGroupPtr = std::shared_ptr<ProcessGroup>;

/// Returns each rank's `bytes`, in rank order. Collective; blocks. For small host data.
TESSERA_API std::vector<std::string> all_gather_bytes(ProcessGroup& process_group,
                                                      const std::string& bytes,
                                                      const CollectiveTag& tag);

/// Makes a process group over Gloo. Collective: all `size` ranks call it with stores that hold the
/// same keys. `hostname` is the address at which other ranks can reach this one; if empty, c10d
/// chooses it.
TESSERA_API ProcessGroupPtr gloo_process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size,
                                               std::chrono::milliseconds timeout,
                                               const std::string& hostname = "");

/// Makes a process group over any c10d backend, for tensors on devices of type `device`. A backend
/// matches collectives by their order, so all channels share one order, and all ranks must use
/// units in the same order. It also sums in its own order, and in the dtype of the messages.
///
/// On the CPU, `all_to_all()` returns when all ranks have called it, because they compare the
/// lengths first. On other devices, collectives are queued, and `Work::wait()` lets the current
/// stream wait, not the host (but that of a barrier does both); until then the work keeps the
/// tensors. The backend's own timeout counts.
TESSERA_API ProcessGroupPtr backend_process_group(c10::intrusive_ptr<c10d::Backend> backend,
                                                  std::chrono::milliseconds timeout,
                                                  c10::DeviceType device = c10::DeviceType::CPU);

/// Makes a process group that passes collectives of tensors in host memory, and barriers, to
/// `host`, and all others to `devices`: models on a device need both. `devices` is one process
/// group, or one for each channel (`kParams`, `kGrads`, `kControl`): then ranks may differ in which
/// units they use. All have the same ranks, in the same order. Throws `c10::ValueError` otherwise.
TESSERA_API ProcessGroupPtr device_process_group(ProcessGroupPtr host,
                                                 std::vector<ProcessGroupPtr> devices);

/// Makes a c10d backend that connects the ranks which have stores with the same keys. Collective.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout)>;

/// Makes `name` a value of `WorldOptions::backend`, for tensors on devices of type `device`.
/// Replaces a backend that was registered under this name before; "gloo" can't be replaced. "nccl"
/// is registered for CUDA; where it was not built in, its use throws `c10::NotImplementedError`.
TESSERA_API void register_backend(const std::string& name, c10::DeviceType device,
                                  BackendFactory make);

/// Makes a process group of the registered backend `name` and, for tensors in host memory, of Gloo.
/// Collective. Throws `c10::ValueError` if there is no such backend.
TESSERA_API ProcessGroupPtr registered_process_group(const std::string& name,
                                                     const c10::intrusive_ptr<c10d::Store>& store,
                                                     int rank, int size,
                                                     std::chrono::milliseconds timeout);

/// Makes a process group of ranks of one host that read each other's memory instead of sending
/// messages; `inner` connects them, and is used for the setup only. For tensors in host memory;
/// sums are bit-identical to those of `gloo_process_group`. Collective.
///
/// Throws `c10::NotImplementedError` on every rank, naming the rank and the reason, if the system
/// does not allow it or the ranks are on several hosts.
TESSERA_API ProcessGroupPtr arena_process_group(ProcessGroupPtr inner);

/// Makes the process group of a single rank: nothing is sent.
TESSERA_API ProcessGroupPtr single_process_group();

}  // namespace tessera
