#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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

/// The streams of collectives that must not block each other. Collectives of one channel are issued
/// in the same order by all ranks; nothing is assumed between channels.
enum class Channel : uint8_t { kParams, kGrads, kControl };

/// What a collective is for: shown in errors and traces, and part of what ranks compare, so that
/// those that issue collectives in another order get an error instead of another's tensor: at once
/// over the arena and c10d backends on the CPU, by the timeout over Gloo. (NCCL compares nothing.)
struct CollectiveTag {
  std::string_view subject;  ///< for example the name of the unit; must outlive the `Work`
  Channel channel = Channel::kControl;
};

/// A contiguous range of a flat buffer and the tensor that holds it.
struct Piece {
  int64_t begin = 0;  ///< offset of the first element in the flat buffer
  at::Tensor data;    ///< 1-D and contiguous; an undefined tensor stands for `numel` zeros
  int64_t numel = 0;
};

struct ReduceScatterOptions {
  double scale = 1.0;       ///< the sum over ranks is multiplied by this before it is stored
  bool accumulate = false;  ///< add to what `out` holds instead of overwriting it
  /// Of the pieces, and so of what is sent; none: that of `out`. Float may go with an `out` of
  /// bfloat16 or half and the other way round: sums are taken in float and rounded once.
  std::optional<at::ScalarType> dtype = std::nullopt;
};

enum class ReduceOp : uint8_t { kSum, kMax, kMin };

struct PendingUpdates;  // internal

/// Host memory that the ranks of a process group have in common. It lives as long as a tensor on
/// any rank shows it.
struct SharedBuffer {
  at::Tensor bytes;  ///< 1-D, of dtype kByte
  /// The same memory at another address, where writing to it ends the process.
  at::Tensor read_only;
  /// False on several hosts: each has such memory of its own, in which `release()` may leave only
  /// the shards of its own ranks, until the next gather.
  bool stays_whole = true;
  /// Internal: how the next gather into `bytes` is to bring this rank's shard up to date. Null
  /// where a gather can't; the same on all ranks.
  std::shared_ptr<PendingUpdates> updates = nullptr;
};

/// An ordered set of ranks that communicate.
///
/// All members are collective: every rank of the group calls them in the same order per channel,
/// with tensors of equal dtype (see `ReduceScatterOptions::dtype` for the exception). A flat buffer
/// of `bounds.back()` elements is split over the ranks by `bounds` (`size() + 1` elements,
/// ascending, from 0): rank `r` has `[bounds[r], bounds[r + 1])`, which may be empty.
class TESSERA_API ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::chrono::milliseconds timeout() const = 0;
  virtual std::string backend_name() const = 0;
  /// False if all channels share one order, as on a backend that matches collectives by it.
  virtual bool has_channels() const { return true; }

  /// Writes the shards of all ranks into `flat`, `shard` being this rank's. `flat` may alias
  /// `shard` in place. `shard` must not change before `wait_inputs()`.
  virtual WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                             std::span<const int64_t> bounds, const CollectiveTag& tag) = 0;

  /// Sums the ranks' flat buffers, in rank order, and stores this rank's part times `scale` in
  /// `out`.
  ///
  /// The flat buffer is given as `pieces`, ascending and disjoint; all ranks must cut it alike.
  /// Gaps between pieces leave `out` as it is (zero it before). The tensors of the pieces are kept
  /// until nobody reads them any more.
  virtual WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                                 std::span<const int64_t> bounds,
                                 const ReduceScatterOptions& options, const CollectiveTag& tag) = 0;

  /// Reduces `tensor` (contiguous) over all ranks, in place.
  virtual WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) = 0;

  /// Copies `tensor` (contiguous) of rank `root` to all ranks, in place.
  virtual WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) = 0;

  /// Sends `to[r]` to each rank `r`, and receives in `from[r]` what `r` sends to this rank.
  ///
  /// Both have `size()` entries: 1-D, contiguous, of one dtype; an undefined or empty tensor stands
  /// for nothing. What `r` sends must have as many elements as the `from` that waits for it. `to`
  /// must not change before `wait_inputs()`. No `from` may overlap a `to` or another `from`, except
  /// that `from[rank()]` may be `to[rank()]` itself.
  virtual WorkPtr all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                             const CollectiveTag& tag) = 0;

  /// Returns when all ranks have called it.
  virtual void barrier(const CollectiveTag& tag) = 0;

  /// A barrier in two steps: `wait()` of the result returns when all ranks have called this.
  virtual WorkPtr arrive(const CollectiveTag& tag);

  /// Makes memory of `nbytes` zeros that all ranks of a host see, if the transport can do that;
  /// nothing on all ranks otherwise. A gather into such memory (`flat` lying in `bytes` of it, on
  /// all ranks at one place, and `shard` in `flat`) copies nothing inside a host: it waits until
  /// all ranks have come, and fetches what other hosts own. Blocks.
  virtual std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) {
    return std::nullopt;
  }

  /// The ranks to which this one sends messages; those it shares memory with are not among them.
  virtual std::vector<int> sends_to() const;

  /// After a gather into memory of `share()` was waited for: this rank does not read what it
  /// brought any more. When all ranks of the host have said so, the memory of what other hosts own
  /// is given back. The next gather says it as well. Never waits.
  virtual void release(const SharedBuffer& buffer) {}
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

/// What went through a counting process group, per kind of collective.
struct TESSERA_API CollectiveCounts {
  struct Entry {
    int64_t calls = 0;
    int64_t bytes_sent = 0;  ///< by this rank, payload only
  };
  Entry all_gather, reduce_scatter, all_reduce, broadcast, barrier, all_to_all;
  int64_t calls() const;
  int64_t bytes_sent() const;
};

/// A process group that counts what goes through it and passes it on to `inner`.
class TESSERA_API CountingProcessGroup : public ProcessGroup {
 public:
  virtual CollectiveCounts counts() const = 0;
  virtual void reset_counts() = 0;
};
TESSERA_API std::shared_ptr<CountingProcessGroup> counting_process_group(ProcessGroupPtr inner);

/// One collective as seen by this rank; times in microseconds since the process started.
struct CollectiveRecord {
  int64_t sequence = 0;
  std::string name;     ///< all_gather, reduce_scatter, ...
  std::string subject;  ///< from the tag
  Channel channel = Channel::kControl;
  int64_t bytes = 0;  ///< size of the whole buffer; of an all-to-all, of all `to`
  int64_t issued_us = 0;
  int64_t completed_us = -1;  ///< -1 while it runs
};

/// A process group that keeps the last `capacity` collectives (the flight record). When a wait on
/// it throws, the message ends with the last few records of this rank.
class TESSERA_API TracingProcessGroup : public ProcessGroup {
 public:
  virtual std::vector<CollectiveRecord> records() const = 0;
};
TESSERA_API std::shared_ptr<TracingProcessGroup> tracing_process_group(ProcessGroupPtr inner,
                                                                       size_t capacity = 256);

/// A fault for tests: the `nth` (from 0) collective named `name` (empty: any) fails or is late.
struct Fault {
  std::string name;
  int64_t nth = 0;
  bool fail = true;                    ///< throw `c10::DistBackendError` when it is issued
  std::chrono::milliseconds delay{0};  ///< sleep this long before it is issued
};
TESSERA_API ProcessGroupPtr fault_process_group(ProcessGroupPtr inner, std::vector<Fault> faults);

}  // namespace tessera
