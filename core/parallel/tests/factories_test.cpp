// DistTensors that are made part by part: their values, to the bit, and their memory.

#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/init/deferred_init.h>
#include <tessera/tensor/dist_factories.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "support/counted.h"
#include "support/error_of.h"
#include "support/run_world.h"
#include "support/test_device.h"
#include "tensor/tests/test_generator.h"

namespace tessera::factories_test {

using testing::seed_test_generator;
using testing::test_device;
using testing::test_generator;

// Drawn in two blocks and a rest.
constexpr int64_t kLong = 2 * (1 << 20) + 1000;

at::TensorOptions on_device() { return at::TensorOptions().device(test_device()); }

enum class Numbers { kRand, kRandn };

at::Tensor plain_of(Numbers numbers, at::IntArrayRef sizes, at::TensorOptions options,
                    std::optional<at::Generator> generator = std::nullopt) {
  return numbers == Numbers::kRand ? torch::rand(sizes, generator, options)
                                   : torch::randn(sizes, generator, options);
}
at::Tensor dist_of(Numbers numbers, at::IntArrayRef sizes, const DeviceMesh& mesh,
                   const Placements& placements, at::TensorOptions options,
                   std::optional<at::Generator> generator = std::nullopt) {
  return numbers == Numbers::kRand ? dist_rand(sizes, mesh, placements, options, generator)
                                   : dist_randn(sizes, mesh, placements, options, generator);
}

// Draws both from one state of the generators; they must end in the same state.
void expect_as_plain(const DeviceMesh& mesh, const std::vector<int64_t>& sizes,
                     const Placements& placements, at::ScalarType dtype = at::kFloat) {
  for (const Numbers numbers : {Numbers::kRand, Numbers::kRandn}) {
    SCOPED_TRACE(std::string(numbers == Numbers::kRand ? "rand " : "randn ") +
                 to_string(placements) + " of " + std::to_string(c10::multiply_integers(sizes)) +
                 " " + c10::toString(dtype));
    seed_test_generator(11);
    const at::Tensor expected = plain_of(numbers, sizes, on_device().dtype(dtype));
    const at::Tensor after = test_generator().get_state();
    seed_test_generator(11);
    const at::Tensor dist = dist_of(numbers, sizes, mesh, placements, on_device().dtype(dtype));
    EXPECT_TRUE(torch::equal(test_generator().get_state(), after));
    ASSERT_EQ(dist.sizes(), expected.sizes());
    EXPECT_EQ(dist.scalar_type(), dtype);
    EXPECT_EQ(placements_of(dist), normalize(placements, mesh.ndim(), dist.dim()));
    EXPECT_TRUE(!mesh.is_member() || torch::equal(full_tensor(dist), expected));
  }
}

const std::vector<Placements> kLines = {
    {Shard{0}}, {Shard{1}}, {Shard{-1}}, {Replicate{}}, {Partial{}}};

TEST(DistFactories, NumbersAreThoseOfOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      for (const Placements& placements : kLines) {
        for (const auto& sizes : std::vector<std::vector<int64_t>>{
                 {5, 3}, {4, 4}, {3, 7}, {16, 6}, {37, 11}, {2, 0}, {0, 4}, {1, 1}})
          expect_as_plain(mesh, sizes, placements);
      }
      expect_as_plain(mesh, {}, {});
      expect_as_plain(mesh, {17}, {Shard{0}});
    });
  }
}

TEST(DistFactories, NumbersOfSeveralBlocksAreThoseOfOneProcess) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    for (const int64_t more : {-1000, -999, -991, -990, -984, -983, 0})
      expect_as_plain(mesh, {kLong + more}, {Shard{0}});
    expect_as_plain(mesh, {(1 << 20) + 15}, {Shard{0}});
    expect_as_plain(mesh, {(1 << 20) + 16}, {Shard{0}});
    expect_as_plain(mesh, {1031, 2053}, {Shard{0}});
    expect_as_plain(mesh, {1031, 2053}, {Shard{1}});
    expect_as_plain(mesh, {1031, 2053}, {Partial{}});
    expect_as_plain(mesh, {3, 349, 2053}, {Shard{1}});
  });
}

TEST(DistFactories, EveryDtype) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    for (const at::ScalarType dtype : {at::kDouble, at::kHalf, at::kBFloat16}) {
      expect_as_plain(mesh, {5, 3}, {Shard{0}}, dtype);
      expect_as_plain(mesh, {37, 11}, {Shard{1}}, dtype);
      if (testing::tests_on_host()) expect_as_plain(mesh, {(1 << 20) + 35}, {Shard{0}}, dtype);
    }
  });
}

TEST(DistFactories, Squares) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2});
    for (const Placements& placements : std::vector<Placements>{{Shard{0}, Shard{1}},
                                                                {Shard{0}, Shard{0}},
                                                                {Replicate{}, Shard{1}},
                                                                {Partial{}, Shard{0}}})
      expect_as_plain(mesh, {13, 21}, placements);
    expect_as_plain(mesh, {8, 24}, {Shard{0}, Shard{1, 3}});
  });
}

TEST(DistFactories, SplitDims) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    expect_as_plain(mesh, {12, 5}, {Shard{0, 3}});
    expect_as_plain(mesh, {5, 12}, {Shard{1, 2}});
  });
}

TEST(DistFactories, ExplicitGenerators) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor before = test_generator().get_state();
    at::Generator one = test_generator().clone();
    one.set_current_seed(5);
    at::Generator two = one.clone();
    const at::Tensor plain = torch::randn({7, 5}, one, on_device());
    const at::Tensor dist = dist_randn({7, 5}, mesh, {Shard{0}}, on_device(), two);
    EXPECT_TRUE(torch::equal(full_tensor(dist), plain));
    EXPECT_TRUE(torch::equal(one.get_state(), two.get_state()));
    EXPECT_TRUE(torch::equal(test_generator().get_state(), before));
  });
}

TEST(DistFactories, RanksOutsideTheMeshStayInStep) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 2});
    expect_as_plain(mesh, {5, 7}, {Shard{0}});
    expect_as_plain(mesh, {5, 7}, {Replicate{}});
    if (testing::tests_on_host()) expect_as_plain(mesh, {(1 << 20) + 35}, {Shard{0}});
    const at::Tensor ones = dist_ones({5, 7}, mesh, {Shard{1}}, on_device());
    EXPECT_EQ(ones.sizes(), (std::vector<int64_t>{5, 7}));
    EXPECT_EQ(to_local(ones).numel() > 0, mesh.is_member());
  });
}

TEST(DistFactories, DifferingGeneratorsAreNamedOnAllRanks) {
  run_world(2, [](World& world) {
    seed_test_generator(world.rank() == 1 ? 8 : 7);
    try {
      dist_randn({4, 2}, DeviceMesh::over_world(), {Shard{0}}, on_device());
      ADD_FAILURE() << "no error";
    } catch (const c10::ValueError& error) {
      const std::string text = error.what_without_backtrace();
      testing::expect_contains(text, {"rank 1 differs from that of rank 0", "dist_randn"});
    }
  });
}

TEST(DistFactories, ConstantsHaveTheSameValuesForAllPlacements) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      for (const Placements& placements : kLines) {
        SCOPED_TRACE(to_string(placements));
        const auto expect = [](const at::Tensor& dist, const at::Tensor& plain) {
          EXPECT_EQ(dist.scalar_type(), plain.scalar_type());
          EXPECT_TRUE(torch::equal(full_tensor(dist), plain));
        };
        const at::TensorOptions longs = on_device().dtype(torch::kLong);
        expect(dist_zeros({5, 3}, mesh, placements, on_device()),
               torch::zeros({5, 3}, on_device()));
        expect(dist_ones({5, 3}, mesh, placements, longs), torch::ones({5, 3}, longs));
        expect(dist_full({5, 3}, 2.5, mesh, placements, on_device()),
               torch::full({5, 3}, 2.5, on_device()));
        expect(dist_full({5, 3}, 7, mesh, placements, on_device()),
               torch::full({5, 3}, 7, on_device()));
        const at::Tensor empty = dist_empty({5, 3}, mesh, placements, on_device());
        EXPECT_EQ(empty.sizes(), (std::vector<int64_t>{5, 3}));
        EXPECT_EQ(placements_of(empty), normalize(placements, 1, 2));
      }
      const at::Tensor product =
          dist_full({4}, 3.0, mesh, {Partial{PartialOp::kProd}}, on_device());
      EXPECT_TRUE(torch::equal(full_tensor(product), torch::full({4}, 3.0, on_device())));
    });
  }
}

TEST(DistFactories, PartsAreAllThatARankHas) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto mesh = DeviceMesh::over_world();
    const auto counts = count(world, [&] {
      // Far more than any memory.
      const at::Tensor huge = dist_empty({1LL << 40, 0}, mesh, {Shard{0}}, on_device());
      EXPECT_EQ(to_local(huge).size(0), 1LL << 39);
      const at::Tensor zeros = dist_zeros({6, 4}, mesh, {Shard{0}}, on_device());
      EXPECT_EQ(to_local(zeros).storage().nbytes(), 3 * 4 * sizeof(float));
    });
    EXPECT_EQ(counts.calls(), 0);
    seed_test_generator(3);
    const at::Tensor drawn = dist_randn({1 << 10, 1 << 11}, mesh, {Shard{1}}, on_device());
    EXPECT_EQ(to_local(drawn).storage().nbytes(), (size_t{1} << 20) * sizeof(float));
    const auto later = count(world, [&] { dist_rand({64, 3}, mesh, {Shard{0}}, on_device()); });
    EXPECT_EQ(later.calls(), 0);
  });
}

TEST(DistFactories, ALeafOnRequest) {
  run_world(2, [](World&) {
    seed_test_generator(3);
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor weight = dist_randn({6, 4}, mesh, {Shard{0}}, on_device().requires_grad(true));
    EXPECT_TRUE(weight.is_leaf() && weight.requires_grad());
    weight.square().sum().backward();
    EXPECT_EQ(placements_of(weight.grad()), Placements{Shard{0}});
    EXPECT_TRUE(torch::allclose(full_tensor(weight.grad()), 2 * full_tensor(weight.detach())));
    EXPECT_FALSE(dist_zeros({3}, mesh, {}, on_device()).requires_grad());
  });
}

using testing::error_of;

TEST(DistFactories, BadArgumentsAreErrors) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor before = test_generator().get_state();
    const auto expect = [](const std::string& text, const std::string& word) {
      testing::expect_contains(text, {word});
    };
    expect(error_of([&] { dist_zeros({3, -1}, mesh, {}); }), "must not be negative");
    expect(error_of([&] { dist_randn({3, 2}, mesh, {Shard{2}}); }), "dim");
    expect(error_of([&] {
             dist_randn({3, 2}, mesh, {Shard{0}, Shard{1}});
           }),
           "at most one placement");
    expect(error_of([&] { dist_randn({5, 2}, mesh, {Shard{0, 2}}); }), "split");
    expect(error_of([&] { dist_ones({3}, mesh, {}, at::TensorOptions().layout(at::kSparse)); }),
           "dense");
    EXPECT_TRUE(torch::equal(test_generator().get_state(), before));
    const DeferredInit deferred;
    EXPECT_THROW(dist_zeros({3}, mesh, {}), c10::Error);
  });
}

}  // namespace tessera::factories_test
