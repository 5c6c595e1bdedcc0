#include "support/test_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group.h>

#include <chrono>
#include <cstdlib>
#include <exception>

#include "support/sim_device/sim_device.h"

namespace tessera::testing {
namespace {

constexpr std::chrono::microseconds kDelay(100);

std::string environment_or(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

// Lets all streams end before the program destroys what their kernels use.
class StreamsEnd : public ::testing::EmptyTestEventListener {
  void OnTestProgramEnd(const ::testing::UnitTest&) override {
    try {
      sim::synchronize();
    } catch (const std::exception&) {  // of a test's kernel, which the test has seen or not
    }
  }
};

// The simulated accelerator is known to LibTorch from here to the end of the program.
void begin_simulation() {
  ::testing::UnitTest::GetInstance()->listeners().Append(new StreamsEnd);
  static const auto* const kUse =
      new sim::Use(std::stoull(environment_or("TESSERA_TEST_SEED", "1")), kDelay);
  static_cast<void>(kUse);
  register_backend("simccl", c10::DeviceType::PrivateUse1,
                   [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      std::chrono::milliseconds timeout) {
                     return sim::process_group(store, rank, size, timeout);
                   });
}

c10::DeviceType device_type() {
  if (test_device_kind() == "sim") return c10::DeviceType::PrivateUse1;
  return test_device_kind() == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

}  // namespace

const std::string& test_device_kind() {
  static const std::string kKind = [] {
    const std::string kind = environment_or("TESSERA_TEST_DEVICE", "cpu");
    TORCH_CHECK(kind == "cpu" || kind == "sim" || kind == "cuda",
                "TESSERA_TEST_DEVICE must be cpu, sim or cuda; got ", kind);
    if (kind == "sim") begin_simulation();
    return kind;
  }();
  return kKind;
}

at::Device test_device() {
  const c10::DeviceType type = device_type();
  return type == c10::DeviceType::CPU ? at::Device(type)
                                      : c10::impl::VirtualGuardImpl(type).getDevice();
}

void take_test_device(int rank) {
  const c10::DeviceType type = device_type();
  if (type == c10::DeviceType::CPU) return;
  const c10::impl::VirtualGuardImpl guard(type);
  TORCH_CHECK(rank < guard.deviceCount(), "each rank needs a device of its own; there are ",
              static_cast<int>(guard.deviceCount()));
  guard.setDevice(at::Device(type, static_cast<c10::DeviceIndex>(rank)));
}

void forget_device_faults() {
  for (int index = 0; test_device_kind() == "sim" && index < sim::device_count(); ++index) {
    try {
      sim::synchronize(sim::device(index));
    } catch (const c10::DistBackendError&) {
    }
  }
}

std::string test_backend() {
  if (test_device_kind() == "cpu") return "";
  return test_device_kind() == "sim" ? "simccl" : "nccl";
}

}  // namespace tessera::testing
