// Functions of ordinary tensors on the parts of DistTensors.

#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/tensor/dist_tensor.h>
#include <tessera/tensor/local_map.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "support/counted.h"
#include "support/error_of.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::local_map_test {

using testing::on_test_device;

const Placements kRows{Shard{0}}, kColumns{Shard{1}}, kWhole{Replicate{}}, kTerms{Partial{}};

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

at::Tensor leaf(const at::Tensor& values, const DeviceMesh& mesh, const Placements& placements) {
  return distribute(values.detach().clone(), mesh, placements).requires_grad_(true);
}

using testing::error_of;

void expect_error(const std::function<void()>& f, const std::vector<std::string>& words) {
  testing::expect_contains(error_of(f), words);
}

at::Tensor product_of(const at::Tensor& a, const at::Tensor& b) { return a.mm(b); }

// Rows of a product. All ranks have the second factor whole: its gradient is in terms.
TEST(LocalMap, ComputesAndDifferentiatesOnParts) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      const at::Tensor a = numbers({6, 4}), b = numbers({4, 5}, 2), weights = numbers({6, 5}, 3);
      const at::Tensor x = leaf(a, mesh, kRows), y = leaf(b, mesh, kWhole);
      const auto mm =
          local_map(product_of, kRows,
                    {.in_placements = {kRows, kWhole}, .in_grad_placements = {kRows, kTerms}});
      const at::Tensor product = mm(x, y);
      EXPECT_EQ(placements_of(product), kRows);
      EXPECT_TRUE(torch::allclose(full_tensor(product), a.mm(b), 1e-5, 1e-6));
      (product * distribute(weights, mesh, kRows)).sum().backward();
      EXPECT_EQ(placements_of(y.grad()), kWhole);
      EXPECT_TRUE(torch::allclose(full_tensor(x.grad()), weights.mm(b.t()), 1e-5, 1e-6));
      EXPECT_TRUE(torch::allclose(full_tensor(y.grad()), a.t().mm(weights), 1e-5, 1e-6));
    });
  }
}

TEST(LocalMap, TermsOfASumAreReduced) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor a = numbers({3, 8}), b = numbers({8, 5}, 2);
    const at::Tensor x = leaf(a, mesh, kColumns), y = leaf(b, mesh, kRows);
    const at::Tensor product =
        local_map(product_of, kTerms, {.in_placements = {kColumns, kRows}})(x, y);
    EXPECT_EQ(placements_of(product), kTerms);
    EXPECT_TRUE(torch::allclose(full_tensor(product), a.mm(b), 1e-5, 1e-6));
    product.sum().backward();
    EXPECT_TRUE(torch::allclose(full_tensor(x.grad()), torch::ones_like(a.mm(b)).mm(b.t()), 1e-5));
  });
}

TEST(LocalMap, UnevenPartsMakeUnevenResults) {
  for (const int ranks : {2, 3}) {
    run_world(ranks, [](World& world) {
      world.set_process_group(counting_process_group(world.process_group()));
      const auto mesh = DeviceMesh::over_world();
      const at::Tensor a = numbers({7, 4});
      const at::Tensor x = leaf(a, mesh, kRows);
      const auto doubled = local_map(
          [](const at::Tensor& part) {
            return torch::cat({part, part}, 1);
          },
          kRows);
      const at::Tensor result = doubled(x);
      EXPECT_EQ(result.sizes(), (std::vector<int64_t>{7, 8}));
      EXPECT_TRUE(torch::equal(full_tensor(result), torch::cat({a, a}, 1)));
      result.sum().backward();
      EXPECT_TRUE(torch::equal(full_tensor(x.grad()), torch::full_like(a, 2)));
      // Sizes of parts that all ranks know are not compared.
      const at::Tensor even = distribute(numbers({12, 4}), mesh, kRows);
      EXPECT_EQ(count(world, [&] { doubled(even); }).calls(), 0);
      // Results that no mesh dim cuts have the sizes of the parts.
      const auto sums = local_map([](const at::Tensor& part) { return part.sum(0); }, kTerms);
      at::Tensor sum;
      EXPECT_EQ(count(world, [&] { sum = sums(x.detach()); }).calls(), 0);
      EXPECT_TRUE(torch::allclose(full_tensor(sum), a.sum(0), 1e-5, 1e-6));
    });
  }
}

TEST(LocalMap, PartsThatDoNotFitAreErrorsOnAllRanks) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = distribute(numbers({7, 4}), mesh, kRows);
    const auto wrong = local_map(
        [&](const at::Tensor& part) { return world.rank() == 0 ? part.slice(0, 0, 2) : part; },
        kRows);
    expect_error([&] { wrong(x); }, {"result 0", "on rank 0", "expected sizes [3, 4], got [2, 4]"});
  });
}

TEST(LocalMap, OnASquare) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2});
    const at::Tensor a = numbers({5, 4}), b = numbers({4, 7}, 2);
    const at::Tensor x = leaf(a, mesh, {Shard{0}}), y = leaf(b, mesh, {Replicate{}, Shard{1}});
    const auto mm = local_map(
        product_of, Placements{Shard{0}, Shard{-1}},
        {.in_placements = {Placements{Shard{0}}, Placements{Replicate{}, Shard{1}}},
         .in_grad_placements = {Placements{Shard{0}, Partial{}}, Placements{Partial{}, Shard{1}}}});
    const at::Tensor product = mm(x, y);
    EXPECT_EQ(product.sizes(), (std::vector<int64_t>{5, 7}));
    EXPECT_TRUE(torch::allclose(full_tensor(product), a.mm(b), 1e-5, 1e-6));
    product.sum().backward();
    const at::Tensor ones = torch::ones_like(a.mm(b));
    EXPECT_TRUE(torch::allclose(full_tensor(x.grad()), ones.mm(b.t()), 1e-5, 1e-5));
    EXPECT_TRUE(torch::allclose(full_tensor(y.grad()), a.t().mm(ones), 1e-5, 1e-5));
  });
}

TEST(LocalMap, RedistributesOnRequestOnly) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor a = numbers({6, 4}), b = numbers({4, 5}, 2);
    const at::Tensor x = leaf(a, mesh, kColumns), y = distribute(b, mesh, kWhole);
    LocalMapOptions options{.in_placements = {kRows, kWhole}};
    expect_error([&] { local_map(product_of, kRows, options)(x, y); },
                 {"argument 0", "expected [Shard(0)]", "got [Shard(1)]", "redistribute_inputs"});
    options.redistribute_inputs = true;
    const at::Tensor product = local_map(product_of, kRows, options)(x, y);
    EXPECT_TRUE(torch::allclose(full_tensor(product), a.mm(b), 1e-5, 1e-6));
    product.sum().backward();
    EXPECT_EQ(placements_of(x.grad()), kColumns);
    EXPECT_TRUE(torch::allclose(full_tensor(x.grad()), torch::ones_like(a.mm(b)).mm(b.t()), 1e-5));
    EXPECT_EQ(placements_of(x), kColumns);
  });
}

TEST(LocalMap, SeveralResultsAndOtherValues) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor a = numbers({4, 3}), ordinary = numbers({3}, 2);
    const auto f = [](const std::vector<at::Tensor>& parts, const at::Tensor& added,
                      double factor) {
      return std::tuple(parts[0] * factor + added, parts[0].size(0), parts[1].sum(), added);
    };
    const auto mapped = local_map(f, {kRows, std::nullopt, kTerms, std::nullopt},
                                  {.in_placements = {kRows, kRows, std::nullopt, std::nullopt}});
    const at::Tensor x = distribute(a, mesh, kRows);
    const auto [scaled, rows, sum, same] = mapped(std::vector{x, x}, ordinary, 2.0);
    EXPECT_TRUE(torch::allclose(full_tensor(scaled), a * 2 + ordinary));
    EXPECT_EQ(rows, 2);
    EXPECT_TRUE(torch::allclose(full_tensor(sum), a.sum(), 1e-5, 1e-6));
    EXPECT_TRUE(same.is_same(ordinary));
    EXPECT_TRUE(is_dist(x));  // arguments are not changed
  });
}

TEST(LocalMap, WithoutDistTensorsTheFunctionIsCalledAsItIs) {
  run_world(2, [](World&) {
    const auto twice = local_map([](const at::Tensor& x) { return x * 2; }, kRows);
    const at::Tensor x = numbers({3});
    EXPECT_TRUE(torch::equal(twice(x), x * 2));
    int calls = 0;
    local_map([&](const at::Tensor&, int by) { calls += by; }, PlacementsList())(x, 3);
    EXPECT_EQ(calls, 3);
  });
}

TEST(LocalMap, BadListsAreErrors) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = distribute(numbers({4, 3}), mesh, kRows);
    const auto same = [](const at::Tensor& part) { return part; };
    const auto with = [](const at::Tensor& part, int) { return part; };
    expect_error(
        [&] {
          local_map(same, kRows, {.in_placements = {kRows, kRows}})(x);
        },
        {"in_placements", "expected 1, got 2"});
    expect_error([&] { local_map(with, kRows, {.in_placements = {kRows}})(x, 1); },
                 {"in_placements", "expected 2, got 1"});
    expect_error([&] { local_map(same, kRows, {.in_placements = {std::nullopt}})(x); },
                 {"argument 0", "[Shard(0)]", "nullopt"});
    expect_error(
        [&] {
          local_map(with, kRows, {.in_placements = {kRows, kRows}})(x, 1);
        },
        {"argument 1", "not a tensor"});
    expect_error(
        [&] {
          local_map(same, {kRows, kRows})(x);
        },
        {"out_placements", "expected 1, got 2"});
    expect_error([&] { local_map([](const at::Tensor&) { return 3; }, kRows)(x); },
                 {"result 0", "not a tensor"});
    expect_error([&] { local_map([&](const at::Tensor&) { return x; }, kRows)(x); },
                 {"result 0", "DistTensor"});
    expect_error([&] { local_map(same, kRows, {.in_grad_placements = {kWhole}})(x); },
                 {"to_local", "[Shard(0)]", "[Replicate]"});
    expect_error([&] { local_map(same, kRows, {.mesh = DeviceMesh({1}, {0})})(x); }, {"one mesh"});
  });
}

TEST(LocalMap, RanksOutsideTheMeshCannotCallIt) {
  run_world(3, [](World& world) {
    const DeviceMesh mesh({2}, {0, 1});
    const at::Tensor x = distribute(numbers({4, 3}), mesh, kRows);
    const auto twice = local_map([](const at::Tensor& part) { return part * 2; }, kRows);
    if (world.rank() == 2) return expect_error([&] { twice(x); }, {"only ranks of the mesh"});
    EXPECT_TRUE(torch::equal(full_tensor(twice(x)), numbers({4, 3}) * 2));
  });
}

TEST(ToLocal, GradientsHaveTheGivenPlacements) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = leaf(torch::ones({3}), mesh, kWhole);
    to_local(x, kTerms).mul(world.rank() + 1).sum().backward();
    EXPECT_TRUE(torch::equal(full_tensor(x.grad()).cpu(), torch::full({3}, 3.0)));
  });
}

}  // namespace tessera::local_map_test
