// The counted bytes are those that are sent, and no more are sent than necessary.
#include "comm/group/sent_bytes.h"

#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "comm/group/capability.h"
#include "support/contract.h"

namespace tessera::testing::sent_bytes_test {

int64_t sent_by(const ProcessGroupPtr& pg) {
  const auto* const sender = dynamic_cast<const SendsMessages*>(pg.get());
  TORCH_CHECK(sender, "expected one that knows what it sends");
  return sender->sent().nbytes;
}

// Returns the bytes that all ranks send in `collective`. It must wait for its own end.
int64_t sent_in(World& world, const std::function<void(ProcessGroup&)>& collective) {
  const ProcessGroupPtr& pg = world.process_group();
  pg->barrier(kTag);
  const int64_t before = sent_by(pg);
  collective(*pg);
  const auto sent = torch::tensor({sent_by(pg) - before}, torch::kInt64);
  pg->all_reduce(sent, ReduceOp::kSum, kTag)->wait();
  return sent.item<int64_t>();
}

class SentBytes : public ProcessGroupContract {
 protected:
  void run_on_world(const std::function<void(World&)>& fn) const {
    std::get<0>(GetParam()) == Kind::kHosts ? run_hosts(size(), host_of(size()), fn)
                                            : run_world(size(), fn);
  }
};

TEST_P(SentBytes, AreThoseThatAreCounted) {
  run_on_world([this](World& world) {
    const ProcessGroupPtr inner = world.process_group();
    const auto counting = counting_process_group(inner);
    const int rank = world.rank();
    for (const std::vector<int64_t>& bounds : all_bounds()) {
      const int64_t own = bounds[rank + 1] - bounds[rank], all = bounds.back();
      auto flat = torch::zeros({all}), shard = torch::zeros({own});
      auto few = torch::zeros({100}), many = torch::zeros({60'000});
      const std::vector<std::function<void()>> collectives{
          [&] { counting->all_gather(flat, shard, bounds, kTag)->wait(); },
          [&] {
            counting->reduce_scatter(shard, {{0, flat, all}}, bounds, {}, kTag)->wait();
          },
          [&] { counting->all_reduce(few, ReduceOp::kMax, kTag)->wait(); },
          [&] { counting->all_reduce(many, ReduceOp::kSum, kTag)->wait(); },
          [&] { counting->broadcast(many, 1, kTag)->wait(); },
      };
      for (size_t i = 0; i < collectives.size(); ++i) {
        inner->barrier(kTag);
        const int64_t before = sent_by(inner);
        counting->reset_counts();
        collectives[i]();
        EXPECT_EQ(counting->counts().bytes_sent(), sent_by(inner) - before)
            << "collective " << i << ", " << all << " elements, rank " << rank;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gloo, SentBytes,
                         ::testing::Combine(::testing::Values(Kind::kGloo),
                                            ::testing::Values(2, 3)));
INSTANTIATE_TEST_SUITE_P(Hosts, SentBytes,
                         ::testing::Combine(::testing::Values(Kind::kHosts), ::testing::Values(4)));

// With 4 ranks on 2 hosts, every element crosses once for each host that lacks it.
TEST(SentBytes, CrossTheNetworkOnceForAHost) {
  run_hosts(4, by_halves, [](World& world) {
    constexpr int64_t kNumel = 80'000, kBytes = 4 * kNumel;
    const std::vector<int64_t> bounds{0, 20'000, 40'000, 60'000, 80'000};
    auto flat = torch::zeros({kNumel}), shard = torch::ones({20'000});
    EXPECT_EQ(
        sent_in(world, [&](ProcessGroup& pg) { pg.all_gather(flat, shard, bounds, kTag)->wait(); }),
        kBytes);
    EXPECT_TRUE(torch::equal(flat, torch::ones({kNumel})));
    EXPECT_EQ(sent_in(world,
                      [&](ProcessGroup& pg) { pg.all_reduce(flat, ReduceOp::kSum, kTag)->wait(); }),
              2 * kBytes);
    EXPECT_TRUE(torch::equal(flat, torch::full({kNumel}, 4.f)));
  });
}

}  // namespace tessera::testing::sent_bytes_test
