// Rows that ranks send each other, and their gradients.

#include <gtest/gtest.h>
#include <tessera/parallel/all_to_all.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "support/error_of.h"
#include "support/run_world.h"

namespace tessera::all_to_all_test {

using testing::error_of;
using testing::expect_contains;

// Rank `r` sends (r + q) % 3 rows to rank `q`: to some none.
std::vector<int64_t> sizes_of(int64_t rank, int64_t ranks) {
  std::vector<int64_t> sizes;
  for (int64_t to = 0; to < ranks; ++to) sizes.push_back((rank + to) % 3);
  return sizes;
}

// Row `i` to rank `to` has these values.
at::Tensor row_of(int64_t from, int64_t to, int64_t i) {
  return torch::tensor(
      {1.0, static_cast<double>(from), static_cast<double>(to), static_cast<double>(i)},
      torch::kDouble);
}

TEST(AllToAllSingle, RowsArriveAndTheirGradientsComeBack) {
  for (const Transport transport : kTransports) {
    for (const int ranks : {1, 2, 3, 4}) {
      run_over(transport, ranks, [ranks](World& world) {
        const ProcessGroupPtr group = default_process_group();
        const std::vector<int64_t> to = sizes_of(world.rank(), ranks);
        std::vector<at::Tensor> rows, expected = {torch::empty({0, 4}, torch::kDouble)};
        rows = expected;
        std::vector<int64_t> from;
        for (int64_t other = 0; other < ranks; ++other) {
          for (int64_t i = 0; i < to[other]; ++i)
            rows.push_back(row_of(world.rank(), other, i).view({1, 4}));
          from.push_back(sizes_of(other, ranks)[world.rank()]);
          for (int64_t i = 0; i < from.back(); ++i)
            expected.push_back(row_of(other, world.rank(), i).view({1, 4}));
        }
        EXPECT_EQ(exchange_split_sizes(to, group), from);
        const at::Tensor input = torch::cat(rows).requires_grad_();
        const at::Tensor output = all_to_all_single(input, from, to, group);
        EXPECT_TRUE(torch::equal(output, torch::cat(expected)));

        // Each rank scales what it has got by its number: f = sum of (scale * x)^3.
        const double scale = world.rank() + 1;
        const at::Tensor loss = (output * scale).pow(3).sum();
        const at::Tensor gradient = torch::autograd::grad(
            {loss}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
        std::vector<at::Tensor> first = {torch::empty({0, 4}, torch::kDouble)}, second = first;
        int64_t begin = 0;
        for (int64_t other = 0; other < ranks; ++other) {
          const double cube = static_cast<double>((other + 1) * (other + 1) * (other + 1));
          const at::Tensor own = input.detach().narrow(0, begin, to[other]);
          first.push_back(3 * cube * own.square());
          second.push_back(6 * cube * own);
          begin += to[other];
        }
        EXPECT_TRUE(torch::equal(gradient, torch::cat(first)));
        gradient.sum().backward();
        EXPECT_TRUE(torch::equal(input.grad(), torch::cat(second)));
      });
    }
  }
}

TEST(AllToAllSingle, TakesRowsOfAnyDtypeShapeAndStrides) {
  run_world(2, [](World& world) {
    const ProcessGroupPtr group = default_process_group();
    for (const at::ScalarType dtype : {at::kLong, at::kBool, at::kBFloat16, at::kFloat}) {
      const at::Tensor input = (torch::arange(24).view({2, 3, 4}).transpose(0, 2) % 2).to(dtype);
      const at::Tensor output = all_to_all_single(input, {2, 2}, {2, 2}, group);
      const at::Tensor own = input.narrow(0, 2 * world.rank(), 2);
      EXPECT_TRUE(torch::equal(output, torch::cat({own, own}))) << dtype;
    }
    const at::Tensor vector = all_to_all_single(
        torch::ones({1}), {world.rank() == 0 ? 0 : 1, world.rank() == 0 ? 0 : 1}, {0, 1}, group);
    EXPECT_EQ(vector.size(0), world.rank() == 0 ? 0 : 2);
  });
}

TEST(AllToAllSingle, CallsThatDoNotFitAreRefusedOnAllRanks) {
  run_world(2, [](World& world) {
    const ProcessGroupPtr group = default_process_group();
    const bool is_wrong = world.rank() == 1;
    const auto error = [&](const at::Tensor& input, std::vector<int64_t> from,
                           std::vector<int64_t> to) {
      return error_of([&] { all_to_all_single(input, std::move(from), std::move(to), group); });
    };
    using Sizes = std::vector<int64_t>;
    const at::Tensor rows = torch::ones({2, 3});
    expect_contains(error(rows, {1, 1}, is_wrong ? Sizes{2} : Sizes{1, 1}),
                    {"input_split_sizes must have one size for each of 2 ranks; got 1"});
    expect_contains(error(rows, is_wrong ? Sizes{3, -1} : Sizes{1, 1}, {1, 1}),
                    {"output_split_sizes must not be negative; got [3, -1]"});
    expect_contains(error(rows, {1, 1}, is_wrong ? Sizes{1, 2} : Sizes{1, 1}),
                    {"must add up to the 2 rows of the input; got [1, 2]"});
    expect_contains(error(rows, is_wrong ? Sizes{2, 1} : Sizes{1, 1}, {1, 1}),
                    {"rank 0 sends 1 rows to rank 1, which expects 2", "exchange_split_sizes()"});
    expect_contains(error(is_wrong ? rows.to(torch::kDouble) : rows, {1, 1}, {1, 1}),
                    {"one dtype and shape; got Float [3] on rank 0, Double [3] on rank 1"});
    expect_contains(error(is_wrong ? torch::tensor(1.0) : rows, {1, 1}, {1, 1}),
                    {"must be an ordinary tensor of rows; got one without dims"});
    const at::Tensor dist = distribute(rows, DeviceMesh::over_world(), {Shard{0}});
    expect_contains(error(dist, {1, 1}, {1, 1}), {"got a DistTensor: to_local()"});
    expect_contains(error_of([&] {
                      exchange_split_sizes(is_wrong ? Sizes{1, -1} : Sizes{1, 1}, group);
                    }),
                    {"input_split_sizes must not be negative; got [1, -1]"});
  });
}

}  // namespace tessera::all_to_all_test
