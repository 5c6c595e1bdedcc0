// The simulated accelerator behaves as CUDA does where code is right, and shows where it is wrong.
#include "support/sim_device/sim_device.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>
#include <functional>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace tessera {
namespace sim_device_test {

using namespace testing;
using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;

constexpr int kSeeds = 20;

at::TensorOptions on(int device, at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions().device(sim::device(device)).dtype(dtype);
}

c10::Stream side_stream(int device = 0) {
  return c10::impl::getDeviceGuardImpl(c10::kPrivateUse1)
      ->getStreamFromGlobalPool(sim::device(device));
}

c10::Stream current_stream(int device = 0) {
  return at::accelerator::getCurrentStream(static_cast<c10::DeviceIndex>(device));
}

template <class T = float>
T peeked(const at::Tensor& tensor, int64_t index = 0) {
  return static_cast<const T*>(sim::peek(tensor.const_data_ptr()))[index];
}

template <class Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.detach().cpu().contiguous(), y = b.detach().cpu().contiguous();
  return x.sizes() == y.sizes() && x.dtype() == y.dtype() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

// Runs `fn` on `size` threads, each with its device as the current one. Rethrows the first error.
void run_ranks(int size, const std::function<void(int rank)>& fn) {
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        at::accelerator::setDeviceIndex(static_cast<c10::DeviceIndex>(rank));
        fn(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

TEST(SimDeviceMemoryDeathTest, HostReadOfDeviceMemoryIsASegmentationFault) {
  const auto sim = sim::use();
  const at::Tensor x = torch::ones({4}, on(0));
  sim::synchronize();
  EXPECT_EQ(peeked(x), 1);
  EXPECT_EXIT(std::cout << *static_cast<volatile const float*>(x.const_data_ptr()),
              ::testing::KilledBySignal(SIGSEGV), "");
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
  x.mutable_data_ptr();
  x.storage().unsafeGetStorageImpl()->set_nbytes(0);  // as code that frees a unit's storage does
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
  EXPECT_TRUE(contains(error_of([&] { current_stream().synchronize(); }), "out of range"));
  EXPECT_NO_THROW(sim::synchronize());
  taken = table.index_select(0, index);
  EXPECT_TRUE(contains(error_of([&] { taken.sum().item(); }), "out of range"));
}

TEST(SimDeviceStreams, LogShowsOrderAndOverlap) {
  const auto sim = sim::use(5, 3ms);
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
  bool overlapped = false;
  std::vector<std::string> names;
  const auto operations = log.operations();
  for (const auto& a : operations) {
    names.push_back(a.name);
    EXPECT_LE(a.issued, a.begin);
    EXPECT_LE(a.begin, a.end);
    for (const auto& b : operations) overlapped |= a.stream != b.stream && sim::overlap(a, b);
  }
  EXPECT_TRUE(overlapped);
  EXPECT_LT(std::ranges::find(names, "aten::exp") - names.begin(),
            std::ranges::find(names, "aten::mm") - names.begin());
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

TEST(SimDeviceKernels, TakeCpuNumbersAndNoOtherCpuTensors) {
  const auto sim = sim::use(2, 50us);
  const at::Tensor x = torch::ones({4}, on(0));
  at::Tensor number = torch::tensor(3.0F);
  const at::Tensor y = x * number + 1.5;
  number.fill_(9);  // the operator has read it
  EXPECT_TRUE(same_bits(y, torch::full({4}, 4.5F)));
  EXPECT_TRUE(same_bits(torch::where(x > 0, x, torch::tensor(0.0F)), torch::ones({4})));
  const auto is_refused = [&](const std::function<void()>& call) {
    return contains(error_of(call), "Expected all tensors to be on the same device");
  };
  EXPECT_TRUE(is_refused([&] { x + torch::ones({4}); }));
  EXPECT_TRUE(is_refused([&] { x.add_(torch::ones({4})); }));
  EXPECT_TRUE(is_refused([&] { torch::mm(x.view({2, 2}), torch::ones({2, 2})); }));
  EXPECT_TRUE(is_refused([&] { x + torch::ones({4}, on(1)); }));
  EXPECT_TRUE(is_refused([&] { torch::ones({4}).add_(x); }));
  EXPECT_TRUE(is_refused([&] { x.index_select(0, torch::zeros({1}, at::kLong)); }));
  EXPECT_TRUE(same_bits(x.index({torch::zeros({2}, at::kLong)}), torch::ones({2})));
  EXPECT_TRUE(contains(error_of([&] { torch::mm(x.view({2, 2}), x.view({1, 4})); }), "shapes"));
}

TEST(SimDeviceKernels, OperatorsWhoseSizesDependOnDataMakeTheHostWait) {
  const auto sim = sim::use(4, 50us);
  const at::Tensor host = torch::tensor({0.0F, 2.0F, 0.0F, -1.0F});
  const at::Tensor x = host.to(sim::device(0));
  EXPECT_TRUE(sim::operators_that_waited().empty());
  EXPECT_TRUE(same_bits(x.nonzero(), host.nonzero()));
  EXPECT_TRUE(same_bits(x.masked_select(x > 0), host.masked_select(host > 0)));
  EXPECT_TRUE(same_bits(x.index({x > 0}), host.index({host > 0})));
  EXPECT_TRUE(same_bits(std::get<0>(at::_unique(x)), std::get<0>(at::_unique(host))));
  EXPECT_TRUE(torch::equal(x, x.clone()));
  at::Tensor out = torch::empty({0, 1}, on(0, at::kLong));
  at::nonzero_out(out, x);
  EXPECT_TRUE(same_bits(out, host.nonzero()));
  EXPECT_GE(sim::operators_that_waited().size(), 5u);
  at::Tensor sum = torch::empty({0}, on(0));
  at::add_out(sum, x, x);
  EXPECT_TRUE(same_bits(sum, host + host));
}

TEST(SimDeviceKernels, RandomOperatorsDoNotDependOnDelays) {
  const auto draw = [](uint64_t seed) {
    const auto sim = sim::use(seed, 100us);
    torch::manual_seed(11);
    const at::Tensor x = torch::randn({50}, on(0)), ones = torch::ones({50}, on(0));
    return Tensors{x,
                   torch::rand({7}, on(0)),
                   torch::dropout(ones, 0.5, true),
                   torch::randperm(20, on(0, at::kLong)),
                   torch::randint(0, 9, {12}, on(0, at::kLong)),
                   torch::multinomial(ones, 5),
                   torch::bernoulli(ones * 0.5),
                   at::normal(x, 1.0),
                   torch::empty({30}, on(0)).exponential_(),
                   torch::randn({50}, on(0)) - x};
  };
  const Tensors first = draw(0);
  for (int seed = 1; seed < 5; ++seed) {
    const Tensors again = draw(seed);
    for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(same_bits(first[i], again[i])) << i;
  }
  EXPECT_GT(first.back().abs().sum().item<float>(), 1);  // two draws differ
}

TEST(SimDeviceKernels, GeneratorHasSeedAndState) {
  const auto sim = sim::use();
  at::Generator generator = at::globalContext().defaultGenerator(sim::device(1));
  EXPECT_EQ(generator.device(), sim::device(1));
  generator.set_current_seed(5);
  torch::randn({3}, on(1));
  const at::Tensor state = generator.get_state();
  const at::Tensor a = torch::randn({3}, on(1));
  generator.set_state(state);
  EXPECT_TRUE(same_bits(torch::randn({3}, on(1)), a));
  EXPECT_FALSE(same_bits(torch::randn({3}, on(1)), a));
  generator.set_current_seed(5);
  torch::randn({3}, on(1));
  EXPECT_TRUE(same_bits(torch::randn({3}, on(1)), a));
  at::Generator own = generator.clone();
  EXPECT_TRUE(same_bits(torch::randn({3}, own, on(1)), torch::randn({3}, on(1))));
  EXPECT_TRUE(contains(error_of([] { torch::randn({3}, at::detail::createCPUGenerator(), on(1)); }),
                       "device type for generator"));
}

struct Case {
  std::string name;
  std::vector<std::vector<int64_t>> sizes;
  std::function<at::Tensor(const Tensors&)> run;
};

at::Tensor whole(const at::Tensor& like, int64_t count) {
  return (like.detach().abs() * 7).to(at::kLong).remainder(count);
}

std::vector<Case> cases() {
  using T = const Tensors&;
  const std::vector<int64_t> m{6, 8}, v{8};
  return {
      {"add", {m, v}, [](T t) { return torch::add(t[0], t[1], 2); }},
      {"sub", {m, m}, [](T t) { return t[0] - t[1]; }},
      {"mul", {m, v}, [](T t) { return t[0] * t[1]; }},
      {"div", {m, m}, [](T t) { return t[0] / (t[1] * t[1] + 1); }},
      {"pow", {m}, [](T t) { return t[0].pow(3); }},
      {"exp", {m}, [](T t) { return t[0].exp(); }},
      {"log", {m}, [](T t) { return (t[0].abs() + 1).log(); }},
      {"sqrt", {m}, [](T t) { return (t[0].abs() + 1).sqrt(); }},
      {"rsqrt", {m}, [](T t) { return (t[0].abs() + 1).rsqrt(); }},
      {"tanh", {m}, [](T t) { return t[0].tanh(); }},
      {"sigmoid", {m}, [](T t) { return t[0].sigmoid(); }},
      {"relu", {m}, [](T t) { return t[0].relu(); }},
      {"gelu", {m}, [](T t) { return torch::gelu(t[0]); }},
      {"gelu tanh", {m}, [](T t) { return torch::gelu(t[0], "tanh"); }},
      {"silu", {m}, [](T t) { return torch::silu(t[0]); }},
      {"leaky_relu", {m}, [](T t) { return torch::leaky_relu(t[0], 0.1); }},
      {"softplus", {m}, [](T t) { return torch::nn::functional::softplus(t[0]); }},
      {"clamp", {m}, [](T t) { return t[0].clamp(-0.5, 0.5); }},
      {"where", {m, m}, [](T t) { return torch::where(t[0] > t[1], t[0], t[1]); }},
      {"masked_fill", {m}, [](T t) { return t[0].masked_fill(t[0] > 0, -1); }},
      {"sum", {m}, [](T t) { return t[0].sum(); }},
      {"sum dim", {m}, [](T t) { return t[0].sum(0); }},
      {"mean", {m}, [](T t) { return t[0].mean(-1, true); }},
      {"var", {m}, [](T t) { return t[0].var(1); }},
      {"std", {m}, [](T t) { return t[0].std(); }},
      {"norm", {m}, [](T t) { return t[0].norm(2, 1); }},
      {"max", {m}, [](T t) { return std::get<0>(t[0].max(1)); }},
      {"amax", {m}, [](T t) { return t[0].amax(0); }},
      {"logsumexp", {m}, [](T t) { return t[0].logsumexp(1); }},
      {"cumsum", {m}, [](T t) { return t[0].cumsum(1); }},
      {"softmax", {m}, [](T t) { return t[0].softmax(-1); }},
      {"log_softmax", {m}, [](T t) { return t[0].log_softmax(-1); }},
      {"mm", {m, {8, 5}}, [](T t) { return t[0].mm(t[1]); }},
      {"mv", {m, v}, [](T t) { return t[0].mv(t[1]); }},
      {"bmm", {{2, 3, 4}, {2, 4, 5}}, [](T t) { return t[0].bmm(t[1]); }},
      {"matmul", {{2, 3, 4}, {4, 5}}, [](T t) { return t[0].matmul(t[1]); }},
      {"baddbmm",
       {{2, 3, 5}, {2, 3, 4}, {2, 4, 5}},
       [](T t) { return torch::baddbmm(t[0], t[1], t[2]); }},
      {"linear", {{2, 6, 8}, {5, 8}, {5}}, [](T t) { return torch::linear(t[0], t[1], t[2]); }},
      {"einsum",
       {{3, 4, 5}, {3, 5}},
       [](T t) {
         return torch::einsum("abc,ac->ab", {t[0], t[1]});
       }},
      {"layer_norm", {m, v, v}, [](T t) { return torch::layer_norm(t[0], {8}, t[1], t[2]); }},
      {"group_norm",
       {{2, 4, 5}, {4}, {4}},
       [](T t) { return torch::group_norm(t[0], 2, t[1], t[2]); }},
      {"batch_norm",
       {{6, 4}, {4}, {4}},
       [](T t) { return torch::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false); }},
      {"rms norm",
       {m, v},
       [](T t) { return t[0] * torch::rsqrt(t[0].square().mean(-1, true) + 1e-5) * t[1]; }},
      {"conv1d",
       {{2, 3, 9}, {4, 3, 3}, {4}},
       [](T t) { return torch::conv1d(t[0], t[1], t[2], 1, 1); }},
      {"conv2d",
       {{2, 3, 7, 7}, {4, 3, 3, 3}},
       [](T t) { return torch::conv2d(t[0], t[1], {}, 2, 1); }},
      {"conv_transpose2d",
       {{2, 3, 5, 5}, {3, 4, 3, 3}, {4}},
       [](T t) { return torch::conv_transpose2d(t[0], t[1], t[2]); }},
      {"max_pool2d", {{2, 3, 6, 6}}, [](T t) { return torch::max_pool2d(t[0], 2); }},
      {"avg_pool2d", {{2, 3, 6, 6}}, [](T t) { return torch::avg_pool2d(t[0], 2); }},
      {"interpolate",
       {{1, 2, 4, 4}},
       [](T t) {
         return torch::upsample_nearest2d(t[0], {8, 8});
       }},
      {"embedding", {{9, 4}, {6}}, [](T t) { return torch::embedding(t[0], whole(t[1], 9)); }},
      {"index_select", {m, v}, [](T t) { return t[0].index_select(0, whole(t[1], 6)); }},
      {"index", {m, v}, [](T t) { return t[0].index({whole(t[1], 6)}); }},
      {"index_put",
       {m, v},
       [](T t) { return t[0].index_put({whole(t[1], 6)}, t[1], /*accumulate=*/true); }},
      {"gather", {m}, [](T t) { return t[0].gather(1, whole(t[0], 8)); }},
      {"scatter_add", {m, m}, [](T t) { return t[0].scatter_add(1, whole(t[1], 8), t[1]); }},
      {"sort", {m}, [](T t) { return std::get<0>(t[0].sort(1)); }},
      {"topk", {m}, [](T t) { return std::get<0>(t[0].topk(3, 1)); }},
      {"cat",
       {m, m},
       [](T t) {
         return torch::cat({t[0], t[1]}, 1);
       }},
      {"stack",
       {m, m},
       [](T t) {
         return torch::stack({t[0], t[1]});
       }},
      {"chunk", {m}, [](T t) { return t[0].chunk(3, 1)[2] * 2; }},
      {"transpose", {m}, [](T t) { return t[0].t().contiguous(); }},
      {"permute",
       {{2, 3, 4}},
       [](T t) {
         return t[0].permute({2, 0, 1}).reshape({4, 6});
       }},
      {"expand",
       {v},
       [](T t) {
         return t[0].expand({6, 8}) * 2;
       }},
      {"slice", {m}, [](T t) { return t[0].slice(1, 1, 7, 2); }},
      {"narrow in place",
       {m},
       [](T t) {
         at::Tensor x = t[0] * 1;
         x.narrow(0, 1, 2).mul_(3);
         return x;
       }},
      {"tril", {m}, [](T t) { return t[0].tril(); }},
      {"flip", {m}, [](T t) { return t[0].flip(0); }},
      {"roll", {m}, [](T t) { return t[0].roll(2, 1); }},
      {"pad",
       {m},
       [](T t) {
         return torch::constant_pad_nd(t[0], {1, 2}, 0.5);
       }},
      {"unfold", {m}, [](T t) { return t[0].unfold(1, 3, 2); }},
      {"mse_loss", {m, m}, [](T t) { return torch::mse_loss(t[0], t[1]); }},
      {"smooth_l1", {m, m}, [](T t) { return torch::smooth_l1_loss(t[0], t[1]); }},
      {"cross_entropy",
       {m, {6}},
       [](T t) { return torch::cross_entropy_loss(t[0], whole(t[1], 8)); }},
      {"nll_loss",
       {m, {6}},
       [](T t) { return torch::nll_loss(t[0].log_softmax(1), whole(t[1], 8)); }},
      {"bce_with_logits",
       {m, m},
       [](T t) { return torch::binary_cross_entropy_with_logits(t[0], t[1].sigmoid()); }},
      {"attention",
       {{2, 2, 5, 4}, {2, 2, 5, 4}, {2, 2, 5, 4}},
       [](T t) {
         at::globalContext().setSDPUseFlash(false);  // the CPU's has other bits
         return torch::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0, true);
       }},
      {"lerp", {m, m}, [](T t) { return torch::lerp(t[0], t[1], 0.3); }},
      {"addcdiv",
       {m, m, m},
       [](T t) { return torch::addcdiv(t[0], t[1], t[2].square() + 1, 0.1); }},
      {"half", {m, {8, 5}}, [](T t) { return t[0].to(at::kBFloat16).mm(t[1].to(at::kBFloat16)); }},
      {"complex", {{6, 4, 2}}, [](T t) { return torch::view_as_complex(t[0]).abs(); }},
      {"fft", {m}, [](T t) { return torch::fft::rfft(t[0]).abs(); }},
      {"arange", {v}, [](T t) { return torch::arange(8, t[0].options()) * t[0]; }},
      {"eye", {m}, [](T t) { return torch::eye(6, t[0].options()).mm(t[0]); }},
      {"cholesky",
       {{4, 4}},
       [](T t) {
         return torch::linalg_cholesky(t[0].mm(t[0].t()) + 4 * torch::eye(4, t[0].options()));
       }},
  };
}

Tensors results_of(const Case& test, c10::Device device) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  Tensors inputs;
  for (const auto& sizes : test.sizes)
    inputs.push_back(torch::randn(sizes, generator).to(device).requires_grad_());
  const at::Tensor output = test.run(inputs);
  EXPECT_EQ(output.device(), device);
  const at::Tensor real = output.is_complex() ? at::view_as_real(output) : output;
  (real * torch::linspace(0.5, 2, real.numel()).to(device, real.scalar_type()).view(real.sizes()))
      .sum()
      .backward();
  Tensors results{output};
  for (const at::Tensor& input : inputs)
    results.push_back(input.grad().defined() ? input.grad() : torch::zeros({1}));
  return results;
}

TEST(SimDeviceKernels, OperatorsHaveTheBitsOfTheCpuForwardAndBackward) {
  for (const Case& test : cases()) {
    SCOPED_TRACE(test.name);
    const Tensors expected = results_of(test, c10::kCPU);
    for (const uint64_t seed : {0, 1}) {
      const auto sim = sim::use(seed, seed * 50us);
      const Tensors results = results_of(test, sim::device(0));
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(same_bits(results[i], expected[i])) << i;
      for (const std::string& waited : sim::operators_that_waited()) ADD_FAILURE() << waited;
    }
  }
}

TEST(SimDeviceKernels, ListsOfTensorsAndScalerOperatorsWork) {
  const auto run = [](c10::Device device) {
    Tensors list;
    for (int i = 1; i < 4; ++i) list.push_back(torch::full({i}, 0.5 * i).to(device));
    Tensors results = at::_foreach_mul(at::_foreach_add(list, list), 3);
    for (const at::Tensor& norm : at::_foreach_norm(list, 2)) results.push_back(norm);
    at::_foreach_addcdiv_(list, list, at::_foreach_exp(list), 0.5);
    at::Tensor found = torch::zeros({1}).to(device),
               growth = torch::zeros({1}, at::kInt).to(device);
    at::Tensor scale = torch::full({1}, 8.0F).to(device);
    at::_amp_foreach_non_finite_check_and_unscale_(list, found, torch::full({1}, 0.5F).to(device));
    at::_amp_update_scale_(scale, growth, found, 2, 0.5, 1);
    results.insert(results.end(), list.begin(), list.end());
    results.insert(results.end(), {found, growth, scale});
    return results;
  };
  const Tensors expected = run(c10::kCPU);
  const auto sim = sim::use(9, 50us);
  const Tensors results = run(sim::device(0));
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(results[i], expected[i])) << i;
}

struct Block : torch::nn::Module {
  Block()
      : tokens(torch::nn::EmbeddingOptions(11, 16)),
        norm1(torch::nn::LayerNormOptions({16})),
        norm2(torch::nn::LayerNormOptions({16})),
        qkv(16, 48),
        projection(16, 16),
        up(16, 64),
        down(64, 16),
        head(16, 11) {
    register_module("tokens", tokens);
    register_module("norm1", norm1);
    register_module("norm2", norm2);
    register_module("qkv", qkv);
    register_module("projection", projection);
    register_module("up", up);
    register_module("down", down);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& text) {
    at::Tensor x = tokens(text);
    const int64_t batch = x.size(0), length = x.size(1);
    const auto parts = qkv(norm1(x)).view({batch, length, 3, 2, 8}).permute({2, 0, 3, 1, 4});
    const at::Tensor mask = torch::ones({length, length}, x.options()).tril() == 0;
    const at::Tensor scores = parts[0].matmul(parts[1].transpose(-1, -2)) / std::sqrt(8.0);
    const at::Tensor seen = scores.masked_fill(mask, -1e9).softmax(-1).matmul(parts[2]);
    x = x + projection(seen.transpose(1, 2).reshape({batch, length, 16}));
    x = x + down(torch::gelu(up(norm2(x))));
    return head(x);
  }
  torch::nn::Embedding tokens;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, projection, up, down, head;
};

void fused_step(const Tensors& parameters, std::vector<Tensors>& state) {
  if (state.empty()) {
    state.resize(3);
    for (const at::Tensor& parameter : parameters) {
      state[0].push_back(torch::zeros_like(parameter));
      state[1].push_back(torch::zeros_like(parameter));
      state[2].push_back(torch::zeros({}, parameter.options()));
    }
  }
  Tensors grads;
  for (const at::Tensor& parameter : parameters) grads.push_back(parameter.grad());
  torch::NoGradGuard no_grad;
  at::_foreach_add_(state[2], 1);
  at::_fused_adamw_(parameters, grads, state[0], state[1], {}, state[2], 1e-2, 0.9, 0.999, 0.01,
                    1e-8, false, false);
}

// Losses and parameters after some steps.
template <class Model>
Tensors train(c10::Device device, bool is_fused, const at::Tensor& input,
              const at::Tensor& target) {
  torch::manual_seed(3);
  const auto model = std::make_shared<Model>();
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<Tensors> fused_state;
  Tensors results;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor logits = model->forward(input.to(device));
    const at::Tensor loss =
        torch::cross_entropy_loss(logits.flatten(0, -2), target.to(device).flatten());
    loss.backward();
    is_fused ? fused_step(model->parameters(), fused_state) : static_cast<void>(optimizer.step());
    results.push_back(loss);
  }
  for (const at::Tensor& parameter : model->parameters()) results.push_back(parameter);
  return results;
}

template <class Model>
void expect_cpu_bits(const at::Tensor& input, const at::Tensor& target) {
  for (const bool is_fused : {false, true}) {
    const Tensors expected = train<Model>(c10::kCPU, is_fused, input, target);
    for (int seed = 0; seed < kSeeds; ++seed) {
      SCOPED_TRACE(seed);
      const auto sim = sim::use(seed, 60us);
      const Tensors results = train<Model>(sim::device(seed % 4), is_fused, input, target);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(same_bits(results[i], expected[i])) << i;
      for (const std::string& waited : sim::operators_that_waited()) ADD_FAILURE() << waited;
    }
  }
}

struct Mlp : torch::nn::Module {
  Mlp() : first(6, 32), second(32, 5) {
    register_module("first", first);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::relu(first(x))); }
  torch::nn::Linear first, second;
};

TEST(SimDeviceTraining, MlpHasTheBitsOfTheCpu) {
  const at::Tensor x = torch::randn({7, 6});
  expect_cpu_bits<Mlp>(x, whole(x.select(1, 0), 5));
}

TEST(SimDeviceTraining, TransformerBlockHasTheBitsOfTheCpu) {
  const at::Tensor text = torch::randint(0, 11, {2, 6}, at::kLong);
  expect_cpu_bits<Block>(text, text.roll(-1, 1));
}

TEST(SimDeviceTraining, BackwardRunsOnTheStreamsOfForward) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    const auto sim = sim::use(seed, 100us);
    const c10::Stream side = side_stream();
    at::Tensor x = torch::full({64}, 2.0F, on(0)).requires_grad_();
    c10::Event ready(c10::kPrivateUse1), done(c10::kPrivateUse1);
    ready.record(current_stream());
    ready.block(side);
    at::Tensor y;
    {
      const c10::StreamGuard guard(side);
      y = x * x;
      done.record(side);
    }
    done.block(current_stream());
    (y * 3).sum().backward();
    EXPECT_TRUE(same_bits(x.grad(), torch::full({64}, 12.0F)));
  }
}

TEST(SimDeviceTraining, AutocastChoosesDtypes) {
  const auto sim = sim::use(1, 50us);
  const at::Tensor x = torch::randn({4, 4}, on(0)), h = torch::randn({4, 4});
  at::autocast::set_autocast_enabled(c10::kPrivateUse1, true);
  at::autocast::set_autocast_dtype(c10::kPrivateUse1, at::kBFloat16);
  const at::Tensor product = x.mm(x), softmax = product.softmax(1), other = h.mm(h);
  at::autocast::set_autocast_enabled(c10::kPrivateUse1, false);
  at::autocast::clear_cache();
  EXPECT_EQ(product.scalar_type(), at::kBFloat16);
  EXPECT_EQ(softmax.scalar_type(), at::kFloat);
  EXPECT_EQ(other.scalar_type(), at::kFloat);
}

// Values whose sums depend on their order.
at::Tensor values(int64_t numel, int rank, at::ScalarType dtype = at::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + rank);
  return (torch::randn({numel}, generator) * std::pow(10.0, rank)).to(dtype);
}

at::Tensor sum_in_rank_order(int64_t numel, int size, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = values(numel, 0, dtype).to(at::kFloat);
  for (int r = 1; r < size; ++r) sum = sum + values(numel, r, dtype).to(at::kFloat);
  return sum.to(dtype);
}

using Collectives = std::function<void(int rank, int size, c10d::Backend& backend, int64_t numel)>;

void run_collectives(const Collectives& fn) {
  static int calls = 0;
  for (int size = 1; size <= 4; ++size) {
    for (const int64_t numel : {1, 7, 1000}) {
      SCOPED_TRACE(c10::str(size, " ranks, ", numel));
      const auto sim = sim::use(size * numel, 100us);
      const std::string token = c10::str("collectives ", ++calls);
      run_ranks(size, [&](int rank) {
        const auto backend = sim::process_group(token, rank, size, 20s);
        fn(rank, size, *backend, numel);
      });
    }
  }
}

at::Tensor device_values(int64_t numel, int rank, at::ScalarType dtype = at::kFloat) {
  return values(numel, rank, dtype).to(sim::device(rank));
}

TEST(SimDeviceCollectives, AllReduceSumsInRankOrder) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      Tensors tensors{device_values(numel, rank, dtype)};
      backend.allreduce(tensors)->wait();
      EXPECT_TRUE(same_bits(tensors[0], sum_in_rank_order(numel, size, dtype)));
    }
    Tensors numbers{torch::full({numel}, rank + 1, on(rank, at::kLong))};
    backend.allreduce(numbers, {.reduceOp = c10d::ReduceOp::MAX})->wait();
    EXPECT_TRUE(same_bits(numbers[0], torch::full({numel}, size, at::kLong)));
    Tensors mean{torch::full({numel}, 3.0F * (rank + 1), on(rank))};
    backend.allreduce(mean, {.reduceOp = c10d::ReduceOp::AVG})->wait();
    EXPECT_TRUE(same_bits(mean[0], torch::full({numel}, 1.5F * (size + 1))));
  });
}

TEST(SimDeviceCollectives, BroadcastAndReduceHaveARoot) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    for (int root = 0; root < size; ++root) {
      Tensors tensors{device_values(numel, rank)};
      backend.broadcast(tensors, {.rootRank = root})->wait();
      EXPECT_TRUE(same_bits(tensors[0], values(numel, root)));
      tensors = {device_values(numel, rank)};
      backend.reduce(tensors, {.rootRank = root})->wait();
      EXPECT_TRUE(same_bits(tensors[0],
                            rank == root ? sum_in_rank_order(numel, size) : values(numel, rank)));
    }
  });
}

TEST(SimDeviceCollectives, AllGatherConcatenates) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    Tensors input{device_values(numel, rank)};
    std::vector<Tensors> outputs(1);
    for (int r = 0; r < size; ++r) outputs[0].push_back(torch::empty({numel}, on(rank)));
    at::Tensor flat = torch::empty({size * numel}, on(rank));
    const auto first = backend.allgather(outputs, input);
    const auto second = backend._allgather_base(flat, input[0]);
    second->wait();
    first->wait();
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(same_bits(outputs[0][r], values(numel, r)));
      EXPECT_TRUE(same_bits(flat.narrow(0, r * numel, numel), values(numel, r)));
    }
  });
}

TEST(SimDeviceCollectives, ReduceScatterSumsInRankOrder) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    const at::Tensor expected =
        sum_in_rank_order(size * numel, size).narrow(0, rank * numel, numel);
    at::Tensor flat = device_values(size * numel, rank);
    at::Tensor output = torch::empty({numel}, on(rank));
    backend._reduce_scatter_base(output, flat)->wait();
    EXPECT_TRUE(same_bits(output, expected));
    Tensors outputs{torch::empty({numel}, on(rank))};
    std::vector<Tensors> inputs{flat.chunk(size)};
    backend.reduce_scatter(outputs, inputs)->wait();
    EXPECT_TRUE(same_bits(outputs[0], expected));
  });
}

TEST(SimDeviceCollectives, AllToAllGatherAndScatterDeliverMessages) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    // Rank r sends r + s + 1 rows to rank s.
    std::vector<int64_t> sizes;
    Tensors parts;
    for (int r = 0; r < size; ++r) {
      sizes.push_back(rank + r + 1);
      parts.push_back(values(100, r).narrow(0, rank, rank + r + 1));
    }
    const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    Tensors sent;
    for (int r = 0; r < size; ++r)
      sent.push_back(values(100, rank).narrow(0, r, rank + r + 1).to(sim::device(rank)));
    at::Tensor input = torch::cat(sent), output = torch::empty({all}, on(rank));
    backend.alltoall_base(output, input, sizes, sizes)->wait();
    EXPECT_TRUE(same_bits(output, torch::cat(parts)));
    Tensors outputs;
    for (const int64_t rows : sizes) outputs.push_back(torch::empty({rows}, on(rank)));
    backend.alltoall(outputs, sent)->wait();
    EXPECT_TRUE(same_bits(torch::cat(outputs), torch::cat(parts)));

    Tensors own{device_values(numel, rank)};
    std::vector<Tensors> gathered(rank == 0 ? 1 : 0);
    if (rank == 0)
      for (int r = 0; r < size; ++r) gathered[0].push_back(torch::empty({numel}, on(0)));
    backend.gather(gathered, own, {.rootRank = 0})->wait();
    Tensors back{torch::empty({numel}, on(rank))};
    backend.scatter(back, gathered, {.rootRank = 0})->wait();
    EXPECT_TRUE(same_bits(back[0], values(numel, rank)));
    backend.barrier()->wait();
  });
}

TEST(SimDeviceCollectives, WaitOrdersTheStreamAndReturnsAtOnce) {
  const auto sim = sim::use();
  run_ranks(2, [](int rank) {
    const auto backend = sim::process_group("wait", rank, 2, 20s);
    Tensors tensors{torch::full({5}, 1.0F, on(rank))};
    sim::Hold hold(current_stream(rank));
    const auto work = backend->allreduce(tensors);
    work->wait();
    const at::Tensor doubled = tensors[0] * 2;
    EXPECT_FALSE(work->isCompleted());
    hold.release();
    EXPECT_TRUE(same_bits(doubled, torch::full({5}, 4.0F)));
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
  });
}

TEST(SimDeviceCollectives, WithoutWaitTheOutputIsNotThere) {
  const auto sim = sim::use(3, 2ms);
  run_ranks(2, [](int rank) {
    const auto backend = sim::process_group("no wait", rank, 2, 20s);
    Tensors tensors{torch::full({5}, 1.0F, on(rank))};
    int wrong = 0;
    for (int i = 0; i < 10; ++i) {
      tensors[0].fill_(1);
      const auto work = backend->allreduce(tensors);
      wrong += tensors[0].cpu()[0].item<float>() != 2;
      work->wait();
      current_stream(rank).synchronize();
    }
    EXPECT_GT(wrong, 0);
  });
}

TEST(SimDeviceCollectives, KeepNoTensorAlive) {
  const auto sim = sim::use();
  const auto backend = sim::process_group("alone", 0, 1, 5s);
  at::Tensor input = torch::ones({100}, on(0)), output = torch::empty({100}, on(0));
  const int64_t live = sim::memory(sim::device(0)).live;
  sim::Hold hold(current_stream());
  const auto work = backend->_allgather_base(output, input);
  input.reset();
  EXPECT_EQ(sim::memory(sim::device(0)).live, live - 400);
  hold.release();
  work->wait();
  sim::synchronize();
}

TEST(SimDeviceCollectives, DifferentOnesAreAnErrorOnAllRanks) {
  const auto sim = sim::use(2, 50us);
  run_ranks(3, [](int rank) {
    const auto backend = sim::process_group("different", rank, 3, 20s);
    const auto error = [&](const c10::intrusive_ptr<c10d::Work>& work) {
      return error_of([&] {
        work->wait();
        sim::synchronize(sim::device(rank));
      });
    };
    Tensors longer{torch::ones({rank == 1 ? 5 : 4}, on(rank))};
    EXPECT_TRUE(contains(error(backend->allreduce(longer)), "all_reduce op=0 Float[5]"));
    Tensors bytes{torch::ones({4}, on(rank, rank == 2 ? at::kByte : at::kFloat))};
    EXPECT_TRUE(contains(error(backend->allreduce(bytes)), "rank 2"));
    Tensors same{torch::ones({4}, on(rank))};
    EXPECT_TRUE(contains(error(rank == 0 ? backend->allreduce(same) : backend->broadcast(same)),
                         "different"));
    at::Tensor sent = torch::ones({6}, on(rank)), received = torch::empty({6}, on(rank));
    std::vector<int64_t> even, uneven{rank == 1 ? 3 : 2, rank == 1 ? 1 : 2, 2};
    EXPECT_TRUE(contains(error(backend->alltoall_base(received, sent, even, uneven)), "rank 1 sends"));
    Tensors fine{torch::ones({4}, on(rank))};
    EXPECT_EQ(error(backend->allreduce(fine)), "no error");
    EXPECT_TRUE(contains(error_of([&] {
                           Tensors host{torch::ones({4})};
                           backend->allreduce(host);
                         }),
                         "must be on a sim device"));
  });
}

TEST(SimDeviceCollectives, MissingRankIsAnErrorWithinTheTimeout) {
  const auto sim = sim::use();
  run_ranks(3, [](int rank) {
    const auto backend = sim::process_group("missing", rank, 3, 200ms);
    if (rank == 1) return;
    const auto start = std::chrono::steady_clock::now();
    Tensors tensors{torch::ones({4}, on(rank))};
    const auto work = backend->allreduce(tensors);
    EXPECT_NO_THROW(work->wait());
    EXPECT_THROW(tensors[0].cpu(), c10::DistBackendError);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
    EXPECT_TRUE(contains(error_of([&] { work->wait(); }), "rank 1 did not come in time"));
    EXPECT_NO_THROW(sim::synchronize(sim::device(rank)));
  });
}

TEST(SimDeviceCollectives, RanksMeetByStore) {
  const auto sim = sim::use();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(3, [&](int rank) {
    const auto backend = sim::process_group(store, rank, 3, 20s);
    EXPECT_EQ(backend->getBackendName(), "simccl");
    Tensors tensors{torch::ones({4}, on(rank))};
    backend->allreduce(tensors)->wait();
    EXPECT_TRUE(same_bits(tensors[0], torch::full({4}, 3.0F)));
  });
}

}  // namespace sim_device_test
}  // namespace tessera
