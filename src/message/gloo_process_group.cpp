// The only file that includes c10d's ProcessGroupGloo.hpp, and with it Tessera's declarations of
// gloo's types.
#include <c10/util/Exception.h>
#include <sched.h>
#include <tessera/process_group.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "group/environment.h"
#include "message/exchange_process_group.h"
#include "message/gloo_backend.h"
#include "message/mailbox.h"
#include "message/no_sigpipe.h"

namespace tessera {
namespace {

std::shared_ptr<gloo::transport::Device> make_device(const std::string& hostname) {
  if (!hostname.empty()) {
    return c10d::ProcessGroupGloo::createDeviceForHostname(hostname);
  }
  if (const auto interface = environment("GLOO_SOCKET_IFNAME")) {
    return c10d::ProcessGroupGloo::createDeviceForInterface(*interface);
  }
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

// Threads that start while this object lives wait for the end of a time slice instead of taking the
// core from the thread that woke them.
//
// Gloo's thread polls without pause while another thread holds the lock of a connection, which it
// does to write. If that thread shares the core and was preempted by Gloo's, neither makes progress
// until the slice ends: some milliseconds are lost, in most sends of a rank that is bound to one
// core.
class BatchScheduling {
 public:
  BatchScheduling() { changed_ = sched_getscheduler(0) == SCHED_OTHER && set(SCHED_BATCH); }
  ~BatchScheduling() {
    if (changed_) {
      set(SCHED_OTHER);
    }
  }
  BatchScheduling(const BatchScheduling&) = delete;
  BatchScheduling& operator=(const BatchScheduling&) = delete;

 private:
  // Sets the policy of this thread; new threads inherit it.
  static bool set(int policy) {
    const sched_param parameters{};
    return sched_setscheduler(0, policy, &parameters) == 0;
  }

  bool changed_ = false;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size,
                                               std::chrono::milliseconds timeout,
                                               const std::string& hostname, int threads,
                                               int connections) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  // c10d makes a context for each device; one device serves them with one thread.
  options->devices.assign(connections, make_device(hostname));
  options->threads = threads;
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

ProcessGroupPtr gloo_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   std::chrono::milliseconds timeout, const std::string& hostname) {
  TORCH_CHECK_VALUE(store.defined(), "[gloo_process_group] `store` must be given");
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size,
                    "[gloo_process_group] `rank` must be from 0 to `size` - 1; got rank ", rank,
                    " of ", size);
  TORCH_CHECK_VALUE(timeout.count() > 0, "[gloo_process_group] `timeout` must be positive; got ",
                    timeout.count(), " ms");
  const BatchScheduling batch_scheduling;
  const NoSigpipe no_sigpipe;
  return std::make_shared<ExchangeProcessGroup>(
      gloo_backend(store, rank, size, timeout, hostname, /*threads=*/1, Mailbox::kConnections),
      "gloo", timeout);
}

}  // namespace tessera
