// Results of the collectives of a fake process group.
#include <gtest/gtest.h>
#include <tessera/comm/fake_world.h>

#include "support/models.h"

namespace tessera::testing::fake_process_group_test {

const CollectiveTag kTag{"test", Channel::kControl};

TEST(FakeProcessGroup, GathersItsOwnShardOnceForEachRank) {
  for (const int rank : {0, 2, 3}) {
    const auto group = fake_process_group(rank, 4);
    const std::vector<int64_t> bounds = {0, 2, 4, 6, 8};
    const auto flat = torch::full({8}, -1.);
    group->all_gather(flat, torch::tensor({5., 7.}), bounds, kTag)->wait();
    EXPECT_TRUE(torch::equal(flat, torch::tensor({5., 7.}).repeat({4}))) << flat;
    const auto in_place = torch::arange(8.);
    group->all_gather(in_place, in_place.narrow(0, 2 * rank, 2), bounds, kTag)->wait();
    EXPECT_TRUE(torch::equal(in_place, torch::tensor({2. * rank, 2. * rank + 1}).repeat({4})));
  }
}

TEST(FakeProcessGroup, RepeatsItsShardOverUnevenOnesAndZerosIfItHasNone) {
  const std::vector<int64_t> bounds = {0, 3, 5, 5, 9};
  const auto flat = torch::full({9}, -1.);
  fake_process_group(1, 4)->all_gather(flat, torch::tensor({5., 7.}), bounds, kTag)->wait();
  EXPECT_TRUE(torch::equal(flat, torch::tensor({7., 5., 7., 5., 7., 5., 7., 5., 7.}))) << flat;
  fake_process_group(2, 4)->all_gather(flat, torch::empty({0}), bounds, kTag)->wait();
  EXPECT_TRUE(torch::equal(flat, torch::zeros({9})));
}

TEST(FakeProcessGroup, ReducesAsIfAllRanksGaveTheSame) {
  const auto group = fake_process_group(1, 4);
  const std::vector<int64_t> bounds = {0, 3, 6, 6, 9};
  const auto flat = torch::arange(9.);
  const auto out = torch::ones({3});
  const std::vector<Piece> pieces = {{0, flat.narrow(0, 0, 4), 4}, {4, flat.narrow(0, 4, 5), 5}};
  group->reduce_scatter(out, pieces, bounds, {.scale = 0.25}, kTag)->wait();
  EXPECT_TRUE(torch::equal(out, torch::tensor({3., 4., 5.}))) << out;
  group->reduce_scatter(out, pieces, bounds, {.accumulate = true}, kTag)->wait();
  EXPECT_TRUE(torch::equal(out, torch::tensor({15., 20., 25.}))) << out;
  group->reduce_scatter(out, {{0, torch::Tensor(), 9}}, bounds, {}, kTag)->wait();
  EXPECT_TRUE(torch::equal(out, torch::zeros({3})));
  const auto low = torch::zeros({3}, at::kBFloat16);
  group->reduce_scatter(low, {{3, flat.narrow(0, 3, 6), 6}}, bounds, {.dtype = at::kFloat}, kTag)
      ->wait();
  EXPECT_TRUE(torch::equal(low, torch::tensor({12., 16., 20.}).to(at::kBFloat16)));
}

TEST(FakeProcessGroup, AddsAndComparesEqualTensors) {
  const auto group = fake_process_group(3, 5);
  const auto sum = torch::tensor({1., -2.}), most = sum.clone();
  group->all_reduce(sum, ReduceOp::kSum, kTag)->wait();
  group->all_reduce(most, ReduceOp::kMax, kTag)->wait();
  EXPECT_TRUE(torch::equal(sum, torch::tensor({5., -10.})));
  EXPECT_TRUE(torch::equal(most, torch::tensor({1., -2.})));
  const auto counts = torch::tensor({3, 4}, torch::kLong);
  group->all_reduce(counts, ReduceOp::kSum, kTag)->wait();
  EXPECT_TRUE(torch::equal(counts, torch::tensor({15, 20}, torch::kLong)));
  group->broadcast(sum, 0, kTag)->wait();
  EXPECT_TRUE(torch::equal(sum, torch::tensor({5., -10.})));
  group->barrier(kTag);
}

TEST(FakeProcessGroup, ReceivesWhatItSendsItself) {
  const auto group = fake_process_group(1, 3);
  const std::vector<torch::Tensor> to = {torch::ones({1}), torch::tensor({5., 7.}), {}};
  const std::vector<torch::Tensor> from = {torch::empty({3}), torch::empty({2}), torch::empty({1})};
  group->all_to_all(from, to, kTag)->wait();
  EXPECT_TRUE(torch::equal(from[0], torch::tensor({5., 7., 5.})));
  EXPECT_TRUE(torch::equal(from[1], torch::tensor({5., 7.})));
  EXPECT_TRUE(torch::equal(from[2], torch::tensor({5.})));
}

TEST(FakeProcessGroup, ChecksArgumentsAsOthersDo) {
  const auto group = fake_process_group(1, 2);
  const std::vector<int64_t> bounds = {0, 2, 4};
  expect_error([&] { group->all_gather(torch::empty({4}), torch::empty({3}), bounds, kTag); },
               {"[all_gather]", "`shard`", "expected 2, got 3"});
  expect_error([&] { group->reduce_scatter(torch::empty({1}), {}, bounds, {}, kTag); },
               {"[reduce_scatter]", "`out`"});
  expect_error([&] { group->broadcast(torch::empty({1}), 2, kTag); }, {"[broadcast]", "`root`"});
  expect_error(
      [&] {
        group->all_reduce(torch::empty({2, 2}).t(), ReduceOp::kSum, kTag);
      },
      {"[all_reduce]", "contiguous"});
  expect_error([&] { group->all_to_all({}, {}, kTag); }, {"[all_to_all]"});
  for (const auto& [rank, size] : {std::pair(0, 0), std::pair(-1, 2), std::pair(2, 2)})
    expect_error([&, r = rank, s = size] { fake_process_group(r, s); }, {"[fake_world]"});
}

}  // namespace tessera::testing::fake_process_group_test
