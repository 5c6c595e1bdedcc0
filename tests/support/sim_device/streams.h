#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "support/sim_device/sim_device.h"

namespace tessera::testing::sim {

constexpr int kDeviceCount = 8;

/// A point of a stream, for which other streams and threads wait. It outlives the stream's visit.
class Mark {
 public:
  void reach();
  bool is_reached() const;
  /// Returns when the mark is reached, and when the program ends.
  void wait() const;
  std::chrono::steady_clock::time_point reached_at() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_reached_ = false;
  std::chrono::steady_clock::time_point reached_at_;
};
using MarkPtr = std::shared_ptr<Mark>;

/// The operations of a stream, which a thread of its own runs one after the other.
class StreamQueue {
 public:
  StreamQueue(int device, int64_t id) : device_(device), id_(id) {}
  StreamQueue(const StreamQueue&) = delete;
  StreamQueue& operator=(const StreamQueue&) = delete;

  int device() const { return device_; }
  c10::Stream stream() const;

  /// Runs `operation` after a random delay, once everything pushed before has run. The device keeps
  /// an exception as its fault, and the stream goes on.
  void push(std::string name, std::function<void()> operation);
  /// Pushes an operation that reaches the returned mark.
  MarkPtr mark();
  /// Lets everything that is pushed later wait for `mark`.
  void wait_for(MarkPtr mark);
  bool is_idle() const;
  /// Returns when everything pushed before has run; throws the device's fault.
  void synchronize();
  /// The next of the random delays of this stream.
  std::chrono::microseconds draw_delay();

  /// Ends the thread after its current operation, for the end of the program.
  void stop();

 private:
  struct Item {
    std::function<void()> run;
    std::chrono::microseconds delay{0};
    std::shared_ptr<LoggedOperation> logged;
  };
  void push(Item item);
  void work();

  const int device_;
  const int64_t id_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  std::thread thread_;
  bool is_busy_ = false;
  bool is_stopped_ = false;
  std::atomic<uint64_t> drawn_{0};
  std::atomic<uint64_t> seed_{0};
};

/// The log's entry of an operation that is being issued; null if nothing is recorded.
std::shared_ptr<LoggedOperation> log_operation(int device, int64_t stream, std::string name);
void log_run(LoggedOperation& operation, std::chrono::steady_clock::time_point begin);

/// The seed and the scale of all delays.
void set_delays(uint64_t seed, std::chrono::microseconds scale);
/// True once the program ends: nothing may wait any longer.
bool is_ending();

StreamQueue& queue_of(const c10::Stream& stream);
StreamQueue& current_queue(int device);
c10::Stream current_stream(int device);
/// Makes `stream` the calling thread's current one for its device; returns the one before.
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream default_stream(int device);
/// One of the streams of the pool, in turn.
c10::Stream pool_stream(int device);
/// A stream that nobody else has until it is given back.
c10::Stream take_stream(int device);
void give_back_stream(const c10::Stream& stream);
/// Whether anything was ever pushed to a stream of this device.
bool is_used(int device);

/// The calling thread's current device.
int current_device();
int exchange_device(int device);

/// Waits for all streams of the device, without a look at its fault.
void drain(int device);
void synchronize_device(int device);

/// A device has at most one fault, the first; throwing forgets it.
void keep_fault(int device, std::exception_ptr fault);
void throw_fault(int device);
/// Forgets the device's fault; if `fault` is given, only this one.
void forget_fault(int device, const std::exception_ptr& fault = nullptr);

}  // namespace tessera::testing::sim
