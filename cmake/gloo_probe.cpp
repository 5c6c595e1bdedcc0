// Compiled, linked and run while configuring: does LibTorch's ProcessGroupGloo fit our declarations
// of gloo's types (core/comm/message/gloo_declarations)? A world of one needs no peer.
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

int main() {
  auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(10));
  options->devices = {c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")};
  c10::intrusive_ptr<c10d::Backend> backend = c10::make_intrusive<c10d::ProcessGroupGloo>(
      c10::make_intrusive<c10d::HashStore>(), /*rank=*/0, /*size=*/1, options);
  return backend->getSize() == 1 ? 0 : 1;
}
