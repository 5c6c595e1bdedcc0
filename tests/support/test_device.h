#pragma once

#include <torch/torch.h>

#include <string>

namespace tessera::testing {

/// The kind of device on which tests of numbers run: "cpu", unless the environment has
/// TESSERA_TEST_DEVICE=sim, the simulated accelerator, or =cuda. TESSERA_TEST_SEED seeds the delays
/// of the simulated one.
const std::string& test_device_kind();

/// Skips a test of facts of host memory where tests run on another device.
#define TESSERA_ON_HOST_ONLY(reason) \
  if (!::tessera::testing::tests_on_host()) GTEST_SKIP() << (reason)

/// The device of this rank or, outside of a world, the first one.
at::Device test_device();

/// Lets the calling thread, which is that of `rank`, use a device of its own.
void take_test_device(int rank);

/// Forgets the faults that collectives leave on simulated devices if a rank does not come.
void forget_device_faults();

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

/// Returns true on the CPU, where tests may read the memory of tensors.
inline bool tests_on_host() { return test_device_kind() == "cpu"; }

/// Returns true if the tensors, on any devices, have the same sizes and values.
inline bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return torch::equal(a.detach().cpu(), b.detach().cpu());
}
/// The same up to `tolerance`, relative and absolute.
inline bool close_values(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  return torch::allclose(a.detach().cpu(), b.detach().cpu(), tolerance, tolerance);
}

}  // namespace tessera::testing
