#pragma once

#include <ATen/DeviceAccelerator.h>
#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "support/sim_device/sim_device.h"

namespace tessera::sim_tensors {

using Tensors = std::vector<at::Tensor>;

inline constexpr int kSeeds = 20;

/// Worlds of this program are on the simulated device.
inline const int kSimulates = ::setenv("TESSERA_TEST_DEVICE", "sim", /*overwrite=*/1);

inline at::TensorOptions on(int device, at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions().device(testing::sim::device(device)).dtype(dtype);
}

inline c10::Stream side_stream(int device = 0) {
  return c10::impl::getDeviceGuardImpl(c10::kPrivateUse1)
      ->getStreamFromGlobalPool(testing::sim::device(device));
}

inline c10::Stream current_stream(int device = 0) {
  return at::accelerator::getCurrentStream(static_cast<c10::DeviceIndex>(device));
}

template <class T = float>
T peeked(const at::Tensor& tensor, int64_t index = 0) {
  return static_cast<const T*>(testing::sim::peek(tensor.const_data_ptr()))[index];
}

template <class Function>
std::string error_text(const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.detach().cpu().contiguous(), y = b.detach().cpu().contiguous();
  return x.sizes() == y.sizes() && x.dtype() == y.dtype() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace tessera::sim_tensors
