// The only file that includes c10d's ProcessGroupGloo.hpp, and with it Tessera's declarations of
// gloo's types.
#include "comm/message/gloo_backend.h"

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/group/environment.h"
#include "comm/message/gloo_sockets.h"

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
                                               const std::string& hostname, int threads,
                                               int connections) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  // c10d makes a context for each device; one device serves them with one thread.
  const GlooSockets sockets([&] { options->devices.assign(connections, make_device(hostname)); });
  options->threads = threads;
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  sockets.close_to_others();
  return backend;
}

}  // namespace tessera
