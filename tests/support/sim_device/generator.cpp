#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <array>
#include <cstring>
#include <vector>

#include "support/sim_device/backend.h"
#include "support/sim_device/streams.h"

namespace tessera::testing::sim {

SimGenerator::SimGenerator(c10::DeviceIndex device)
    : c10::GeneratorImpl(c10::Device(c10::kPrivateUse1, device),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

at::Generator SimGenerator::next() {
  std::lock_guard lock(mutex_);
  // Neighbouring seeds and offsets give unrelated CPU generators.
  return at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15 +
                                        offset_++ * 0xD1B54A32D192ED03);
}

void SimGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t SimGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void SimGenerator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  std::array<uint64_t, 2> values;
  TORCH_CHECK(state.numel() == sizeof(values), "[sim] a generator's state has ", sizeof(values),
              " bytes; got ", state.numel());
  std::memcpy(values.data(), state.data(), sizeof(values));
  std::tie(seed_, offset_) = std::pair(values[0], values[1]);
}

c10::intrusive_ptr<c10::TensorImpl> SimGenerator::get_state() const {
  const std::array<uint64_t, 2> values{seed_, offset_};
  const at::Tensor state = at::empty({sizeof(values)}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(state.mutable_data_ptr(), values.data(), sizeof(values));
  return state.getIntrusivePtr();
}

SimGenerator* SimGenerator::clone_impl() const {
  auto* const clone = new SimGenerator(device_.index());
  clone->seed_ = seed_;
  clone->offset_ = offset_;
  return clone;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto& generators = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> all;
    for (int i = 0; i < kDeviceCount; ++i)
      all.push_back(at::make_generator<SimGenerator>(static_cast<c10::DeviceIndex>(i)));
    return all;
  }());
  return generators.at(device < 0 ? current_device() : device);
}

}  // namespace tessera::testing::sim
