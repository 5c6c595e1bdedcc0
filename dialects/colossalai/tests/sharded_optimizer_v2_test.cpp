// ShardedOptimizerV2.
#include <fmt/format.h>
#include <tessera/comm/process_group_decorators.h>

#include <limits>

#include "dialects/colossalai/tests/colossalai.h"
#include "engine/model/sharded_state.h"
#include "support/error_of.h"

namespace tessera::testing::sharded_optimizer_v2_test {

// A model with its optimizer.
struct Job {
  explicit Job(const ShardedOptimizerV2Options& options = {},
               const ZeroInitOptions& zero = kFloatShards,
               const ShardedModelV2Options& model_options = {})
      : net(zero_net<Tower>(zero)),
        model(net, kTensor, model_options),
        adam(adam_of(net)),
        optimizer(model, adam, options) {}
  // A step whose gradients are not finite on `bad` ranks.
  bool step(
      World& world, const std::function<bool(int rank)>& bad = [](int) { return false; }) {
    at::Tensor loss = tower_loss(model, 0, world.rank(), world.size());
    if (bad(world.rank())) loss = loss * std::numeric_limits<float>::infinity();
    optimizer.zero_grad();
    optimizer.backward(loss);
    return optimizer.step();
  }
  Tower net;
  ShardedModelV2<Tower> model;
  torch::optim::AdamW adam;
  ShardedOptimizerV2 optimizer;
};

TEST(HybridAdam, IsAlsoKnownByItsNumberOfShards) {
  EXPECT_EQ(colossalai::HybridAdam::num_fp32_shards_per_param, 4);
}

TEST(ShardedOptimizerV2, CO_30_MastersAreFloats) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job job(kSmallScale, {.shard_param = true});
      for (int step = 0; step < 3; ++step) EXPECT_TRUE(job.step(world));
      const auto& unit = *job.model.sharded().state()->units()[0];
      EXPECT_EQ(unit.updated().scalar_type(), torch::kFloat);
      // The parameter in use is the rounded master.
      const at::Tensor full = job.net->first->weight.flatten() + 0;
      const auto [begin, end] = unit.updated_range(unit.layout().slots[0]);
      EXPECT_EQ(full.scalar_type(), torch::kHalf);
      EXPECT_TRUE(torch::equal(full.narrow(0, begin, end - begin),
                               unit.updated().narrow(0, 0, end - begin).to(torch::kHalf)));
    });
  }
}

TEST(ShardedOptimizerV2, CO_30_AnOverflowSkipsTheStepOnAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job job({.hysteresis = 1});
      EXPECT_TRUE(job.step(world));
      const auto before = job.model.state_dict();
      EXPECT_FALSE(job.step(world, [&](int rank) { return rank == ranks - 1; }));
      expect_same_state(job.model.state_dict(), before, 0, "skipped");
      EXPECT_EQ(job.optimizer.loss_scale(), 32768);
      // The gradients of the skipped step are dropped.
      expect_error([&] { job.optimizer.step(); }, {"there must be a backward"});
      EXPECT_TRUE(job.step(world));
      for (const NamedTensor& item : job.model.state_dict())
        EXPECT_TRUE(item.tensor.isfinite().all().item<bool>());
    });
  }
}

TEST(ShardedOptimizerV2, CO_30_RanksWithOtherPartsOfTheModelSkipTogether) {
  run_world(4, [](World& world) {
    // Ranks 0, 1 and ranks 2, 3 have a model each.
    const DeviceMesh mesh = DeviceMesh::over_world({2, 2}, {"mp", "dp"});
    Job job({.mp_process_group = mesh.process_group(0)}, kFloatShards,
            {.process_group = mesh.process_group(1)});
    const auto step = [&](const std::function<bool(int)>& bad) {
      at::Tensor loss = tower_loss(job.model, 0, world.rank(), 4);
      if (bad(world.rank())) loss = loss * std::numeric_limits<float>::infinity();
      job.optimizer.zero_grad();
      job.optimizer.backward(loss);
      job.optimizer.clip_grad_norm(0);  // does not clip
      return job.optimizer.step();
    };
    EXPECT_TRUE(step([](int) { return false; }));
    EXPECT_FALSE(step([](int rank) { return rank == 3; }));
    EXPECT_TRUE(step([](int) { return false; }));
    expect_error([&] { job.optimizer.clip_grad_norm(1); }, {"mp_process_group"});
  });
}

TEST(ShardedOptimizerV2, CO_31_OffloadIsTheModels) {
  run_world(2, [](World&) {
    Tower net = zero_net<Tower>();
    ShardedModelV2<Tower> model(net, kTensor);
    auto adam = adam_of(net);
    EXPECT_THROW(ShardedOptimizerV2(model, adam, {.cpu_offload = true}), std::runtime_error);
    expect_error([&] { ShardedOptimizerV2(model, adam, {.gpu_margin_mem_ratio = 1.5}); },
                 {"gpu_margin_mem_ratio must be between 0 and 1", "1.5"});
    expect_error([&] { ShardedOptimizerV2(model, adam, {.gpu_margin_mem_ratio = 0.5}); },
                 {"gpu_margin_mem_ratio needs an offloaded model"});
    expect_error([&] { ShardedOptimizerV2(model, adam, {.keep_unsharded = true}); },
                 {"keep_unsharded must be false"});
    expect_error(
        [&] { ShardedOptimizerV2(model, adam, {.dp_process_group = single_process_group()}); },
        {"dp_process_group"});
  });
}

TEST(ShardedOptimizerV2, CO_31_AShareOfTheMarginIsFilledOnce) {
  run_world(2, [](World& world) {
    const auto offloaded_after = [&](double ratio, int64_t budget, int steps) {
      ShardedModelV2Options model{.tensor_placement_policy = "cpu", .use_memory_tracer = true};
      model.memory_budget = budget;
      Job job({.cpu_offload = true, .gpu_margin_mem_ratio = ratio}, {.shard_param = true}, model);
      for (int i = 0; i < steps; ++i) job.step(world);
      for (int i = 0; i < 2; ++i) EXPECT_TRUE(job.step(world));
      const ShardMemory memory = job.optimizer.sharded().memory();
      const auto [on_device, on_host] = job.optimizer.get_memory_usage();
      const int64_t kept = memory.master_weights + memory.optimizer_state;
      EXPECT_EQ(on_device, tests_on_host() ? 0 : kept);
      EXPECT_EQ(on_host, tests_on_host() ? memory.offloaded + kept : memory.offloaded);
      return memory.offloaded;
    };
    const int64_t all = offloaded_after(0, 1 << 20, 2);
    EXPECT_GT(all, 0);
    EXPECT_EQ(offloaded_after(1, 1 << 20, 2), 0) << "there is room for everything";
    EXPECT_EQ(offloaded_after(1, 10, 2), all) << "there is room for nothing";
    const int64_t some = offloaded_after(0.0015, 1 << 20, 2);
    EXPECT_GT(some, 0);
    EXPECT_LT(some, all);
    // Results do not depend on the ratio. It needs no cpu_offload.
    const auto train = [&](double ratio) {
      ShardedModelV2Options model{.tensor_placement_policy = "cpu", .use_memory_tracer = true};
      model.memory_budget = 1 << 20;
      Job job({.gpu_margin_mem_ratio = ratio}, kFloatShards, model);
      return train_tower(job.model, job.optimizer, world);
    };
    expect_same_state(train(0.5), train(0), 0, "margin");
    const Tower net = zero_net<Tower>();
    ShardedModelV2<Tower> model(net, kTensor, {.tensor_placement_policy = "cpu"});
    auto adam = torch::optim::AdamW(net->parameters());
    expect_error(
        [&] {
          ShardedOptimizerV2(model, adam, {.cpu_offload = true, .gpu_margin_mem_ratio = 0.5});
        },
        {"needs use_memory_tracer and memory_budget"});
  });
}

TEST(ShardedOptimizerV2, CO_32_TheScaleHasHysteresisAndBounds) {
  run_world(1, [](World& world) {
    Job job({.initial_scale = 64, .min_scale = 4, .growth_interval = 3, .max_scale = 128});
    const auto step = [&](bool bad) {
      job.step(world, [&](int) { return bad; });
      return job.optimizer.loss_scale();
    };
    EXPECT_EQ(step(true), 64);  // the first overflow is forgiven
    EXPECT_EQ(step(true), 32);  // the second and each later one are not,
    EXPECT_EQ(step(false), 32);
    EXPECT_EQ(step(true), 16);  // even with steps in between,
    for (const double expected : {16., 16., 32.}) EXPECT_EQ(step(false), expected);
    EXPECT_EQ(step(true), 32);  // until the scale has grown
    EXPECT_EQ(step(true), 16);
    for (const double expected : {8., 4., 4., 4.}) EXPECT_EQ(step(true), expected);
    for (int i = 0; i < 30; ++i) step(false);
    EXPECT_EQ(job.optimizer.loss_scale(), 128);
  });
  // An initial scale that half can use from the first step on.
  EXPECT_EQ(ShardedOptimizerV2Options().initial_scale, 65536);
  EXPECT_EQ(ShardedOptimizerV2Options().max_scale, std::pow(2., 32));
  EXPECT_EQ(ShardedOptimizerV2Options().growth_interval, 1000);
}

TEST(ShardedOptimizerV2, CO_33_ClippingSeesUnscaledGradients) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Tower plain = eager_net<Tower>();
      auto alone = adam_of(plain);
      const auto expected = train_tower_alone(*plain, alone, ranks, 4, 0.05);
      Job job;
      expect_same_state(train_tower(job.model, job.optimizer, world, 4, 0.05), expected, 1e-5,
                        "clipped");
      // The norm is that of the gradients, and a step after it does not unscale again.
      job.optimizer.zero_grad();
      job.optimizer.backward(tower_loss(job.model, 5, world.rank(), ranks));
      plain->zero_grad();
      for (int rank = 0; rank < ranks; ++rank)
        (tower_loss(*plain, 5, rank, ranks) / ranks).backward();
      const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e9);
      EXPECT_NEAR(job.optimizer.clip_grad_norm(1e9), norm, 1e-5 * norm);
      expect_error([&] { job.optimizer.backward(tower_loss(job.model, 5, world.rank(), ranks)); },
                   {"unscaled by clip_grad_norm()"});
      // After zero_grad(), a new backward is allowed.
      job.optimizer.zero_grad();
      job.optimizer.backward(tower_loss(job.model, 5, world.rank(), ranks));
      for (const double none : {0.0, 1e9})
        EXPECT_NEAR(job.optimizer.clip_grad_norm(none), norm, 1e-5 * norm) << none;
      EXPECT_TRUE(job.optimizer.step());
      Job other;
      expect_error([&] { job.optimizer.clip_grad_norm(other.model, 1); },
                   {"the one of the optimizer"});
    });
  }
}

struct PartlyUsedImpl : TowerImpl {
  PartlyUsedImpl() {
    unused = register_module("unused", torch::nn::Linear(6, 6));
    frozen = register_parameter("frozen", torch::ones({3}), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return TowerImpl::forward(x) * frozen; }
  torch::nn::Linear unused{nullptr};
  at::Tensor frozen;
};
TORCH_MODULE(PartlyUsed);

TEST(ShardedOptimizerV2, CO_34_ParametersWithoutAGradientAreLeftAlone) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      PartlyUsed net = zero_net<PartlyUsed>(kFloatShards);
      ShardedModelV2<PartlyUsed> model(net, kTensor);
      auto adam = adam_of(net);
      ShardedOptimizerV2 optimizer(model, adam);
      PartlyUsed plain = eager_net<PartlyUsed>();
      auto alone = adam_of(plain);
      const auto expected = train_tower_alone(*plain, alone, ranks);
      expect_same_state(train_tower(model, optimizer, world), expected, 1e-5, "partly used");
    });
  }
}

TEST(ShardedOptimizerV2, CO_35_MemoryIsExact) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job job(kSmallScale, {.shard_param = true});
      const auto usage = [&] {
        auto [used, unused] = job.optimizer.get_memory_usage();  // of devices, of the host
        if (tests_on_host()) std::swap(used, unused);
        EXPECT_EQ(unused, 0);
        return used;
      };
      const int64_t masters = usage();
      int64_t expected = 0, params = 0;
      for (const auto& unit : job.model.sharded().state()->units()) {
        expected += 4 * unit->layout().shard_numel(world.rank());
        for (const auto& slot : unit->layout().slots) {
          const auto [begin, end] = unit->updated_range(slot);
          params += end - begin;
        }
      }
      EXPECT_EQ(masters, expected);
      EXPECT_TRUE(job.step(world));
      EXPECT_EQ(usage(), expected + 2 * 4 * params);
      // Gradients are not counted, and zero_grad() frees them.
      EXPECT_GT(job.optimizer.sharded().memory().gradients, 0);
      job.optimizer.zero_grad();
      EXPECT_EQ(job.optimizer.sharded().memory().gradients, 0);
    });
  }
}

TEST(ShardedOptimizerV2, CO_36_StateGoesToAnyNumberOfRanks) {
  for (const int from : {1, 2, 3}) {
    ShardedOptimizerV2State state;
    std::vector<NamedTensor> values, expected;
    run_world(from, [&](World& world) {
      Job job({.initial_scale = 512});
      for (int step = 0; step < 3; ++step) EXPECT_TRUE(job.step(world));
      const auto own = job.optimizer.state_dict();
      const auto model = job.model.state_dict();
      if (world.rank() == 0) std::tie(state, values) = std::pair(own, model);
      EXPECT_TRUE(job.step(world));
      const auto after = job.model.state_dict();
      if (world.rank() == 0) expected = after;
    });
    EXPECT_EQ(state.scaler.at("scale"), 512);
    for (const int to : {1, 2, 3}) {
      run_world(to, [&](World& world) {
        Job job({.initial_scale = 2}, {.shard_param = to == 2, .param_dtype = torch::kFloat});
        job.model.load_state_dict(values);
        job.optimizer.load_state_dict(state);
        EXPECT_EQ(job.optimizer.loss_scale(), 512);
        EXPECT_TRUE(job.step(world));
        expect_same_state(job.model.state_dict(), expected, from == to ? 0 : 1e-5,
                          fmt::format("{} to {}", from, to));
        // State without a scaler, as from a plain optimizer.
        job.optimizer.load_state_dict({.optimizer = state.optimizer, .scaler = {}});
        EXPECT_EQ(job.optimizer.loss_scale(), 512);
      });
    }
  }
}

TEST(ShardedOptimizerV2, CO_36_RewoundStateRepeatsItsLosses) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      for (const bool reuse : {false, true}) {
        Job job({.initial_scale = 256}, {.shard_param = true}, {.reuse_fp16_shard = reuse});
        const auto train = [&] {
          std::vector<double> losses;
          for (int step = 0; step < 4; ++step) {
            const at::Tensor loss = tower_loss(job.model, step, world.rank(), ranks);
            job.optimizer.zero_grad();
            job.optimizer.backward(loss);
            EXPECT_TRUE(job.optimizer.step());
            losses.push_back(loss.item<double>());
          }
          return losses;
        };
        train();
        const auto state = job.optimizer.state_dict();
        const auto values = job.model.state_dict();
        const auto expected = train();
        const auto after = job.model.state_dict();
        job.model.load_state_dict(values);
        job.optimizer.load_state_dict(state);
        EXPECT_EQ(train(), expected);
        expect_same_state(job.model.state_dict(), after, 0, "model first");
        job.optimizer.load_state_dict(state);
        job.model.load_state_dict(values);
        EXPECT_EQ(train(), expected);
        expect_same_state(job.model.state_dict(), after, 0, "optimizer first");
      }
    });
  }
}

TEST(ShardedOptimizerV2, CO_36_AMissingScalerIsWarnedOf) {
  run_world(1, [](World& world) {
    Job job;
    EXPECT_TRUE(job.step(world));
    auto state = job.optimizer.state_dict();
    state.scaler.clear();
    ::testing::internal::CaptureStderr();
    job.optimizer.load_state_dict(state);
    expect_contains(::testing::internal::GetCapturedStderr(),
                    {"Missing scaler when loading optimizer state dict"});
  });
}

TEST(ShardedOptimizerV2, CO_37_OverflowsAreFoundWithOneCollective) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    Job job({}, kFloatShards, {.reduce_scatter_bucket_size_mb = 0});
    for (int step = 0; step < 2; ++step) job.step(world);
    const auto with = count(world, [&] { job.step(world); });
    Tower net = zero_net<Tower>(kFloatShards);
    ShardedModelV2<Tower> model(net, kTensor, {.reduce_scatter_bucket_size_mb = 0});
    auto adam = adam_of(net);
    ShardedOptimizer plain(model.sharded(), adam);
    const auto step = [&] {
      plain.zero_grad();
      tower_loss(model, 0, world.rank(), 2).backward();
      plain.step();
    };
    for (int i = 0; i < 2; ++i) step();
    const auto without = count(world, step);
    EXPECT_EQ(with.all_reduce.calls, without.all_reduce.calls + 1);
    EXPECT_EQ(with.calls(), without.calls() + 1);
  });
}

}  // namespace tessera::testing::sharded_optimizer_v2_test
