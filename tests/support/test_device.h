#pragma once

#include <torch/torch.h>

#include <string>

namespace tessera::testing {

/// The kind of device on which tests of numbers run: "cpu", unless the environment has
/// TESSERA_TEST_DEVICE=sim, the simulated accelerator, or =cuda. TESSERA_TEST_SEED seeds the delays of
/// the simulated one.
const std::string& test_device_kind();

/// The device of this rank or, outside of a world, the first one.
at::Device test_device();

/// Lets the calling thread, which is that of `rank`, use a device of its own.
void take_test_device(int rank);

/// The `backend` of worlds on the device; empty on the CPU.
std::string test_backend();

/// Moves a tensor to the device of this rank; modules are moved in place.
inline at::Tensor on_test_device(const at::Tensor& tensor) { return tensor.to(test_device()); }
template <class M>
  requires requires(M& module) { module->to(at::Device(at::kCPU)); }
M on_test_device(M module) {
  module->to(test_device());
  return module;
}

}  // namespace tessera::testing
