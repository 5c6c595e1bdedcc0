// The one file that includes c10d's ProcessGroupGloo.hpp, and with it our declarations of gloo's
// types.
#include <c10/util/Exception.h>
#include <tessera/process_group.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/environment.h"
#include "comm/exchange_process_group.h"
#include "comm/gloo_backend.h"

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

}  // namespace

c10::intrusive_ptr<c10d::Backend> gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size,
                                               std::chrono::milliseconds timeout,
                                               const std::string& hostname) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices = {make_device(hostname)};
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
  return std::make_shared<ExchangeProcessGroup>(gloo_backend(store, rank, size, timeout, hostname),
                                                "gloo", timeout);
}

}  // namespace tessera
