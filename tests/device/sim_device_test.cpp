// Memory, streams and copies of the simulated accelerator: where code is wrong on a device, it
// shows.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Event.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <thread>

#include "device/sim_tensors.h"

namespace tessera::testing::sim_device_test {

using namespace sim_tensors;
using namespace std::chrono_literals;

TEST(SimDeviceMemoryDeathTest, HostReadOfDeviceMemoryIsASegmentationFault) {
  const auto sim = sim::use();
  const at::Tensor x = torch::ones({4}, on(0));
  sim::synchronize();
  EXPECT_EQ(peeked(x), 1);
  // By SIGSEGV, which sanitizers report in their own way.
  EXPECT_DEATH(std::cout << *static_cast<volatile const float*>(x.const_data_ptr()), "");
}

TEST(SimDeviceMemory, FreedBlockIsPoisonedAndUsedAgain) {
  const auto sim = sim::use();
  at::Tensor x = torch::ones({100}, on(0));
  const void* const address = x.const_data_ptr();
  const int64_t live = sim::memory(sim::device(0)).live;
  x.reset();
  EXPECT_EQ(sim::memory(sim::device(0)).live, live - 400);
  const at::Tensor next = torch::empty({90}, on(0));
  EXPECT_EQ(next.const_data_ptr(), address);
  sim::synchronize();
  for (int64_t i = 0; i < next.numel(); ++i) EXPECT_EQ(peeked<uint32_t>(next, i), 0xEBEBEBEBu);
}

TEST(SimDeviceMemory, FreshBlockIsPoisoned) {
  const auto sim = sim::use();
  const at::Tensor x = torch::empty({123457}, on(0));
  EXPECT_EQ(peeked<uint32_t>(x), 0xEBEBEBEBu);
  EXPECT_EQ(peeked<uint32_t>(x, 123456), 0xEBEBEBEBu);
}

TEST(SimDeviceMemory, PoisonFollowsTheWorkOfTheStream) {
  const auto sim = sim::use();
  at::Tensor x = torch::ones({4}, on(0));
  sim::Hold hold(current_stream());
  const at::Tensor y = x * 3;
  x.reset();
  const at::Tensor z = torch::zeros({4}, on(0));  // in the memory of x
  hold.release();
  EXPECT_TRUE(same_bits(y, torch::full({4}, 3.0F)));
  EXPECT_TRUE(same_bits(z, torch::zeros({4})));
}

TEST(SimDeviceMemory, RecordStreamKeepsABlockUntilTheOtherStreamIsDone) {
  for (const bool is_recorded : {true, false}) {
    const auto sim = sim::use();
    at::Tensor x = torch::ones({1000}, on(0));
    const void* const address = x.const_data_ptr();
    sim::synchronize();
    const c10::Stream side = side_stream();
    sim::Hold hold(side);
    at::Tensor y;
    {
      const c10::StreamGuard guard(side);
      y = x * 2;
    }
    if (is_recorded) x.record_stream(side);
    x.reset();
    at::Tensor z = torch::full({1000}, 7.0F, on(0));
    EXPECT_EQ(z.const_data_ptr() == address, !is_recorded);
    current_stream().synchronize();
    hold.release();
    side.synchronize();
    EXPECT_EQ(peeked(y), is_recorded ? 2 : 14);
    if (is_recorded) {
      EXPECT_EQ(torch::empty({1000}, on(0)).const_data_ptr(), address);
    }
  }
}

TEST(SimDeviceMemory, LimitThrowsOutOfMemoryError) {
  const auto sim = sim::use();
  const c10::Device device = sim::device(1);
  sim::set_memory_limit(device, 1 << 20);
  at::Tensor x = torch::empty({100 << 10}, on(1));
  EXPECT_THROW(torch::empty({200 << 10}, on(1)), c10::OutOfMemoryError);
  // Waits for a released block that another stream uses.
  const c10::Stream side = side_stream(1);
  auto hold = std::make_unique<sim::Hold>(side);
  x.record_stream(side);
  x.reset();
  EXPECT_EQ(sim::memory(device).live, 0);
  EXPECT_EQ(sim::memory(device).held, 400 << 10);
  std::thread releaser([&] {
    std::this_thread::sleep_for(20ms);
    hold->release();
  });
  x = torch::empty({200 << 10}, on(1));
  releaser.join();
  EXPECT_EQ(sim::memory(device).peak, 800 << 10);
  EXPECT_EQ(at::accelerator::getMemoryInfo(1).first, (1 << 20) - (800 << 10));
  EXPECT_EQ(at::accelerator::getDeviceStats(1).allocated_bytes[0].current, 800 << 10);
}

TEST(SimDeviceMemory, ResizeAndSetKeepValues) {
  const auto sim = sim::use(1, 50us);
  at::Tensor x = torch::arange(6, on(0));
  x.resize_({3, 4});
  EXPECT_TRUE(same_bits(x.view(-1).narrow(0, 0, 6), torch::arange(6, at::kFloat)));
  at::Tensor y = torch::empty({0}, on(0));
  y.set_(x.storage(), 2, {2}, {2});
  EXPECT_TRUE(same_bits(y, torch::tensor({2.0F, 4.0F})));
  EXPECT_TRUE(y.is_alias_of(x));
  // As code does that frees the memory of tensors which it keeps.
  const auto& hooks = at::detail::getPrivateUse1Hooks();
  const int64_t live = sim::memory(sim::device(0)).live;
  hooks.resizePrivateUse1Bytes(x.storage(), 0);
  EXPECT_EQ(sim::memory(sim::device(0)).live, live - 48);
  hooks.resizePrivateUse1Bytes(x.storage(), 48);
  EXPECT_EQ(x.fill_(3).sum().item<float>(), 36);
  y.set_();
  EXPECT_EQ(y.numel(), 0);
}

TEST(SimDeviceStreams, MissingEventGivesWrongBits) {
  for (const bool has_event : {true, false}) {
    const auto sim = sim::use();
    const c10::Stream side = side_stream();
    sim::Hold hold(current_stream());
    const at::Tensor x = torch::full({8}, 3.0F, on(0));
    c10::Event written(c10::kPrivateUse1);
    written.record(current_stream());
    if (has_event) written.block(side);
    at::Tensor y;
    {
      const c10::StreamGuard guard(side);
      y = x + 1;
    }
    EXPECT_FALSE(written.query());
    if (!has_event) side.synchronize();
    hold.release();
    side.synchronize();
    EXPECT_EQ(peeked(y) == 4, has_event);
    written.synchronize();
    EXPECT_TRUE(written.query());
  }
}

TEST(SimDeviceStreams, DelaysAloneShowAMissingEvent) {
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    const auto sim = sim::use(seed, 2ms);
    const c10::Stream side = side_stream();
    side.synchronize();
    const at::Tensor x = torch::full({8}, 3.0F, on(0));
    const c10::StreamGuard guard(side);
    wrong += (x + 1).cpu()[0].item<float>() != 4;
  }
  EXPECT_GT(wrong, 0);
}

TEST(SimDeviceStreams, GenericInterfaceOfAcceleratorsWorks) {
  const auto sim = sim::use(3, 50us);
  EXPECT_EQ(at::getAccelerator(), c10::kPrivateUse1);
  EXPECT_EQ(at::accelerator::deviceCount(), sim::device_count());
  EXPECT_EQ(sim::device(2).str(), "sim:2");
  EXPECT_EQ(c10::Device("sim:1"), sim::device(1));
  {
    const c10::DeviceGuard guard(sim::device(2));
    EXPECT_EQ(at::accelerator::getDeviceIndex(), 2);
    EXPECT_EQ(torch::empty({1}, at::TensorOptions().device(c10::kPrivateUse1)).device(),
              sim::device(2));
    std::thread([] { EXPECT_EQ(at::accelerator::getDeviceIndex(), 0); }).join();
  }
  EXPECT_EQ(at::accelerator::getDeviceIndex(), 0);
  const c10::Stream side = side_stream();
  {
    const c10::StreamGuard guard(side);
    EXPECT_EQ(current_stream(), side);
  }
  EXPECT_NE(current_stream(), side);
  c10::Event start(c10::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(c10::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  start.record(side);
  start.synchronize();
  sim::Hold hold(side);
  end.record(side);
  EXPECT_FALSE(side.query());
  std::this_thread::sleep_for(5ms);
  hold.release();
  end.synchronize();
  EXPECT_GE(start.elapsedTime(end), 4);
  at::accelerator::synchronizeDevice(0);
  EXPECT_TRUE(side.query());
  at::accelerator::emptyCache();
}

TEST(SimDeviceStreams, FaultIsThrownByTheNextSynchronization) {
  const auto sim = sim::use();
  const at::Tensor table = torch::ones({4, 2}, on(0));
  const at::Tensor index = torch::full({3}, 9, on(0, at::kLong));
  at::Tensor taken;
  EXPECT_NO_THROW(taken = table.index_select(0, index));
  EXPECT_TRUE(contains(error_text([&] { current_stream().synchronize(); }), "out of range"));
  EXPECT_NO_THROW(sim::synchronize());
  taken = table.index_select(0, index);
  EXPECT_TRUE(contains(error_text([&] { taken.sum().item(); }), "out of range"));
}

// Runs operations on two streams at once.
std::vector<sim::LoggedOperation> log_of_two_streams() {
  const sim::Log log;
  const c10::Stream side = side_stream();
  const at::Tensor x = torch::ones({16, 16}, on(0));
  at::Tensor y = x, z;
  sim::Hold hold(current_stream()), side_hold(side);
  {
    const c10::StreamGuard guard(side);
    for (int i = 0; i < 8; ++i) z = x.exp();
  }
  for (int i = 0; i < 8; ++i) y = y.mm(x);
  hold.release();
  side_hold.release();
  return log.operations();
}

TEST(SimDeviceStreams, LogShowsOrderAndOverlap) {
  const auto sim = sim::use(5, 3ms);
  bool overlapped = false;
  // Where cores are busy, one stream may be done before the other's thread runs.
  for (int round = 0; round < 100 && !overlapped; ++round) {
    std::vector<std::string> names;
    const auto operations = log_of_two_streams();
    for (const auto& a : operations) {
      names.push_back(a.name);
      EXPECT_LE(a.issued, a.begin);
      EXPECT_LE(a.begin, a.end);
      for (const auto& b : operations) overlapped |= a.stream != b.stream && sim::overlap(a, b);
    }
    EXPECT_LT(std::ranges::find(names, "aten::exp") - names.begin(),
              std::ranges::find(names, "aten::mm") - names.begin());
  }
  EXPECT_TRUE(overlapped);
}

TEST(SimDeviceCopies, AreAsynchronousFromAndToPinnedMemoryOnly) {
  for (const bool is_pinned : {true, false}) {
    for (const bool non_blocking : {true, false}) {
      SCOPED_TRACE(c10::str(is_pinned, non_blocking));
      const auto sim = sim::use(0, 100us);
      at::Tensor host = torch::ones({1000});
      if (is_pinned) host = host.pin_memory();
      EXPECT_EQ(host.is_pinned(), is_pinned);
      const at::Tensor x = torch::zeros({1000}, on(0));
      const bool is_late = is_pinned && non_blocking;
      auto hold = is_late ? std::make_unique<sim::Hold>(current_stream()) : nullptr;
      x.copy_(host, non_blocking);
      host.fill_(2);
      hold.reset();
      EXPECT_EQ(x.sum().item<float>(), is_late ? 2000 : 1000);
      if (is_late) hold = std::make_unique<sim::Hold>(current_stream());
      x.fill_(5);
      host.copy_(x, non_blocking);
      EXPECT_EQ(host[0].item<float>(), is_late ? 2 : 5);
      hold.reset();
      sim::synchronize();
      EXPECT_EQ(host[0].item<float>(), 5);
    }
  }
}

TEST(SimDeviceCopies, FreedPinnedMemoryLivesUntilItsCopy) {
  const auto sim = sim::use();
  at::Tensor host = torch::ones({1000}).pin_memory();
  const at::Tensor x = torch::zeros({1000}, on(0));
  sim::Hold hold(current_stream());
  x.copy_(host, /*non_blocking=*/true);
  host.reset();
  hold.release();
  EXPECT_EQ(x.sum().item<float>(), 1000);
}

TEST(SimDeviceCopies, ConvertBroadcastAndCrossDevices) {
  const auto sim = sim::use(7, 100us);
  const at::Tensor host = torch::randn({3, 5});
  const at::Tensor x = host.to(sim::device(0));
  EXPECT_TRUE(same_bits(x.t(), host.t()));
  EXPECT_TRUE(same_bits(x.to(at::kHalf), host.to(at::kHalf)));
  EXPECT_TRUE(same_bits(x.t().to(at::kCPU, at::kDouble), host.t().to(at::kDouble)));
  const at::Tensor y = x.to(sim::device(3));
  EXPECT_EQ(y.device(), sim::device(3));
  EXPECT_TRUE(same_bits(y, host));
  const at::Tensor wide = torch::zeros({2, 3, 5}, on(1));
  wide.copy_(y);
  EXPECT_TRUE(same_bits(wide[1], host));
  wide.copy_(host);
  EXPECT_TRUE(same_bits(wide[0], host));
  EXPECT_TRUE(same_bits(torch::tensor({1, 2, 3}, on(2, at::kLong)), torch::tensor({1, 2, 3})));
}

}  // namespace tessera::testing::sim_device_test
