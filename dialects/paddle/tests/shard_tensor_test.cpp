// Paddle's meshes, placements and DistTensors.

#include "dialects/paddle/tests/shard_layer.h"

namespace tessera::testing::shard_tensor_test {

using paddle::dtensor_from_fn;
using paddle::dtensor_from_local;
using paddle::dtensor_to_local;
using paddle::reshard;
using paddle::shard_tensor;
using paddle::unshard_dtensor;

using Sizes = std::vector<int64_t>;

TEST(ProcessMesh, SL_20_ShapeIdsAndNames) {
  TESSERA_ON_HOST_ONLY("the simulated accelerator has no 6 devices");
  run_world(6, [](World&) {
    const ProcessMesh mesh({{2, 4, 5}, {0, 1, 3}});
    EXPECT_EQ(mesh.shape(), (Sizes{2, 3}));
    EXPECT_EQ(mesh.process_ids(), (std::vector<int>{2, 4, 5, 0, 1, 3}));
    EXPECT_EQ(mesh.dim_names(), (std::vector<std::string>{"d0", "d1"}));
    EXPECT_EQ(ProcessMesh(torch::arange(6).view({3, 2})).shape(), (Sizes{3, 2}));
    EXPECT_EQ(ProcessMesh({{{0, 1}, {2, 3}}}).shape(), (Sizes{1, 2, 2}));
    EXPECT_EQ(ProcessMesh({0, 1}, {"x"}).dim_names(), std::vector<std::string>{"x"});
  });
}

TEST(ProcessMesh, SL_20_WhatIsNoMeshIsRefused) {
  run_world(2, [](World&) {
    expect_error(
        [] {
          ProcessMesh(torch::tensor({0.0, 1.0}));
        },
        {"All elements of the mesh must be integer"});
    expect_error([] { ProcessMesh({0, -1}); }, {"All elements of the mesh must be >= 0."});
    expect_error([] { ProcessMesh({1, 1}); }, {"All elements of the mesh must be unique."});
    expect_error(
        [] {
          ProcessMesh({0, 1}, {"a", "b"});
        },
        {"The length of dims_names must be same as the shape of the mesh."});
    expect_error([] { ProcessMesh({{0}, {1}}, {"a", "a"}); }, {"All dim_names", "must be unique."});
    expect_error([] { ProcessMesh({{0, 1}, {2}}); }, {"one shape"});
    expect_error([] { ProcessMesh(torch::zeros({0}, torch::kLong)); }, {"an empty one"});
    expect_error([] { ProcessMesh({0, 2}); }, {"2"});  // the world has two ranks
  });
}

TEST(ProcessMesh, SL_21_PartsOfAMesh) {
  run_world(4, [](World& world) {
    const ProcessMesh mesh({{0, 1}, {2, 3}}, {"dp", "mp"});
    EXPECT_EQ(mesh[0].process_ids(), (std::vector<int>{0, 1}));
    EXPECT_EQ(mesh.select(1, 1).ranks(), (std::vector<int>{1, 3}));
    EXPECT_EQ(mesh.get_mesh_with_dim("mp").process_ids(), (std::vector<int>{0, 2, 1, 3}));
    EXPECT_EQ(mesh.get_mesh_with_dim("mp", 1).process_ids(), (std::vector<int>{1, 3}));
    EXPECT_EQ(mesh.get_dim_size("dp"), 2);
    EXPECT_EQ(mesh, ProcessMesh({{0, 1}, {2, 3}}));
    EXPECT_NE(ProcessMesh({0, 1}), ProcessMesh({1, 0}));
    // A rank may hold a tensor of a mesh that it is not in.
    const at::Tensor tensor = shard_tensor(values({4, 2}), mesh[0], {Shard{0}});
    EXPECT_EQ(tensor.sizes(), (Sizes{4, 2}));
    EXPECT_EQ(dtensor_to_local(tensor).numel(), world.rank() < 2 ? 4 : 0);
  });
}

TEST(ShardTensor, SL_22_Placements) {
  EXPECT_EQ(Placement(Shard{1}), Placement(Shard{1}));
  EXPECT_NE(Placement(Shard{1}), Placement(Shard{0}));
  EXPECT_NE(Placement(Replicate{}), Placement(Partial{}));
  EXPECT_EQ(Partial{}.op, PartialOp::kSum);
  run_world(2, [](World& world) {
    const ProcessMesh mesh({0, 1});
    const at::Tensor own = on_test_device(torch::full({2}, world.rank() + 2.0));
    const std::vector<std::pair<PartialOp, double>> expected = {{PartialOp::kSum, 5},
                                                                {PartialOp::kAvg, 2.5},
                                                                {PartialOp::kMax, 3},
                                                                {PartialOp::kMin, 2},
                                                                {PartialOp::kProd, 6}};
    for (const auto& [op, value] : expected) {
      const at::Tensor partial = dtensor_from_local(own, mesh, {Partial{op}});
      EXPECT_TRUE(same_values(unshard_dtensor(partial), torch::full({2}, value)))
          << static_cast<int>(op);
    }
    const at::Tensor flag = on_test_device(torch::full({1}, world.rank() == 1));
    EXPECT_TRUE(
        unshard_dtensor(dtensor_from_local(flag, mesh, {Partial{PartialOp::kAny}})).item<bool>());
    EXPECT_FALSE(
        unshard_dtensor(dtensor_from_local(flag, mesh, {Partial{PartialOp::kAll}})).item<bool>());
  });
}

TEST(ShardTensor, SL_23_MissingPlacementsAreReplicated) {
  run_world(4, [](World&) {
    const ProcessMesh mesh({{0, 1}, {2, 3}});
    EXPECT_EQ(placements_of(shard_tensor(values({4}), mesh, {})),
              (Placements{Replicate{}, Replicate{}}));
    EXPECT_EQ(placements_of(shard_tensor(values({4}), mesh, {Shard{0}})),
              (Placements{Shard{0}, Replicate{}}));
    expect_error(
        [&] {
          shard_tensor(values({4}), mesh, {Shard{0}, Replicate{}, Replicate{}});
        },
        {"2", "3"});
  });
}

TEST(ShardTensor, SL_24_UnevenPartsAreThoseOfChunk) {
  run_world(2, [](World& world) {
    const ProcessMesh mesh({0, 1});
    const at::Tensor tensor = shard_tensor(values({5, 2}), mesh, {Shard{0}});
    EXPECT_TRUE(to_local(tensor).equal(values({5, 2}).chunk(2)[world.rank()]));
    EXPECT_EQ(to_local(tensor).size(0), world.rank() == 0 ? 3 : 2);
  });
}

TEST(ShardTensor, SL_25_EmptyPartsWorkEverywhere) {
  run_world(3, [](World& world) {
    const ProcessMesh mesh({0, 1, 2});
    const at::Tensor plain = values({1, 4});
    const at::Tensor tensor = shard_tensor(plain, mesh, {Shard{0}});
    EXPECT_EQ(to_local(tensor).size(0), world.rank() == 0 ? 1 : 0);
    for (const Placement& to : {Placement(Replicate{}), Placement(Shard{1}), Placement(Partial{})})
      expect_values(reshard(tensor, mesh, {to}), plain);
    // Training and clipping work, too.
    auto linear = on_test_device(nn::Linear(4, 1)), expected = on_test_device(nn::Linear(4, 1));
    {
      torch::NoGradGuard no_grad;
      for (nn::Linear* layer : {&linear, &expected}) {
        (*layer)->weight.copy_(plain);
        (*layer)->bias.zero_();
      }
    }
    distribute_(linear->weight, mesh, {Shard{0}});
    distribute_(linear->bias, mesh, {Shard{0}});
    torch::optim::AdamW optimizer(linear->parameters()), other(expected->parameters());
    linear(values({3, 4}, 2)).square().sum().backward();
    expected(values({3, 4}, 2)).square().sum().backward();
    const double norm = nn::utils::clip_grad_norm_(expected->parameters(), 0.5);
    EXPECT_NEAR(nn::utils::clip_grad_norm_(linear->parameters(), 0.5), norm, 1e-5 * norm);
    optimizer.step();
    other.step();
    expect_values(linear->weight, expected->weight, 1e-5);
  });
}

TEST(ShardTensor, SL_26_DimsWrapAndAreChecked) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    EXPECT_EQ(placements_of(shard_tensor(values({4, 6}), mesh, {Shard{-1}})), Placements{Shard{1}});
    expect_error([&] { shard_tensor(values({4, 6}), mesh, {Shard{5}}); }, {"Shard(5)", "2"});
    expect_error([&] { shard_tensor(values({4, 6}), mesh, {Shard{-3}}); }, {"Shard(-3)", "2"});
    const at::Tensor tensor = shard_tensor(values({4, 6}), mesh, {Shard{0}});
    expect_error([&] { reshard(tensor, mesh, {Shard{2}}); }, {"Shard(2)"});
  });
}

TEST(ShardTensor, SL_27_OfNumbersListsAndTensors) {
  run_world(2, [](World& world) {
    const ProcessMesh mesh({0, 1});
    EXPECT_EQ(unshard_dtensor(shard_tensor(c10::Scalar(3), mesh, {})).item<int64_t>(), 3);
    EXPECT_EQ(shard_tensor(c10::Scalar(3.5), mesh, {}).scalar_type(), torch::kFloat);
    const at::Tensor list = shard_tensor(std::vector<double>{1, 2, 3}, mesh, {Shard{0}});
    EXPECT_EQ(to_local(list).numel(), world.rank() == 0 ? 2 : 1);
    const at::Tensor typed = shard_tensor(values({4}), mesh, {}, {.dtype = torch::kDouble});
    EXPECT_EQ(typed.scalar_type(), torch::kDouble);
    const at::Tensor placed = shard_tensor(values({4}), mesh, {Shard{0}}, {.place = torch::kMeta});
    EXPECT_TRUE(placed.is_meta() && to_local(placed).is_meta());
    // A partial tensor has the value on the first rank, zeros on the others.
    const at::Tensor partial =
        shard_tensor(on_test_device(torch::full({2}, 66.0)), mesh, {Partial{}});
    EXPECT_TRUE(same_values(to_local(partial), torch::full({2}, world.rank() == 0 ? 66.0 : 0.0)));
  });
}

TEST(ShardTensor, SL_28_TheFlagIsThatOfTheData) {
  run_world(2, [](World& world) {
    const ProcessMesh mesh({0, 1});
    EXPECT_FALSE(shard_tensor(values({4}), mesh, {Shard{0}}).requires_grad());
    const at::Tensor leaf = values({4}).requires_grad_(true);
    EXPECT_TRUE(shard_tensor(leaf, mesh, {Shard{0}}).requires_grad());
    EXPECT_FALSE(shard_tensor(leaf, mesh, {Shard{0}}, {.stop_gradient = true}).requires_grad());
    EXPECT_TRUE(shard_tensor(values({4}), mesh, {}, {.stop_gradient = false}).requires_grad());
    const auto make = [] {
      manual_seed(9);
      return torch::randn({64, 128});
    };
    const at::Tensor deferred = [&] {  // in host memory: moving it would make its values
      const DeferredInit scope;
      return make();
    }();
    ASSERT_TRUE(is_deferred(deferred));
    expect_error([&] { shard_tensor(deferred, mesh, {Partial{}}); }, {"deferred", "Partial"});
    const at::Tensor sharded = shard_tensor(deferred, mesh, {Shard{0}});
    EXPECT_TRUE(to_local(sharded).equal(make().chunk(2)[world.rank()]));
  });
}

TEST(ShardTensor, SL_29_FromAFunctionFromPartsAndBack) {
  run_world(2, [](World& world) {
    const ProcessMesh mesh({0, 1});
    const at::Tensor ones = dtensor_from_fn(
        [](int64_t n) {
          return on_test_device(torch::ones({n, 2}));
        },
        mesh, {Shard{0}}, 4);
    EXPECT_EQ(to_local(ones).sizes(), (Sizes{2, 2}));
    const at::Tensor own = on_test_device(torch::full({2, 3}, world.rank() + 1.0));
    const at::Tensor joined = dtensor_from_local(own, mesh, {Shard{0}});
    EXPECT_EQ(joined.sizes(), (Sizes{4, 3}));
    EXPECT_TRUE(dtensor_to_local(joined).equal(own));
    EXPECT_TRUE(same_values(unshard_dtensor(joined),
                            torch::cat({torch::full({2, 3}, 1.0), torch::full({2, 3}, 2.0)})));
    EXPECT_FALSE(is_dist(unshard_dtensor(joined)));
  });
}

TEST(ShardTensor, SL_29_ListsOfSlices) {
  run_world(4, [](World& world) {
    const ProcessMesh mesh({{0, 1}, {2, 3}});
    const at::Tensor plain = values({5, 6});
    const at::Tensor whole = shard_tensor(plain, mesh, {Shard{0}, Shard{1}});
    const auto slices = paddle::local_tensor_list_from_dtensor(whole, 0);
    ASSERT_EQ(slices.size(), 2u);
    EXPECT_EQ(slices[0].sizes(), (Sizes{3, 6}));
    EXPECT_EQ(slices[1].sizes(), (Sizes{2, 6}));
    const int own = world.rank() / 2;
    EXPECT_EQ(mesh_of(slices[own]), mesh[own]);
    expect_values(slices[own], plain.chunk(2)[own]);
    const at::Tensor joined =
        paddle::dtensor_from_local_list(slices, mesh, {Shard{0}, Shard{1}}, 0);
    expect_values(joined, plain);
    expect_error(
        [&] {
          paddle::dtensor_from_local_list({slices[own]}, mesh, {Shard{0}, Shard{1}}, 0);
        },
        {"for each slice", "expected 2, got 1"});
  });
}

TEST(ShardTensor, SL_30_PartsAreDifferentiable) {
  run_world(2, [](World& world) {
    const ProcessMesh mesh({0, 1});
    const at::Tensor leaf = values({2, 3}, world.rank() + 1).requires_grad_(true);
    const at::Tensor joined = dtensor_from_local(leaf, mesh, {Shard{0}});
    const at::Tensor factors = values({4, 3}, 9);
    (joined * factors).sum().backward();
    EXPECT_TRUE(leaf.grad().equal(factors.chunk(2)[world.rank()]));
    at::Tensor tensor = shard_tensor(values({4, 3}).requires_grad_(true), mesh, {Shard{1}});
    (dtensor_to_local(tensor) * (world.rank() + 1)).sum().backward();
    ASSERT_TRUE(is_dist(tensor.grad()));
    EXPECT_EQ(mesh_of(tensor.grad()), mesh);
    EXPECT_EQ(placements_of(tensor.grad()), Placements{Shard{1}});
    EXPECT_TRUE(
        to_local(tensor.grad()).equal(torch::full_like(to_local(tensor), world.rank() + 1)));
  });
}

TEST(ShardTensor, SL_40_ReshardMakesANewTensorAndIsDifferentiable) {
  for (const Sizes& sizes : {Sizes{10, 20}, Sizes{6, 20}, Sizes{5, 3}, Sizes{6, 20, 10}}) {
    run_world(2, [&](World&) {
      const ProcessMesh mesh({0, 1}), turned({1, 0});
      const std::vector<Placement> all = {Replicate{}, Partial{}, Shard{0}, Shard{1}};
      for (const Placement& from : all) {
        for (const Placement& to : all) {
          for (const ProcessMesh& target : {mesh, turned}) {
            const at::Tensor plain = values(sizes);
            at::Tensor tensor = shard_tensor(values(sizes).requires_grad_(true), mesh, {from});
            const at::Tensor before = to_local(tensor).detach().clone();
            const at::Tensor moved = reshard(tensor, target, {to});
            EXPECT_EQ(placements_of(moved), Placements{to});
            EXPECT_EQ(mesh_of(moved), target);
            EXPECT_TRUE(to_local(tensor).detach().equal(before));
            EXPECT_EQ(placements_of(tensor), Placements{from});
            expect_values(moved, plain);
            (moved * values(sizes, 5)).sum().backward();
            ASSERT_TRUE(tensor.grad().defined());
            EXPECT_EQ(mesh_of(tensor.grad()), mesh);
            expect_values(tensor.grad(), values(sizes, 5), 1e-6);
          }
        }
      }
    });
  }
}

TEST(ShardTensor, SL_40_OnMeshesOfTwoDimsAndBetweenMeshes) {
  run_world(4, [](World&) {
    const ProcessMesh mesh({{0, 1}, {2, 3}});
    const at::Tensor plain = values({10, 20});
    const Placement p = Partial{}, r = Replicate{}, s0 = Shard{0}, s1 = Shard{1};
    const std::vector<std::pair<Placements, Placements>> cases = {
        {{p, s0}, {r, s0}}, {{p, s0}, {r, r}},   {{p, r}, {r, p}},    {{r, s1}, {s0, r}},
        {{p, r}, {s0, r}},  {{s0, s0}, {s1, r}}, {{s0, s1}, {s1, s0}}};
    for (const auto& [from, to] : cases) {
      const at::Tensor tensor = shard_tensor(plain, mesh, from);
      expect_values(reshard(tensor, mesh, to), plain, 1e-6);
      // To a slice of the mesh, and back to all of it.
      const at::Tensor part = reshard(tensor, mesh[1], {s0});
      EXPECT_EQ(part.sizes(), plain.sizes());
      expect_values(reshard(part, mesh, to), plain, 1e-6);
    }
  });
}

}  // namespace tessera::testing::shard_tensor_test
