// `ShardedGradScaler`, by the ids of its behaviours.

#include <cmath>
#include <limits>

#include "dialects/fairscale/tests/fairscale.h"

namespace tessera::testing::sharded_grad_scaler_test {

const SGDOptions kSgd = SGDOptions(0.1).momentum(0.9);
constexpr float kInf = std::numeric_limits<float>::infinity();

// Expects a std::runtime_error, as PyTorch's scaler throws, with exactly this message.
template <class F>
void expect_misuse(F&& f, const std::string& message) {
  try {
    f();
    ADD_FAILURE() << "no error; expected: " << message;
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()), message);
  }
}

// A loss whose gradient overflows on `bad_rank` alone.
at::Tensor loss_with_inf(PlainNet& net, int step, World& world, int bad_rank) {
  const at::Tensor loss = loss_of(*net, step, world.rank(), world.size());
  return world.rank() == bad_rank ? loss + net->last->bias.sum() * kInf : loss;
}

TEST(ShardedGradScaler, FS_60_TrainsAsWithoutAScaler) {
  for (const int ranks : {2, 3, 4}) {
    PlainNet plain = make_net<PlainNet>();
    SGD alone(plain->parameters(), kSgd);
    const auto expected = train_in_one(plain, alone, ranks, 5);
    for (const bool by_itself : {false, true}) {
      run_world(ranks, [&](World& world) {
        PlainNet net = make_net<PlainNet>();
        OSS<SGD> optimizer(net->parameters(), kSgd);
        std::optional<ShardedDataParallel<PlainNet>> model;
        if (!by_itself) model.emplace(net, optimizer);
        ShardedGradScaler scaler({.growth_interval = 2});
        for (int step = 0; step < 5; ++step) {
          optimizer.zero_grad();
          scaler.scale(loss_of(*net, step, world.rank(), ranks)).backward();
          if (by_itself) average_gradients(*world.process_group(), net->parameters());
          EXPECT_TRUE(scaler.step(optimizer));
          scaler.update();
        }
        EXPECT_EQ(scaler.get_scale(), 65536.0 * 4);
        // A power of two changes no bits of the gradients.
        expect_same_state(plain_state(*net), expected, 2e-6, std::to_string(ranks));
        expect_replicas(world, *net);
      });
    }
  }
}

TEST(ShardedGradScaler, FS_61_AnInfOnOneRankSkipsOnAll) {
  for (const int ranks : {2, 3, 4}) {
    run_world(ranks, [&](World& world) {
      for (int bad_rank = 0; bad_rank < ranks; ++bad_rank) {
        PlainNet net = make_net<PlainNet>();
        OSS<SGD> optimizer(net->parameters(), kSgd);
        ShardedDataParallel<PlainNet> model(net, optimizer);
        ShardedGradScaler scaler;
        const auto before = plain_state(*net);
        scaler.scale(loss_with_inf(net, 0, world, bad_rank)).backward();
        EXPECT_FALSE(scaler.step(optimizer)) << "rank " << world.rank();
        expect_same_state(plain_state(*net), before, 0, "skipped");
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 32768.0);
        optimizer.zero_grad();
        scaler.scale(loss_with_inf(net, 1, world, -1)).backward();
        EXPECT_TRUE(scaler.step(optimizer));
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 32768.0);
        EXPECT_FALSE(same_values(net->last->bias, before.back().tensor));
        expect_replicas(world, *net);
      }
    });
  }
}

TEST(ShardedGradScaler, FS_61_TheOrderOfCallsIsChecked) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    ShardedGradScaler scaler;
    expect_misuse([&] { scaler.update(); }, "No inf checks were recorded prior to update.");
    expect_misuse([&] { scaler.unscale_(optimizer); },
                  "Attempted unscale_ but no loss was scaled since the last update.  This may "
                  "indicate your script did not use scaler.scale(loss or outputs) earlier in the "
                  "iteration.");
    at::Tensor unused = scaler.scale(torch::ones({}));
    expect_error([&] { scaler.unscale_(optimizer); }, {"there must be a backward"});
    scaler.scale(loss_of(model, 0, world.rank(), 2)).backward();
    scaler.unscale_(optimizer);
    expect_misuse([&] { scaler.unscale_(optimizer); },
                  "unscale_() has already been called on this optimizer since the last update().");
    EXPECT_TRUE(scaler.step(optimizer));
    expect_misuse([&] { scaler.unscale_(optimizer); }, "unscale_() is being called after step().");
    expect_misuse([&] { scaler.step(optimizer); },
                  "step() has already been called since the last update().");
    expect_misuse([&] { scaler.step(optimizer, [] { return at::Tensor(); }); },
                  "Closure use is not currently supported if GradScaler is enabled.");
    scaler.update();
    unused = scaler.scale(unused);
    scaler.unscale_(optimizer);  // a new round; the gradients still exist
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
  });
}

TEST(ShardedGradScaler, FS_61_UnscaledGradientsMayBeClipped) {
  PlainNet plain = make_net<PlainNet>();
  for (int rank = 0; rank < 2; ++rank) (loss_of(*plain, 0, rank, 2) / 2).backward();
  const double norm = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1);
  const auto expected = gradients_on_host(plain);
  run_world(2, [&](World& world) {
    for (const bool by_itself : {false, true}) {
      PlainNet net = make_net<PlainNet>();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      std::optional<ShardedDataParallel<PlainNet>> model;
      if (!by_itself) model.emplace(net, optimizer);
      ShardedGradScaler scaler;
      scaler.scale(loss_of(*net, 0, world.rank(), 2)).backward();
      if (by_itself) average_gradients(*world.process_group(), net->parameters());
      scaler.unscale_(optimizer);
      EXPECT_NEAR(optimizer.clip_grad_norm(0.1), norm, 1e-5 * norm);
      const auto owned = optimizer.partition_parameters()[world.rank()];
      for (const at::Tensor& own : owned) {
        for (const auto& item : net->named_parameters()) {
          if (!item.value().is_same(own)) continue;
          EXPECT_TRUE(
              torch::allclose(optimizer.gradient(own).cpu(), expected.at(item.key()), 1e-5, 1e-7));
        }
      }
    }
  });
}

TEST(ShardedGradScaler, FS_62_ScalesTensorsAndLists) {
  ShardedGradScaler scaler({.init_scale = 8});
  EXPECT_EQ(scaler.scale(torch::ones({2})).sum().item<float>(), 16);
  const auto scaled = scaler.scale(std::vector<at::Tensor>{torch::ones({1}), torch::full({1}, 2)});
  ASSERT_EQ(scaled.size(), 2u);
  EXPECT_EQ(scaled[1].item<float>(), 16);
  // A loss in half does not overflow.
  EXPECT_EQ(ShardedGradScaler().scale(torch::full({}, 2, at::kHalf)).item<float>(), 131072);
  EXPECT_THROW(scaler.scale(at::Tensor()), c10::ValueError);
  EXPECT_THROW(scaler.scale(std::vector<at::Tensor>{at::Tensor()}), c10::ValueError);
}

TEST(ShardedGradScaler, FS_62_UpdateTakesANewScale) {
  ShardedGradScaler scaler;
  scaler.update(4.0);
  EXPECT_EQ(scaler.get_scale(), 4);
  scaler.update(torch::full({1}, 16.0));
  EXPECT_EQ(scaler.get_scale(), 16);
  scaler.update(torch::full({}, 2.0));
  EXPECT_EQ(scaler.get_scale(), 2);
  EXPECT_THROW(scaler.update(0.0), c10::ValueError);
  EXPECT_THROW(scaler.update(torch::ones({2})), c10::ValueError);
  EXPECT_THROW(scaler.update(torch::ones({1}, torch::requires_grad())), c10::ValueError);
  EXPECT_EQ(scaler.get_scale(), 2);
  run_world(2, [](World& world) {
    // A new scale ends the round, even without steps.
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    ShardedGradScaler some;
    some.scale(loss_of(model, 0, world.rank(), 2)).backward();
    some.unscale_(optimizer);
    some.update(32.0);
    optimizer.zero_grad();
    some.scale(loss_of(model, 0, world.rank(), 2)).backward();
    some.unscale_(optimizer);
    EXPECT_TRUE(some.step(optimizer));
    EXPECT_EQ(some.get_scale(), 32);
  });
}

TEST(ShardedGradScaler, FS_63_WorksOnTheCpu) {
  const ShardedGradScaler scaler;
  EXPECT_TRUE(scaler.is_enabled());
  EXPECT_EQ(scaler.get_scale(), 65536);
  EXPECT_EQ(scaler.options().growth_interval, 2000);
}

TEST(ShardedGradScaler, FS_63_DisabledItDoesNothing) {
  run_world(2, [](World& world) {
    ShardedGradScaler scaler({.enabled = false});
    PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    SGD alone(plain->parameters(), kSgd);
    const auto expected = train_in_one(plain, alone, 2, 3);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    EXPECT_EQ(scaler.get_scale(), 1);
    const auto loss = [&](int step) {
      optimizer.zero_grad();
      const at::Tensor own = loss_of(model, step, world.rank(), 2);
      EXPECT_TRUE(scaler.scale(own).is_same(own));
      own.backward();
      return own;
    };
    for (int step = 0; step < 2; ++step) {
      loss(step);
      scaler.unscale_(optimizer);
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
    }
    int calls = 0;
    EXPECT_TRUE(scaler.step(optimizer, [&] {
      ++calls;
      return loss(2);
    }));
    EXPECT_EQ(calls, 1);
    expect_same_state(plain_state(*net), expected, 1e-6, "disabled");
    // It steps with gradients that are not finite, as if there were no scaler.
    optimizer.zero_grad();
    loss_with_inf(net, 3, world, 0).backward();
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_FALSE(net->last->bias.isfinite().all().item<bool>());
  });
}

// Each optimizer is skipped for its own gradients, on all ranks.
TEST(ShardedGradScaler, FS_64_RanksAgreeForEachOptimizer) {
  for (const int ranks : {2, 3}) {
    run_world(ranks, [&](World& world) {
      PlainNet net = make_net<PlainNet>();
      std::vector<at::Tensor> most = net->first->parameters();
      for (const at::Tensor& param : net->second->parameters()) most.push_back(param);
      OSS<SGD> a(most, kSgd), b(net->last->parameters(), kSgd);
      ShardedDataParallel<PlainNet> model(net, {&a, &b});
      ShardedGradScaler scaler;
      const auto before = plain_state(*net);
      // All ranks overflow at once: the sum of their flags would not be 1.
      at::Tensor loss = loss_of(model, 0, world.rank(), ranks) + net->last->bias.sum() * kInf;
      scaler.scale(loss).backward();
      EXPECT_TRUE(scaler.step(a));
      EXPECT_FALSE(scaler.step(b));
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 32768);
      EXPECT_FALSE(same_values(net->first->weight, before[0].tensor));
      EXPECT_TRUE(same_values(net->last->weight, before[4].tensor));
      EXPECT_TRUE(same_values(net->last->bias, before[5].tensor));
      expect_replicas(world, *net);
      a.zero_grad();
      b.zero_grad();
      scaler.scale(loss_of(model, 1, world.rank(), ranks)).backward();
      scaler.unscale_(b);
      EXPECT_TRUE(scaler.step(b));
      EXPECT_TRUE(scaler.step(a));
      scaler.update();
      expect_replicas(world, *net);
    });
  }
}

TEST(ShardedGradScaler, FS_64_AnOssByItselfIsSkippedOnAllRanks) {
  run_world(3, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedGradScaler scaler;
    const auto before = plain_state(*net);
    // One element of one parameter is not finite; a rank's own part need not contain it.
    for (const auto& item : net->named_parameters()) {
      optimizer.zero_grad();
      for (at::Tensor& param : net->parameters()) param.mutable_grad() = torch::ones_like(param);
      item.value().mutable_grad().view(-1)[0] = NAN;
      scaler.scale(torch::ones({}));
      EXPECT_FALSE(scaler.step(optimizer)) << item.key() << ", rank " << world.rank();
      scaler.update();
      expect_same_state(plain_state(*net), before, 0, item.key());
    }
    EXPECT_EQ(scaler.get_scale(), 1024);
    for (at::Tensor& param : net->parameters())
      param.mutable_grad() = torch::full_like(param, 1024);
    scaler.scale(torch::ones({}));
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_TRUE(torch::allclose(net->last->bias.cpu(), before[5].tensor - 0.1));
    expect_replicas(world, *net);
  });
}

TEST(ShardedGradScaler, FS_64_StateIsThatOfTheOptimizerAfterSkippedSteps) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    ShardedGradScaler scaler;
    scaler.scale(loss_with_inf(net, 0, world, 1)).backward();
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_TRUE(optimizer.state_dict(true).state.empty());
    optimizer.zero_grad();
    scaler.scale(loss_of(model, 0, world.rank(), 2)).backward();
    EXPECT_TRUE(scaler.step(optimizer));
    // State that was gathered before the step is outdated.
    expect_error([&] { optimizer.state_dict(); }, {"must be gathered"});
    EXPECT_EQ(optimizer.state_dict(true).state.size(), 6u);
  });
}

}  // namespace tessera::testing::sharded_grad_scaler_test
