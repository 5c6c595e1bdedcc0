#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

/// A simulated accelerator, "sim", for tests of code that is to run on devices.
///
/// It is less forgiving than CUDA. The host cannot read device memory. Each stream is a thread that
/// works late, and only events order streams. Freed memory is overwritten, in stream order, and
/// used again at once. Kernels and collectives keep no tensor alive.
///
/// Values are those of the CPU's kernels, bit for bit, except those of random operators. There are
/// four devices, and each thread has its own current one, so that ranks can be threads.
namespace tessera::testing::sim {

/// Sets the delays of streams, and makes the backend known to LibTorch. At its end it waits for all
/// devices, and resets delays, faults and limits, so that tests do not affect each other.
class Use {
 public:
  Use(uint64_t seed, std::chrono::microseconds delay);
  ~Use();
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
};

/// Each operation of a stream lasts up to `delay` longer, which it spends before it reads or writes
/// anything; half of them are not delayed. The delays of a stream depend only on `seed` and on the
/// number of operations before.
[[nodiscard]] inline Use use(uint64_t seed = 0, std::chrono::microseconds delay = {}) {
  return {seed, delay};
}

int device_count();
c10::Device device(int index);

/// Waits for all devices, and throws the fault of a kernel if there was one.
void synchronize();
void synchronize(const c10::Device& device);

/// Freed memory is full of this byte: as a float -5.7e26, as an index far out of range.
constexpr int kPoison = 0xEB;

/// Bytes as asked for, without rounding.
struct MemoryCount {
  int64_t live = 0;         ///< of storages
  int64_t held = 0;         ///< and of freed ones that other streams still use (record_stream)
  int64_t peak = 0;         ///< the most that was held
  int64_t allocated = 0;    ///< ever
  int64_t allocations = 0;  ///< ever
};
MemoryCount memory(const c10::Device& device);
void reset_peak(const c10::Device& device);
/// Beyond `bytes` allocations throw `c10::OutOfMemoryError`.
void set_memory_limit(const c10::Device& device, int64_t bytes);

/// The bytes of the device's memory at `data`, which is a data pointer of a device's tensor, for
/// the host to read as they are at the moment: nothing waits.
const void* peek(const void* data);

/// Lets a stream wait until this object is released or destroyed.
class Hold {
 public:
  explicit Hold(const c10::Stream& stream);
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  void release();

 private:
  std::shared_ptr<class Mark> mark_;
};

/// An operation of a stream. Times are 0 until it begins and ends.
struct LoggedOperation {
  int device = 0;
  int64_t stream = 0;
  std::string name;  ///< "aten::mm", "all_gather", "copy to device", "poison", ...
  std::chrono::steady_clock::time_point issued, begin, end;
};

/// Whether both operations were running at some moment.
inline bool overlap(const LoggedOperation& a, const LoggedOperation& b) {
  return a.begin < b.end && b.begin < a.end;
}

/// Records the operations of all streams while it lives. One at a time.
class Log {
 public:
  Log();
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  /// In the order in which threads issued them; waits for all of them to end.
  std::vector<LoggedOperation> operations() const;
};

/// Returns the operations that have ended as a Chrome trace (chrome://tracing, Perfetto): a process
/// for each device, a thread for each stream, times in microseconds from the issue of the first
/// one.
std::string chrome_trace(const std::vector<LoggedOperation>& operations);

/// Operators that made the host wait since the last use(): those whose outputs' sizes depend on
/// data, and those that return numbers. A training step should have few.
std::vector<std::string> operators_that_waited();

/// A backend, "simccl", for ranks that are threads of this process and have a device each. Ranks
/// meet by `token`, which no other process group of the time may have, or by `store`.
///
/// Collectives run on a stream of their own, after the issuer's current stream, and write late.
/// `wait()` lets the current stream wait, and returns to the host at once; but that of a barrier
/// waits on the host. They keep no tensor alive. Sums are in rank order.
///
/// Ranks that differ in kind, sizes or dtype, and ranks that do not come within `timeout`, are
/// faults, which the next wait or synchronization throws as `c10::DistBackendError`.
c10::intrusive_ptr<c10d::Backend> process_group(const std::string& token, int rank, int size,
                                                std::chrono::milliseconds timeout);
c10::intrusive_ptr<c10d::Backend> process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank, int size,
                                                std::chrono::milliseconds timeout);

}  // namespace tessera::testing::sim
