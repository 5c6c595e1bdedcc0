// Ranks that exchange tensors alike in sizes, placements and names in another order get an error,
// and never each other's values.
#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/run_world.h"

namespace tessera::testing::identity_test {

using Pair = std::pair<at::Tensor, at::Tensor>;
using MakePair = std::function<Pair(const DeviceMesh&)>;

at::Tensor rows(const DeviceMesh& mesh, double value = 1) {
  return from_local(torch::full({2, 3}, value), mesh, {Shard{0}});
}

class OrderOfTensors : public ::testing::TestWithParam<Transport> {
 protected:
  // Rank 1 gathers the second tensor first.
  static void expect_refused(const MakePair& make) {
    run_over(
        GetParam(), 2,
        [&](World& world) {
          auto [first, second] = make(DeviceMesh::over_world(world));
          if (world.rank() == 1) std::swap(first, second);
          const std::string error = error_of<c10::DistBackendError>([&] {
            full_tensor(first);
            full_tensor(second);
          });
          expect_contains(error, {"unit 'redistributed tensor ([", ", tensor "});
        },
        std::chrono::milliseconds(500));
  }
};

TEST_P(OrderOfTensors, OfPartsMustBeTheSame) {
  expect_refused([](const DeviceMesh& mesh) { return Pair{rows(mesh), rows(mesh, 2)}; });
}

TEST_P(OrderOfTensors, OfResultsMustBeTheSame) {
  expect_refused([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(mesh);
    return Pair{x.sin(), x.cos()};
  });
  expect_refused([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(mesh);
    return Pair{x * 2, x * 3};
  });
  expect_refused([](const DeviceMesh& mesh) {
    const auto parts = from_local(torch::ones({2, 4}), mesh, {Shard{0}}).chunk(2, 1);
    return Pair{parts[0], parts[1]};
  });
  expect_refused([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(mesh);
    manual_seed(3);
    const at::Tensor first = torch::dropout(x, 0.5, true), second = torch::dropout(x, 0.5, true);
    return Pair{first, second};
  });
  expect_refused([](const DeviceMesh& mesh) {
    const auto made = at::_foreach_mul({rows(mesh), rows(mesh, 2)}, 2);
    return Pair{made[0], made[1]};
  });
}

// A view of a part that has elements is a view there, and on ranks without any it is a copy.
TEST(Identities, ViewsAreOnAllRanksWhatTheyAreOnOne) {
  run_world(4, [](World&) {
    const DeviceMesh mesh({2, 2}, {2, 0, 1, 3});
    const at::Tensor plain = torch::arange(192.0).view({2, 8, 2, 6});
    const at::Tensor x = distribute(plain.clone(), mesh, {Shard{0}, Shard{1}});
    const auto expect_whole = [&](const std::function<at::Tensor(const at::Tensor&)>& view) {
      const at::Tensor own = view(x), alone = view(plain);
      own.cumsum_(0);
      alone.cumsum_(0);
      for (const auto& [found, expected] : {std::pair(own, alone), {x, plain}})
        EXPECT_TRUE(full_tensor(found).equal(expected));
    };
    expect_whole([](const at::Tensor& t) { return t.select(1, 4).flatten(-2); });
    expect_whole([](const at::Tensor& t) { return t.flatten(-2).narrow(1, 3, 2); });
  });
}

TEST_P(OrderOfTensors, OfGradientsMustBeTheSame) {
  expect_refused([](const DeviceMesh& mesh) {
    const at::Tensor x = rows(mesh).requires_grad_(), y = rows(mesh, 2).requires_grad_();
    (x * y).sum().backward();
    return Pair{x.grad(), y.grad()};
  });
}

// A sum over ranks that two operators leave pending, reduced by what reads it.
TEST_P(OrderOfTensors, OfReductionsMustBeTheSame) {
  run_over(
      GetParam(), 2,
      [&](World& world) {
        const auto mesh = DeviceMesh::over_world(world);
        const at::Tensor x = rows(mesh);
        const at::Tensor first = x.sum(0), second = (x * 2).sum(0);
        const auto read = [&](bool is_first) { to_local((is_first ? first : second).relu()); };
        const bool is_first = world.rank() == 0;
        expect_contains(error_of<c10::DistBackendError>([&] {
                          read(is_first);
                          read(!is_first);
                        }),
                        {"sum"});
      },
      std::chrono::milliseconds(500));
}

INSTANTIATE_TEST_SUITE_P(Over, OrderOfTensors, ::testing::ValuesIn(kTransports), transport_of_test);

// What one rank computes beside, without the others, changes nothing.
TEST(Identities, DoNotDependOnWhatElseARankComputes) {
  run_arena(3, [](World& world) {
    const auto mesh = DeviceMesh::over_world(world);
    const at::Tensor x = rows(mesh, world.rank()).requires_grad_();
    const DeviceMesh alone(world, {1}, {1});
    if (world.rank() == 1) {
      rows(alone).mul_(3);
      const at::NoGradGuard no_grad;
      EXPECT_EQ(to_local(x.detach() * 7 + x.cos()).size(0), 2);
      x.clone().mul_(2).add_(x);
    }
    const at::Tensor y = (x * 2).relu();
    y.sum().backward();
    EXPECT_EQ(full_tensor(y).sum().item<double>(), 2 * 6 * (0 + 1 + 2));
    EXPECT_EQ(full_tensor(x.grad()).numel(), 18);
  });
}

// A rank that is not in a mesh may have made fewer tensors on it.
TEST(Identities, AreNotComparedBetweenMeshes) {
  run_arena(3, [](World& world) {
    const DeviceMesh pair(world, {2}, {0, 1}), other(world, {2}, {1, 2});
    if (world.rank() < 2) {
      EXPECT_EQ(full_tensor(rows(pair)).numel(), 12);
    }
    const at::Tensor x =
        from_local(torch::full({2, 3}, 1.0), pair, {Shard{0}}, std::vector<int64_t>{4, 3});
    const at::Tensor moved = redistribute(x, other, {Shard{1}});
    if (world.rank() > 0) {
      EXPECT_EQ(full_tensor(moved * 2).sum().item<double>(), 24);
    }
  });
}

}  // namespace tessera::testing::identity_test
