// `shard_layer`: the behaviour of Paddle's, and the one that it should have.

#include "dialects/paddle/tests/shard_layer.h"

#include <map>

namespace tessera::testing::shard_layer_test {

using paddle::shard_layer;
using paddle::shard_tensor;

TEST(ShardLayer, SL_01_AMeshMustBeGiven) {
  run_world(2, [](World&) {
    TwoLayers model;
    expect_error([&] { shard_layer(model, std::nullopt); },
                 {"The argument `process_mesh` cannot be empty."});
    static_assert(!std::is_convertible_v<int, std::optional<DeviceMesh>>);
  });
}

TEST(ShardLayer, SL_02_WithoutAFunctionAllIsReplicated) {
  run_world(3, [](World&) {
    const ProcessMesh mesh({0, 1, 2});
    TwoLayers model;
    auto layer = shard_layer(model, mesh);
    EXPECT_EQ(layer.ptr(), model.ptr());
    for (const auto& item : model->named_parameters())
      EXPECT_EQ(placements_of(item.value()), Placements{Replicate{}}) << item.key();
    EXPECT_EQ(placements_of(model->scale), Placements{Replicate{}});
    EXPECT_TRUE(model->named_buffers()["scale"].is_same(model->scale));
    EXPECT_TRUE(model->fc1->weight.requires_grad());
  });
}

TEST(ShardLayer, SL_03_TheFunctionSeesEachLayerOnceOuterFirst) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    TwoLayers model;
    nn::Linear tied = model->fc1;
    model->register_module("again", tied);
    std::vector<std::string> names;
    shard_layer(model, mesh, [&](const std::string& name, nn::Module& layer, const DeviceMesh& m) {
      EXPECT_EQ(m, mesh);
      EXPECT_EQ(&layer, name.empty() ? model.get() : model->named_modules()[name].get());
      names.push_back(name);
    });
    EXPECT_EQ(names, (std::vector<std::string>{"", "fc1", "fc2"}));
    nn::ModuleList nested(nn::ModuleList(nn::Linear(2, 2)), nn::ReLU());
    names.clear();
    shard_layer(nested, mesh, [&](const std::string& name, nn::Module&, const DeviceMesh&) {
      names.push_back(name);
    });
    EXPECT_EQ(names, (std::vector<std::string>{"", "0", "0.0", "1"}));
  });
}

TEST(ShardLayer, SL_04_WhatTheFunctionLeavesIsReplicatedAndNothingIsPlacedTwice) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    TwoLayers model;
    shard_layer(model, mesh, columns_then_rows);
    EXPECT_EQ(placements_of(model->fc1->weight), Placements{Shard{0}});
    EXPECT_EQ(placements_of(model->fc2->bias), Placements{Replicate{}});
    const at::Tensor local = to_local(model->fc1->weight).detach();
    shard_layer(model, mesh);
    EXPECT_EQ(placements_of(model->fc1->weight), Placements{Shard{0}});
    EXPECT_TRUE(to_local(model->fc1->weight).detach().is_alias_of(local));
    // A function may place a layer's tensors before it is called for that layer.
    TwoLayers early;
    shard_layer(early, mesh, [&](const std::string& name, nn::Module&, const DeviceMesh& m) {
      if (name.empty()) distribute_(early->fc1->weight, m, {Shard{1}});
    });
    EXPECT_EQ(placements_of(early->fc1->weight), Placements{Shard{1}});
  });
}

TEST(ShardLayer, SL_05_AShardedParameterKeepsNameFlagAndHandles) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    TwoLayers model, plain;
    model->fc1->bias.set_requires_grad(false);
    const at::Tensor weight = model->fc1->weight;
    shard_layer(model, mesh, columns_then_rows);
    EXPECT_TRUE(model->fc1->weight.is_same(weight));
    EXPECT_TRUE(model->named_parameters()["fc1.weight"].is_same(weight));
    EXPECT_TRUE(is_dist(weight));
    EXPECT_TRUE(weight.is_leaf() && weight.requires_grad());
    EXPECT_FALSE(model->fc1->bias.requires_grad());
    expect_values(weight, plain->fc1->weight);
  });
}

TEST(ShardLayer, SL_05_AShardedParameterKeepsDtypeAndDevice) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    const auto with = [&](const paddle::ShardTensorOptions& options) {
      TwoLayers model;
      shard_layer(model, mesh,
                  [&](const std::string& name, nn::Module& layer, const DeviceMesh& mesh) {
                    if (name == "fc1")
                      paddle::shard_tensor(layer.named_parameters()["weight"], mesh, {}, options);
                  });
      EXPECT_TRUE(is_dist(model->fc1->weight));
    };
    with({.dtype = torch::kFloat, .place = test_device()});
    expect_error([&] { with({.dtype = torch::kDouble}); }, {"[shard_tensor]", "keeps its dtype"});
    expect_error([&] { with({.place = torch::kMeta}); }, {"[shard_tensor]", "and device"});
  });
}

TEST(ShardLayer, SL_06_BuffersThatAreAddedLaterAreShardedByTheNextCall) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    TwoLayers model;
    shard_layer(model, mesh);
    at::Tensor added = model->register_buffer("added", values({4, 2}));
    EXPECT_FALSE(is_dist(added));
    shard_layer(model, mesh);
    EXPECT_TRUE(is_dist(added));
    expect_values(added, values({4, 2}));
  });
}

TEST(ShardLayer, SL_07_FunctionsBeforeAndAfterForward) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    TwoLayers model, plain;
    auto layer = shard_layer(
        model, mesh, columns_then_rows,
        [&](std::vector<at::Tensor> inputs, const DeviceMesh& m) {
          EXPECT_EQ(m, mesh);
          EXPECT_EQ(inputs.size(), 1u);
          return std::vector<at::Tensor>{distribute(inputs[0] * 2, m, {})};
        },
        [&](std::vector<at::Tensor> outputs, const DeviceMesh& m) {
          EXPECT_EQ(m, mesh);
          return redistribute(outputs[0], {Shard{0}});
        });
    const at::Tensor y = layer(values({4, 8}));
    EXPECT_EQ(placements_of(y), Placements{Shard{0}});
    expect_values(y, plain(values({4, 8}) * 2), 1e-5);
    // The layer itself has no hooks.
    EXPECT_NE(placements_of(model(values({4, 8}))), Placements{Shard{0}});
  });
}

struct ManyImpl : nn::Module {
  ManyImpl() { weight = register_parameter("weight", torch::ones({2})); }
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor a, double factor, const at::Tensor& b) {
    return {a * weight * factor, b + weight};
  }
  at::Tensor weight;
};
TORCH_MODULE(Many);

struct NumberImpl : nn::Module {
  NumberImpl() { weight = register_parameter("weight", torch::ones({2})); }
  double forward(const at::Tensor&) { return 3; }
  at::Tensor weight;
};
TORCH_MODULE(Number);

TEST(ShardLayer, SL_07_ManyInputsAndOutputs) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    const ForwardHook twice = [](std::vector<at::Tensor> tensors, const DeviceMesh&) {
      for (at::Tensor& tensor : tensors) tensor = tensor * 2;
      return tensors;
    };
    const auto ones = [] { return on_test_device(torch::ones({2})); };
    auto layer = shard_layer(on_test_device(Many()), mesh, {}, twice, twice);
    const auto [a, b] = layer(ones(), 3.0, ones());
    expect_values(a, torch::full({2}, 12.0));
    expect_values(b, torch::full({2}, 6.0));
    auto number = shard_layer(on_test_device(Number()), mesh, {}, {}, twice);
    expect_error([&] { number(ones()); }, {"output_fn needs a forward that returns"});
    auto fewer =
        shard_layer(on_test_device(Many()), mesh, {},
                    [](std::vector<at::Tensor> inputs, const DeviceMesh&) { return inputs[0]; });
    expect_error([&] { fewer(ones(), 3.0, ones()); },
                 {"input_fn must return as many tensors", "expected 2, got 1"});
  });
}

TEST(ShardLayer, SL_08_AnInputFunctionMayReturnATensorOrAList) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    TwoLayers plain;
    const at::Tensor expected = plain(values({4, 8}));
    auto one =
        shard_layer(TwoLayers(), mesh, {}, [](std::vector<at::Tensor> inputs, const DeviceMesh& m) {
          return shard_tensor(inputs[0], m, {Shard{0}});
        });
    auto list =
        shard_layer(TwoLayers(), mesh, {}, [](std::vector<at::Tensor> inputs, const DeviceMesh& m) {
          return std::vector<at::Tensor>{shard_tensor(inputs[0], m, {Shard{0}})};
        });
    expect_values(one(values({4, 8})), expected, 1e-5);
    expect_values(list(values({4, 8})), expected, 1e-5);
    EXPECT_EQ(placements_of(list(values({4, 8}))), Placements{Shard{0}});
  });
}

TEST(ShardLayer, SL_09_AStaticGraphIsRefused) {
  run_world(1, [](World&) {
    torch::jit::Module scripted("scripted");
    expect_error([&] { shard_layer(scripted, ProcessMesh({0})); }, {"scripted", "fully_shard"});
  });
}

TEST(ShardLayer, SL_10_OrdinaryInputsCountAsReplicated) {
  run_world(2, [](World&) {
    const ProcessMesh mesh({0, 1});
    auto linear = on_test_device(nn::Linear(8, 6)), plain = on_test_device(nn::Linear(8, 6));
    {
      torch::NoGradGuard no_grad;
      linear->weight.copy_(values({6, 8}, 2));
      linear->bias.zero_();
      plain->weight.copy_(values({6, 8}, 2));
      plain->bias.zero_();
    }
    auto layer = shard_layer(linear, mesh);
    const at::Tensor x = values({4, 8});
    EXPECT_EQ(placements_of(layer(x)), Placements{Replicate{}});
    expect_values(layer(x), plain(x), 1e-6);
    const at::Tensor y = layer(shard_tensor(x, mesh, {Shard{0}}));
    EXPECT_EQ(placements_of(y), Placements{Shard{0}});
    EXPECT_EQ(to_local(y).sizes(), (std::vector<int64_t>{2, 6}));
    expect_values(y, plain(x), 1e-6);
    // An input that requires a gradient gets it.
    at::Tensor leaf = values({4, 8}).requires_grad_(true),
               other = values({4, 8}).requires_grad_(true);
    layer(leaf).sum().backward();
    plain(other).sum().backward();
    EXPECT_FALSE(is_dist(leaf.grad()));
    EXPECT_TRUE(torch::allclose(leaf.grad(), other.grad()));
  });
}

TEST(ShardLayer, SL_11_APlacementForEachMeshDim) {
  run_world(4, [](World&) {
    TwoLayers model, square;
    shard_layer(model, ProcessMesh({0, 1, 2, 3}));
    EXPECT_EQ(placements_of(model->fc1->weight).size(), 1u);
    EXPECT_EQ(placements_of(model->fc1->bias).size(), 1u);
    shard_layer(square, ProcessMesh({{0, 1}, {2, 3}}));
    EXPECT_EQ(placements_of(square->fc1->weight).size(), 2u);
    EXPECT_EQ(placements_of(square->fc1->bias).size(), 2u);
  });
}

template <class Model>
void train(Model& model, torch::optim::Optimizer& optimizer, int64_t width) {
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    model(values({7, width}, step)).square().mean().backward();
    optimizer.step();
  }
}

TEST(ShardLayer, SL_12_AShardedLayerTrainsAsOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      auto linear = on_test_device(nn::Linear(10, 10)), plain = on_test_device(nn::Linear(10, 10));
      {
        torch::NoGradGuard no_grad;
        linear->weight.copy_(values({10, 10}, 2));
        linear->bias.zero_();
        plain->weight.copy_(values({10, 10}, 2));
        plain->bias.zero_();
      }
      auto layer =
          shard_layer(linear, mesh, [&](const std::string&, nn::Module&, const DeviceMesh& m) {
            linear->weight = shard_tensor(linear->weight, m, {Shard{0}});
            linear->bias = shard_tensor(linear->bias, m, {Shard{0}});
          });
      torch::optim::AdamW optimizer(linear->parameters()), expected(plain->parameters());
      train(layer, optimizer, 10);
      train(plain, expected, 10);
      expect_values(linear->weight, plain->weight, 1e-5);
      expect_values(linear->bias, plain->bias, 1e-5);
    });
  }
}

TEST(ShardLayer, AFunctionThatThrowsOnOneRankChangesNothingOnAny) {
  run_world(3, [](World& world) {
    const ProcessMesh mesh({0, 1, 2});
    TwoLayers model, plain;
    expect_error(
        [&] {
          shard_layer(model, mesh,
                      [&](const std::string& name, nn::Module& layer, const DeviceMesh& m) {
                        columns_then_rows(name, layer, m);
                        if (world.rank() == 1 && name == "fc2")
                          throw std::runtime_error("no room for fc2");
                      });
        },
        {"no room for fc2"});
    for (const auto& item : model->named_parameters()) {
      EXPECT_FALSE(is_dist(item.value())) << item.key();
      EXPECT_TRUE(item.value().equal(plain->named_parameters()[item.key()])) << item.key();
      EXPECT_TRUE(item.value().requires_grad());
    }
    EXPECT_FALSE(is_dist(model->scale));
    // The model can be sharded again, and trained.
    auto layer = shard_layer(model, mesh, columns_then_rows);
    layer(values({3, 8})).sum().backward();
    plain(values({3, 8})).sum().backward();
    expect_values(model->fc1->weight.grad(), plain->fc1->weight.grad(), 1e-5);
  });
}

TEST(ShardLayer, RanksThatPlaceOtherwiseAreToldOnAllOfThem) {
  run_world(2, [](World& world) {
    TwoLayers model;
    expect_error(
        [&] {
          shard_layer(model, ProcessMesh({0, 1}),
                      [&](const std::string& name, nn::Module&, const DeviceMesh& m) {
                        if (name == "fc1")
                          distribute_(model->fc1->weight, m, {Shard{world.rank()}});
                      });
        },
        {"must place the tensors alike", "'fc1.weight'", "Shard(0)", "Shard(1)", "rank 1"});
    EXPECT_FALSE(is_dist(model->fc1->weight));
  });
}

TEST(ShardLayer, ValuesAreComparedOnRequest) {
  run_world(2, [](World& world) {
    TwoLayers model;
    const auto mesh = DeviceMesh::over_world();
    {
      torch::NoGradGuard no_grad;
      if (world.rank() == 1) model->fc2->bias.add_(1);
    }
    expect_error([&] { distribute_module(model, mesh, {}, {}, {}, {.check_values = true}); },
                 {"same values on all ranks", "'fc2.bias'", "rank 1"});
    EXPECT_FALSE(is_dist(model->fc1->weight));
    TwoLayers same;
    EXPECT_NO_THROW(distribute_module(same, mesh, {}, {}, {}, {.check_values = true}));
  });
}

TEST(ShardLayer, RanksOutsideTheMeshMayCallIt) {
  run_world(3, [](World& world) {
    const ProcessMesh mesh({0, 2});
    TwoLayers model, plain;
    auto layer = shard_layer(model, mesh, columns_then_rows);
    const at::Tensor y = layer(values({3, 8}));
    EXPECT_EQ(y.sizes(), (std::vector<int64_t>{3, 8}));
    if (world.rank() != 1) expect_values(y, plain(values({3, 8})), 1e-5);
  });
}

TEST(ShardLayer, ADeferredModelIsMadeAsAnEagerOne) {
  run_world(2, [](World&) {
    const auto make = [] {
      manual_seed(5);
      return nn::Linear(128, 96);
    };
    const nn::Linear eager = make();
    const nn::Linear deferred = [&] {  // in host memory: moving it would make its values
      const DeferredInit scope;
      return make();
    }();
    ASSERT_TRUE(is_deferred(deferred->weight));
    shard_layer(deferred, ProcessMesh({0, 1}),
                [&](const std::string&, nn::Module&, const DeviceMesh& m) {
                  distribute_(deferred->weight, m, {Shard{0}});
                });
    EXPECT_EQ(to_local(deferred->weight).size(0), 48);
    expect_values(deferred->weight, eager->weight);
    expect_values(deferred->bias, eager->bias);
  });
}

TEST(ShardLayer, AModelThatIsFullyShardedIsRefused) {
  run_world(2, [](World&) {
    TwoLayers model;
    const auto sharded = fully_shard(model);
    expect_error(
        [&] {
          shard_layer(model, ProcessMesh({0, 1}));
        },
        {"before fully_shard", "'fc1.weight'"});
  });
}

}  // namespace tessera::testing::shard_layer_test
