// Parameters that the user gives other data after they were sharded.
#include <gtest/gtest.h>

#include <sstream>

#include "support/scratch_directory.h"
#include "support/sharded_job.h"

namespace tessera::testing::replaced_data_test {

std::shared_ptr<Mlp> net_of(uint64_t seed) {
  return seeded(seed, [] { return std::make_shared<Mlp>(37, 3, 5); });
}

std::string saved(const std::shared_ptr<Mlp>& net) {
  std::ostringstream out;
  torch::save(net, out);
  return out.str();
}

void load(std::shared_ptr<Mlp> net, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::load(net, in, test_device());
}

torch::Tensor loss_of(Mlp& net, int step) {
  const Batch batch = global_batch(step, 12, 37, 5);
  return torch::mse_loss(net.forward(batch.x), batch.y);
}

void everywhere(const std::function<void(World&, const ShardPlan&)>& run) {
  for (const auto transport : kTransports)
    on_worlds({1, 2, 3}, at_each_level({.unit_bytes = 6000}), run, transport);
}

TEST(ReplacedData, FullStateHasWhatTorchLoadBrought) {
  const auto other = net_of(8);
  const std::string file = saved(other);
  const auto expected = plain_state(*other);
  everywhere([&](World&, const ShardPlan& plan) {
    const auto net = net_of(7);
    auto sharded = fully_shard(net, plan);
    load(net, file);
    expect_same_state(sharded.full_state(), expected, 0, "after torch::load()");
    // The parameters belong to their units again.
    EXPECT_EQ(sharded.full_state().size(), expected.size());
  });
}

TEST(ReplacedData, TrainingGoesOnFromWhatTorchLoadBrought) {
  const auto other = net_of(8);
  const std::string file = saved(other);
  const auto train = [](Mlp& net, auto& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      loss_of(net, step).backward();
      optimizer.step();
    }
  };
  const auto alone = net_of(7);
  torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  train(*alone, plain, 0, 2);
  load(alone, file);
  train(*alone, plain, 2, 4);
  const auto expected = plain_state(*alone);
  everywhere([&](World& world, const ShardPlan& plan) {
    ShardedJob<Mlp> job(sgd_run<Mlp>(), world, plan);
    train(*job.net, job.optimizer, 0, 2);
    load(job.net, file);
    train(*job.net, job.optimizer, 2, 4);
    expect_same_state(job.state(), expected, tolerance_of(world.size()), "trained on");
  });
}

TEST(ReplacedData, ClippingWeightsBySetDataIsSeenAtEachBackward) {
  const auto clip = [](Mlp& net) {
    torch::NoGradGuard no_grad;
    for (auto& parameter : net.parameters()) parameter.set_data(parameter.clamp(-0.05, 0.05));
  };
  const auto alone = net_of(7);
  torch::optim::SGD plain(alone->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    plain.zero_grad();
    loss_of(*alone, step).backward();
    plain.step();
    clip(*alone);
  }
  const auto expected = plain_state(*alone);
  everywhere([&](World& world, const ShardPlan& plan) {
    ShardedJob<Mlp> job(run_by<Mlp, torch::optim::SGD>(torch::optim::SGDOptions(0.1)), world, plan);
    job.sees_all_rows = true;
    for (int step = 0; step < 3; ++step) {
      job.step(step);
      clip(*job.net);
    }
    expect_same_state(job.state(), expected, tolerance_of(world.size()), "clipped");
  });
}

TEST(ReplacedData, ValuesThatStayTheSameKeepTheirMasters) {
  run_world(2, [](World&) {
    const auto net = on_test_device(std::make_shared<torch::nn::LinearImpl>(4, 1));
    torch::NoGradGuard no_grad;
    net->weight.fill_(1);
    torch::optim::SGD inner({net->weight}, 3e-4);
    auto sharded = fully_shard(net, {.precision = {.param_dtype = torch::kBFloat16}});
    ShardedOptimizer optimizer(sharded, inner);
    for (int step = 0; step < 100; ++step) {
      torch::AutoGradMode grad(true);
      optimizer.zero_grad();
      net->weight.sum().backward();
      optimizer.step();
      torch::NoGradGuard no;
      net->weight.set_data(net->weight.clamp(0, 2));
    }
    EXPECT_NEAR(sharded.full_state()[0].tensor.to(torch::kFloat).mean().item<float>(), 0.97, 0.003);
  });
}

TEST(ReplacedData, CheckpointsHaveIt) {
  const auto other = net_of(8);
  const std::string file = saved(other);
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    const auto net = net_of(7), again = net_of(9);
    auto sharded = fully_shard(net), loaded = fully_shard(again);
    load(net, file);
    save_checkpoint(scratch / "one", sharded, nullptr);
    load(again, file);  // which the checkpoint then overwrites
    load_checkpoint(scratch / "one", loaded, nullptr);
    expect_same_state(loaded.full_state(), plain_state(*other), 0, "loaded");
  });
}

TEST(ReplacedData, AnotherDtypeIsRefusedOnAllRanksWithTheWayOut) {
  run_world(2, [](World&) {
    const auto net = net_of(7);
    auto sharded = fully_shard(net);
    net->to(torch::kDouble);
    expect_error([&] { sharded.full_state(); },
                 {"fc0.weight", "Module::to()", "expected Float", "got Double", "before sharding",
                  "load_full_state()"});
    const auto x = on_test_device(torch::ones({2, 37}, torch::kDouble));
    expect_error([&] { net->forward(x).sum().backward(); }, {"Module::to()", "got Double"});
  });
}

TEST(ReplacedData, OnOneRankAloneItIsRefusedOnAll) {
  run_world(3, [](World& world) {
    const auto net = net_of(7);
    auto sharded = fully_shard(net);
    if (world.rank() == 1) net->head->weight.set_data(on_test_device(torch::ones({5, 37})));
    expect_error([&] { sharded.full_state(); }, {"all ranks", "rank 1", "head.weight"});
    expect_error([&] { loss_of(*net, 0).backward(); }, {"all ranks", "rank 1", "head.weight"});
  });
}

TEST(ReplacedData, AStepThatCouldNotSeeItSaysSo) {
  run_world(2, [](World&) {
    const auto net = net_of(7);
    torch::optim::SGD inner(net->parameters(), 0.1);
    auto sharded = fully_shard(net);
    ShardedOptimizer optimizer(sharded, inner);
    loss_of(*net, 0).backward();
    net->head->weight.set_data(on_test_device(torch::ones({5, 37})));
    expect_error([&] { optimizer.step(); }, {"head.weight", "since the last backward"});
  });
}

TEST(ReplacedData, AModuleWhoseParametersAllHaveItIsStillSharded) {
  const std::string file = saved(net_of(8));
  run_world(2, [&](World&) {
    const auto net = net_of(7);
    auto sharded = fully_shard(net);
    load(net, file);
    expect_error([&] { fully_shard(net); }, {"sharded already"});
    EXPECT_FALSE(sharded.full_grad(net->head->weight).defined());
  });
}

}  // namespace tessera::testing::replaced_data_test
