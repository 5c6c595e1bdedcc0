// Plans of styles for inner modules: values and traffic of a Llama.

#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/sharded_optimizer.h>
#include <tessera/init/deferred_init.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/parallel/parallelize.h>
#include <torch/torch.h>

#include <optional>
#include <vector>

#include "parallel/tests/llama.h"
#include "support/counted.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::parallelize_test {

using namespace testing::llama;
using testing::on_test_device;

at::Tensor loss_of(const at::Tensor& logits) { return logits.square().sum(); }

void expect_gradients(Llama& dist, Llama& plain) {
  const auto expected = plain->named_parameters();
  for (const auto& item : dist->named_parameters()) {
    EXPECT_EQ(placements_of(item.value().grad()), placements_of(item.value())) << item.key();
    EXPECT_TRUE(
        torch::allclose(full_tensor(item.value().grad()), expected[item.key()].grad(), 1e-3, 1e-3))
        << item.key();
  }
}

// One pass, whose values and gradients must be those of one process; returns its traffic.
struct Traffic {
  CollectiveCounts forward, backward;
};
Traffic pass(World& world, Llama& dist, const at::Tensor& tokens) {
  Llama plain;
  const at::Tensor expected = plain(some_tokens());
  loss_of(expected).backward();
  Traffic sent;
  at::Tensor logits;
  sent.forward = count(world, [&] { logits = dist(tokens); });
  const at::Tensor loss = loss_of(logits);
  sent.backward = count(world, [&] { loss.backward(); });
  EXPECT_TRUE(torch::allclose(full_tensor(logits), expected, 1e-4, 1e-4));
  expect_gradients(dist, plain);
  return sent;
}

Placements own(const at::Tensor& parameter) { return placements_of(parameter); }

TEST(ParallelizeModule, APlanPlacesParameters) {
  run_world(2, [](World&) {
    Llama llama;
    parallelize_module(*llama, DeviceMesh::over_world(), tensor_plan());
    const auto& layer = *llama->layers[1]->as<LayerImpl>();
    const auto& [attention, feed_forward] = std::tie(layer.attention, layer.feed_forward);
    EXPECT_EQ(own(llama->tok_embeddings->weight), Placements{Shard{0}});
    EXPECT_EQ(own(attention->wq->weight), Placements{Shard{0}});
    EXPECT_EQ(own(attention->wv->bias), Placements{Shard{0}});
    EXPECT_EQ(own(attention->wo->weight), Placements{Shard{1}});
    EXPECT_EQ(own(feed_forward->w3->weight), Placements{Shard{0}});
    EXPECT_EQ(own(feed_forward->w2->weight), Placements{Shard{1}});
    EXPECT_EQ(own(feed_forward->w2->bias), Placements{Replicate{}});
    EXPECT_EQ(own(layer.ffn_norm->weight), Placements{Replicate{}});
    EXPECT_EQ(own(llama->output->weight), Placements{Shard{0}});
    nn::Embedding embedding = on_test_device(nn::Embedding(8, 6));
    parallelize_module(*embedding, DeviceMesh::over_world(), {{"", ColwiseParallel{}}});
    EXPECT_EQ(own(embedding->weight), Placements{Shard{1}});
    EXPECT_EQ(own(embedding(on_test_device(torch::arange(4)))), Placements{Shard{1}});
  });
}

TEST(ParallelizeModule, TensorParallelismSendsTwoAllReducesPerLayerAndDirection) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    Llama llama;
    parallelize_module(*llama, DeviceMesh::over_world(), tensor_plan());
    const Traffic sent = pass(world, llama, some_tokens());
    // The embedding's, and in the backward that of the last norm's output.
    EXPECT_EQ(sent.forward.all_reduce.calls, 2 * kLayers + 1);
    EXPECT_EQ(sent.forward.all_reduce.bytes_sent, (2 * kLayers + 1) * kActivationBytes);
    EXPECT_EQ(sent.forward.all_gather.calls, 1);  // the logits
    EXPECT_EQ(sent.forward.calls(), 2 * kLayers + 2);
    EXPECT_EQ(sent.backward.all_reduce.calls, 2 * kLayers + 1);
    EXPECT_EQ(sent.backward.calls(), 2 * kLayers + 1);
  });
}

TEST(ParallelizeModule, SequenceParallelismGathersAndScattersOncePerBlock) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    Llama llama;
    parallelize_module(*llama, DeviceMesh::over_world(), sequence_plan());
    CommDebug debug;
    const Traffic sent = pass(world, llama, some_tokens());
    const int64_t blocks = 2 * kLayers + 1;
    EXPECT_EQ(sent.forward.all_gather.calls, blocks) << debug.describe();
    EXPECT_EQ(sent.forward.reduce_scatter.calls, blocks);
    EXPECT_EQ(sent.forward.calls(), 2 * blocks);
    EXPECT_EQ(sent.forward.bytes_sent(), blocks * kActivationBytes);
    EXPECT_EQ(sent.backward.all_gather.calls, blocks) << debug.describe();
    EXPECT_EQ(sent.backward.reduce_scatter.calls, blocks);
    // The weights of the norms, and the biases of the layer norms, w2: terms of shards of rows.
    EXPECT_EQ(sent.backward.all_reduce.calls, blocks + 2 * kLayers) << debug.describe();
    EXPECT_EQ(sent.backward.all_to_all.calls, 0);
  });
}

TEST(ParallelizeModule, UnevenPartsGiveTheValuesOfOneProcess) {
  run_world(3, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    for (const ParallelPlan& plan : {tensor_plan(), sequence_plan()}) {
      Llama llama;
      parallelize_module(*llama, DeviceMesh::over_world(), plan);
      pass(world, llama, some_tokens());
    }
  });
}

TEST(ParallelizeModule, OneDimOfASquareIsCutAndTheOtherHasABatchEach) {
  run_world(4, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
    for (const ParallelPlan& plan : {tensor_plan(), sequence_plan()}) {
      Llama llama;
      parallelize_module(*llama, mesh, plan, mesh.dim("tp"));
      EXPECT_EQ(own(llama->output->weight), (Placements{Replicate{}, Shard{0}}));
      pass(world, llama, distribute(some_tokens(), mesh, {Shard{0}}));
    }
    Llama llama;
    parallelize_module(*llama, mesh, tensor_plan(), -2);
    EXPECT_EQ(own(llama->output->weight), (Placements{Shard{0}, Replicate{}}));
  });
}

TEST(ParallelizeModule, EvaluationSendsWhatForwardDoes) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const int64_t blocks = 2 * kLayers + 1;
    Llama llama, plain;
    parallelize_module(*llama, DeviceMesh::over_world(), sequence_plan());
    const at::Tensor tokens = some_tokens(), expected = plain(tokens);
    at::Tensor logits;
    const auto expect = [&](const CollectiveCounts& sent) {
      EXPECT_EQ(sent.all_gather.calls, blocks);
      EXPECT_EQ(sent.reduce_scatter.calls, blocks);
      EXPECT_EQ(sent.calls(), 2 * blocks);
      EXPECT_EQ(placements_of(logits), Placements{Shard{2}});
    };
    {
      torch::NoGradGuard no_grad;
      expect(count(world, [&] { logits = llama(tokens); }));
      EXPECT_TRUE(torch::allclose(full_tensor(logits), expected, 1e-4, 1e-4));
    }
    c10::InferenceMode inference;
    expect(count(world, [&] { logits = llama(tokens); }));
  });
}

// Terms that are added are reduced together.
TEST(ParallelizeModule, APartialOutputIsLeftToLaterOperators) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    nn::Sequential model(make_linear(6, 4), make_linear(6, 4), make_linear(4, 3),
                         make_linear(4, 3));
    on_test_device(model);
    parallelize_module(
        *model, DeviceMesh::over_world(),
        {{"[01]", RowwiseParallel{.output = Partial{}}}, {"[23]", ColwiseParallel{}}});
    const at::Tensor x = on_test_device(torch::ones({5, 6}));
    const auto at = [&](size_t i) { return model->at<nn::LinearImpl>(i); };
    at::Tensor a, b;
    const auto sent = count(world, [&] {
      const at::Tensor sum = at(0).forward(x) + at(1).forward(x);
      EXPECT_EQ(placements_of(sum), Placements{Partial{}});
      a = at(2).forward(sum), b = at(3).forward(sum);
    });
    EXPECT_EQ(sent.all_reduce.calls, 1);
    EXPECT_EQ(sent.calls(), 1);
    EXPECT_EQ(placements_of(a), Placements{Shard{1}});
  });
}

TEST(ParallelizeModule, OrdinaryInputsAreWholeOrParts) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = on_test_device(torch::arange(24.0).view({2, 2, 6})),
                     part = x.chunk(2, -1)[world.rank()];
    nn::Linear plain = on_test_device(make_linear(6, 4));
    for (const bool is_part : {false, true}) {
      for (const bool requires_grad : {false, true}) {
        nn::Linear linear = make_linear(6, 4);
        {
          torch::NoGradGuard no_grad;
          linear->weight.copy_(plain->weight);
        }
        linear->to(testing::test_device());
        RowwiseParallel style;
        if (is_part) style.input = Shard{-1};
        parallelize_module(*linear, mesh, {{"", style}});
        const at::Tensor given = (is_part ? part : x).clone().requires_grad_(requires_grad);
        const at::Tensor y = linear(given);
        EXPECT_EQ(placements_of(y), Placements{Replicate{}});
        EXPECT_TRUE(torch::allclose(full_tensor(y), plain(x), 1e-5, 1e-5));
        y.sum().backward();
        if (!requires_grad) continue;
        const at::Tensor expected = plain->weight.sum(0).expand({2, 2, 6});
        EXPECT_TRUE(torch::allclose(
            given.grad(), is_part ? expected.chunk(2, -1)[world.rank()] : expected, 1e-5, 1e-5));
      }
    }
  });
}

TEST(ParallelizeModule, InputsAndOutputsOfOtherModulesArePrepared) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    nn::Sequential model(make_linear(6, 4), make_linear(4, 4));
    on_test_device(model);
    parallelize_module(*model, mesh,
                       {{"0", PrepareModuleInput{.desired_input = Shard{0}}},
                        {"1", PrepareModuleOutput{.desired_output = Replicate{}}}});
    const at::Tensor x = on_test_device(torch::ones({4, 6}));
    const at::Tensor middle = model->at<nn::LinearImpl>(0).forward(x);
    EXPECT_EQ(placements_of(middle), Placements{Shard{0}});
    EXPECT_EQ(placements_of(model->at<nn::LinearImpl>(1).forward(middle)), Placements{Replicate{}});
    EXPECT_EQ(own(model->at<nn::LinearImpl>(0).weight), Placements{Replicate{}});
  });
}

TEST(ParallelizeModule, AModelTrainsAsOneProcessDoesAlsoUnderFullyShard) {
  for (const bool shards : {false, true}) {
    run_world(4, [shards](World&) {
      const auto mesh = DeviceMesh::over_world({2, 2}, {"dp", "tp"});
      Llama dist, plain;
      parallelize_module(*dist, mesh, sequence_plan(), 1);
      torch::optim::AdamW inner(dist->parameters(), 1e-3), expected(plain->parameters(), 1e-3);
      std::optional<Sharded<LlamaImpl>> model;
      std::optional<ShardedOptimizer> optimizer;
      if (shards) {
        model.emplace(fully_shard(
            dist, {.level = ShardLevel::kParameters, .unit_bytes = 4000, .mesh_dim = 0}));
        optimizer.emplace(*model, inner);
      }
      for (int step = 0; step < 4; ++step) {
        const at::Tensor tokens = some_tokens(step);
        shards ? optimizer->zero_grad() : inner.zero_grad();
        expected.zero_grad();
        const at::Tensor given = distribute(tokens, mesh, {Shard{0}});
        const at::Tensor loss = (shards ? (*model)(given) : dist(given)).square().mean();
        const at::Tensor plain_loss = plain(tokens).square().mean();
        ASSERT_NEAR(full_tensor(loss).item<double>(), plain_loss.item<double>(), 1e-4) << step;
        loss.backward();
        plain_loss.backward();
        shards ? optimizer->step() : void(inner.step());
        expected.step();
      }
    });
  }
}

TEST(ParallelizeModule, ADeferredModelIsMadeByIt) {
  run_world(2, [](World&) {
    const auto make = [](bool defers) {
      std::optional<DeferredInit> deferred;
      if (defers) deferred.emplace();
      return nn::Sequential(make_linear(6, 8, true), make_linear(8, 6));
    };
    manual_seed(3);
    nn::Sequential plain = make(false);
    manual_seed(3);
    nn::Sequential dist = make(true);
    parallelize_module(*dist, DeviceMesh::over_world(),
                       {{"0", ColwiseParallel{}}, {"1", RowwiseParallel{}}});
    const at::Tensor x = torch::ones({3, 6});
    const at::Tensor y = dist->forward(x);
    EXPECT_EQ(placements_of(y), Placements{Replicate{}});
    EXPECT_TRUE(torch::allclose(full_tensor(y), plain->forward(x), 1e-5, 1e-6));
  });
}

TEST(ParallelizeModule, RanksOutsideTheMeshMayCallIt) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 2});
    Llama llama, plain;
    parallelize_module(*llama, mesh, sequence_plan());
    const at::Tensor logits = llama(some_tokens());
    EXPECT_EQ(logits.sizes(), (std::vector<int64_t>{kBatch, kLength, kVocabulary}));
    EXPECT_EQ(placements_of(logits), Placements{Shard{2}});
    EXPECT_TRUE(!mesh.is_member() ||
                torch::allclose(full_tensor(logits), plain(some_tokens()), 1e-4, 1e-4));
  });
}

}  // namespace tessera::parallelize_test
