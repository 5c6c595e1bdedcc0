#include "support/sim_device/streams.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <utility>
#include <vector>

#include "support/sim_device/sim_device.h"

namespace tessera::testing::sim {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kPoolSize = 8;

struct Device {
  std::mutex mutex;
  std::vector<std::unique_ptr<StreamQueue>> queues;  // by id; the first is the default stream
  int64_t pool_next = 0;
  std::vector<int64_t> given_back;
  std::exception_ptr fault;
  std::atomic<bool> is_used{false};
};

// Never destroyed: threads of streams may outlive main().
struct Streams {
  std::array<Device, kDeviceCount> devices;
  std::atomic<uint64_t> seed{0};
  std::atomic<int64_t> scale{0};  // microseconds
  std::atomic<bool> is_ending{false};
  std::once_flag ends_with_program;
  pid_t process = getpid();

  static Streams& all() {
    static Streams& streams = *new Streams;
    return streams;
  }
};

thread_local int tls_device = 0;
thread_local std::array<int64_t, kDeviceCount> tls_streams{};

Device& device_at(int device) {
  TORCH_CHECK(device >= 0 && device < kDeviceCount, "[sim] there are ", kDeviceCount,
              " devices; got index ", device);
  return Streams::all().devices[device];
}

StreamQueue& queue_at(int device, int64_t id) {
  Device& owner = device_at(device);
  std::lock_guard lock(owner.mutex);
  // The pool's streams follow the default stream; those of take_stream() follow them.
  while (std::ssize(owner.queues) <= std::max(id, kPoolSize))
    owner.queues.push_back(std::make_unique<StreamQueue>(device, std::ssize(owner.queues)));
  return *owner.queues[id];
}

c10::Stream stream_at(int device, int64_t id) {
  const c10::Device owner(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, owner, id);
}

std::vector<StreamQueue*> queues_of(int device) {
  Device& owner = device_at(device);
  std::lock_guard lock(owner.mutex);
  std::vector<StreamQueue*> all;
  for (const auto& queue : owner.queues) all.push_back(queue.get());
  return all;
}

// Runs before the destructors of LibTorch's globals, which kernels use. A forked child has no
// threads of streams.
void end_threads() {
  Streams& streams = Streams::all();
  if (getpid() != streams.process) return;
  streams.is_ending = true;
  for (int device = 0; device < kDeviceCount; ++device)
    for (StreamQueue* queue : queues_of(device)) queue->stop();
}

// SplitMix64.
uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

void Mark::reach() {
  std::lock_guard lock(mutex_);
  is_reached_ = true;
  reached_at_ = Clock::now();
  changed_.notify_all();
}

bool Mark::is_reached() const {
  std::lock_guard lock(mutex_);
  return is_reached_;
}

void Mark::wait() const {
  std::unique_lock lock(mutex_);
  while (!is_reached_ && !is_ending()) changed_.wait_for(lock, std::chrono::milliseconds(50));
}

Clock::time_point Mark::reached_at() const {
  std::lock_guard lock(mutex_);
  return reached_at_;
}

c10::Stream StreamQueue::stream() const { return stream_at(device_, id_); }

std::chrono::microseconds StreamQueue::draw_delay() {
  const Streams& streams = Streams::all();
  const int64_t scale = streams.scale;
  if (scale == 0) return std::chrono::microseconds(0);
  // Each seed starts the same sequence again.
  if (seed_.exchange(streams.seed) != streams.seed) drawn_ = 0;
  const uint64_t stream = mixed(streams.seed) ^ mixed(static_cast<uint64_t>(device_) << 32 | id_);
  const uint64_t random = mixed(stream + drawn_++);
  // Half of all operations follow at once, so that streams differ more than by their lengths.
  return std::chrono::microseconds(random & 1 ? (random >> 1) % (scale + 1) : 0);
}

void StreamQueue::push(std::string name, std::function<void()> operation) {
  push({std::move(operation), draw_delay(), log_operation(device_, id_, std::move(name))});
}

void StreamQueue::push(Item item) {
  Streams& streams = Streams::all();
  std::call_once(streams.ends_with_program, [] { std::atexit(end_threads); });
  device_at(device_).is_used = true;
  std::lock_guard lock(mutex_);
  if (is_stopped_) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
  items_.push_back(std::move(item));
  changed_.notify_one();
}

MarkPtr StreamQueue::mark() {
  auto mark = std::make_shared<Mark>();
  push({[mark] { mark->reach(); }});
  return mark;
}

void StreamQueue::wait_for(MarkPtr mark) {
  push({[mark = std::move(mark)] { mark->wait(); }});
}

bool StreamQueue::is_idle() const {
  std::lock_guard lock(mutex_);
  return items_.empty() && !is_busy_;
}

void StreamQueue::synchronize() {
  if (!is_idle()) mark()->wait();
  throw_fault(device_);
}

void StreamQueue::work() {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // nanoseconds; sleeps are otherwise 50 microseconds longer
  at::init_num_threads();  // as many as the program has asked for, and not the environment
  tls_device = device_;
  for (;;) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      is_busy_ = false;
      changed_.wait(lock, [&] { return is_stopped_ || !items_.empty(); });
      if (is_stopped_) return;
      item = std::move(items_.front());
      items_.pop_front();
      is_busy_ = true;
    }
    const Clock::time_point begin = Clock::now();
    if (item.delay.count() > 0) std::this_thread::sleep_for(item.delay);
    try {
      item.run();
    } catch (...) {
      keep_fault(device_, std::current_exception());
    }
    if (item.logged) log_run(*item.logged, begin);
  }
}

void StreamQueue::stop() {
  {
    std::lock_guard lock(mutex_);
    is_stopped_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void set_delays(uint64_t seed, std::chrono::microseconds scale) {
  Streams& streams = Streams::all();
  streams.seed = mixed(seed) | 1;
  streams.scale = scale.count();
}

bool is_ending() { return Streams::all().is_ending; }

StreamQueue& queue_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == c10::kPrivateUse1, "[sim] expected a stream of a sim device");
  return queue_at(stream.device_index(), stream.id());
}

StreamQueue& current_queue(int device) { return queue_of(current_stream(device)); }

c10::Stream current_stream(int device) {
  device_at(device);  // checks the index
  return stream_at(device, tls_streams[device]);
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const int device = queue_of(stream).device();
  return stream_at(device, std::exchange(tls_streams[device], stream.id()));
}

c10::Stream default_stream(int device) { return queue_at(device, 0).stream(); }

c10::Stream pool_stream(int device) {
  Device& owner = device_at(device);
  std::unique_lock lock(owner.mutex);
  const int64_t id = 1 + owner.pool_next++ % kPoolSize;
  lock.unlock();
  return queue_at(device, id).stream();
}

c10::Stream take_stream(int device) {
  default_stream(device);  // makes the streams of the pool
  Device& owner = device_at(device);
  std::lock_guard lock(owner.mutex);
  if (owner.given_back.empty()) {
    owner.given_back.push_back(std::ssize(owner.queues));
    owner.queues.push_back(std::make_unique<StreamQueue>(device, owner.given_back.back()));
  }
  const int64_t id = owner.given_back.back();
  owner.given_back.pop_back();
  return stream_at(device, id);
}

void give_back_stream(const c10::Stream& stream) {
  Device& owner = device_at(stream.device_index());
  std::lock_guard lock(owner.mutex);
  owner.given_back.push_back(stream.id());
}

bool is_used(int device) { return device_at(device).is_used; }

int current_device() { return tls_device; }

int exchange_device(int device) {
  device_at(device);  // checks the index
  return std::exchange(tls_device, device);
}

void drain(int device) {
  for (StreamQueue* queue : queues_of(device))
    if (!queue->is_idle()) queue->mark()->wait();
}

void synchronize_device(int device) {
  drain(device);
  throw_fault(device);
}

void keep_fault(int device, std::exception_ptr fault) {
  Device& owner = device_at(device);
  std::lock_guard lock(owner.mutex);
  if (!owner.fault) owner.fault = std::move(fault);
}

void throw_fault(int device) {
  Device& owner = device_at(device);
  std::unique_lock lock(owner.mutex);
  const std::exception_ptr fault = std::exchange(owner.fault, nullptr);
  lock.unlock();
  if (fault) std::rethrow_exception(fault);
}

void forget_fault(int device, const std::exception_ptr& fault) {
  Device& owner = device_at(device);
  std::lock_guard lock(owner.mutex);
  if (!fault || owner.fault == fault) owner.fault = nullptr;
}

}  // namespace tessera::testing::sim
