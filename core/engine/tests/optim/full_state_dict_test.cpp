// The state of sharded optimizers, whole and in the layout of an optimizer that is not sharded.
#include <tessera/comm/process_group_decorators.h>

#include "engine/model/sharded_state.h"
#include "engine/tests/optim/saved_optimizers.h"
#include "support/norm_mlp.h"
#include "support/sharded_job.h"

namespace tessera::testing::full_state_dict_test {

struct Job : ShardedJob<Mlp> {
  Job(World& world, const MakeOptimizer& make, const ShardPlan& plan)
      : ShardedJob(saved_run(make), world, plan, {.fused = false, .elementwise = true}) {}
};

std::vector<ShardPlan> all_plans() { return with_each_partition({.unit_bytes = 600}); }

// All plans for the user's own optimizer and for param groups, two for the others.
std::vector<ShardPlan> plans_for(const std::string& optimizer) {
  if (optimizer == "HeavyBall" || optimizer == "AdamW with two param groups") return all_plans();
  return {
      {.partition = Partition::kFlatEven, .unit_bytes = 600},
      {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam, .unit_bytes = 600}};
}

double close_to(int ranks) { return ranks == 3 ? 1e-4 : 1e-6; }

TEST(FullOptimizerStateDict, IsThatOfAPlainOptimizerAfterTheSameTraining) {
  for (const auto& [name, make] : all_optimizers()) {
    for (const int ranks : {1, 2, 3}) {
      Plain plain(make);
      train(*plain.net, *plain.optimizer, ranks, 0, 3);
      const OptimizerStateDict expected = state_dict_of(*plain.optimizer);
      run_world(ranks, [&, name = name, make = make](World& world) {
        for (const ShardPlan& plan : plans_for(name)) {
          const std::string what = name + ", " + describe(ranks, plan);
          Job job(world, make, plan);
          job.train(0, 3);
          const OptimizerStateDict dict = full_state_dict(job.optimizer);
          if (world.rank() == 0) {
            expect_same_dict(dict, expected, close_to(ranks), what);
          } else {
            EXPECT_TRUE(dict.state.empty());
            EXPECT_EQ(dict.param_groups.size(), expected.param_groups.size());
          }
        }
      });
    }
  }
}

TEST(FullOptimizerStateDict, OfAPlainOptimizerOrAnotherWorldLetsASharedOneTrainOn) {
  for (const auto& [name, make] : all_optimizers()) {
    Plain plain(make);
    train(*plain.net, *plain.optimizer, 2, 0, 3);
    OptimizerStateDict plain_dict = state_dict_of(*plain.optimizer), sharded_dict;
    const auto start = plain_state(*plain.net);
    train(*plain.net, *plain.optimizer, 2, 3, 5);
    run_world(2, [&](World& world) {
      Job job(world, make, {.partition = Partition::kWholeParam, .unit_bytes = 600});
      job.train(0, 3);
      OptimizerStateDict dict = full_state_dict(job.optimizer, 1);
      if (world.rank() == 1) sharded_dict = std::move(dict);
    });
    for (const OptimizerStateDict* const dict : {&plain_dict, &sharded_dict}) {
      const OptimizerStateDict before = copy_of(*dict);
      for (const int ranks : {1, 2, 3}) {
        run_world(ranks, [&, name = name, make = make](World& world) {
          for (const ShardPlan& plan :
               plans_for(dict == &plain_dict && name != "HeavyBall" ? name : "")) {
            const std::string what = name + ", " + describe(ranks, plan);
            Job job(world, make, plan);
            job.train(5, 6);  // other state, which is to be replaced
            auto* const options = &job.inner->param_groups()[0].options();
            load_full_state_dict(job.optimizer, *dict);
            EXPECT_EQ(&job.inner->param_groups()[0].options(), options);
            EXPECT_EQ(job.optimizer.steps(), 1);
            expect_same_dict(full_state_dict(job.optimizer, -1), *dict, 0, what);
            job.sharded.load_full_state(start);
            job.train(3, 5);
            expect_same_state(job.state(), plain_state(*plain.net), close_to(3), what);
          }
        });
      }
      expect_same_dict(*dict, before, 0, name + ", the argument");
    }
  }
}

TEST(FullOptimizerStateDict, OfAShardedOptimizerLetsAPlainOneTrainOn) {
  for (const auto& [name, make] : all_optimizers()) {
    Plain expected(make);
    train(*expected.net, *expected.optimizer, 3, 0, 5);
    run_world(3, [&](World& world) {
      Job job(world, make, {.unit_bytes = 600});
      job.train(0, 3);
      const OptimizerStateDict dict = full_state_dict(job.optimizer, 2);
      const auto start = job.state();
      if (world.rank() != 2) return;
      Plain plain(make);
      load_state_dict(*plain.optimizer, dict);
      {
        torch::NoGradGuard no_grad;
        for (const auto& item : start) plain.net->named_parameters()[item.name].copy_(item.tensor);
      }
      train(*plain.net, *plain.optimizer, 3, 3, 5);
      expect_same_state(plain_state(*plain.net), plain_state(*expected.net), close_to(3), name);
    });
  }
}

TEST(FullOptimizerStateDict, IsOnTheRecipientAloneOrOnAll) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job job(world, make_groups, {.unit_bytes = 600});
      job.train(0, 1);
      const OptimizerStateDict all = full_state_dict(job.optimizer, -1);
      EXPECT_EQ(all.state.size(), 8u);
      for (int recipient = 0; recipient < ranks; ++recipient) {
        const OptimizerStateDict dict = full_state_dict(job.optimizer, recipient);
        if (world.rank() == recipient) {
          expect_same_dict(dict, all, 0, fmt::format("recipient {}", recipient));
        } else {
          EXPECT_TRUE(dict.state.empty());
        }
      }
    });
  }
}

TEST(FullOptimizerStateDict, IsSentOnceToTheRecipientByTheOthersOnly) {
  const auto run = [](World& world) {
    const auto counting = counting_process_group(world.process_group());
    Job job(world, make_groups, {.unit_bytes = 600, .process_group = counting});
    job.train(0, 1);
    counting->reset_counts();
    full_state_dict(job.optimizer, 1);
    const auto sent = counting->counts().all_to_all;
    EXPECT_EQ(sent.calls, 2);  // one for each rank that sends
    EXPECT_EQ(sent.bytes_sent > 0, world.rank() != 1);
    EXPECT_EQ(counting->counts().broadcast.calls, 0);
  };
  run_over(Transport::kGloo, 3, run);  // the arena sends no messages
}

TEST(FullOptimizerStateDict, LeavesParametersThatWereNeverSteppedWithoutState) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      for (const ShardPlan& plan : all_plans()) {
        Job job(world, make_groups, plan);
        EXPECT_TRUE(full_state_dict(job.optimizer, -1).state.empty());
        torch::square(job.net->fcs[0](torch::ones({2, kMlpWidth}, test_device()))).sum().backward();
        job.optimizer.step();
        const OptimizerStateDict dict = full_state_dict(job.optimizer, -1);
        ASSERT_EQ(dict.state.size(), 2u) << describe(ranks, plan);
        EXPECT_TRUE(dict.state.contains(0) && dict.state.contains(5));
        job.train(0, 1);
        load_full_state_dict(job.optimizer, dict);
        expect_same_dict(full_state_dict(job.optimizer, -1), dict, 0, describe(ranks, plan));
      }
    });
  }
}

struct Tiny : Net {
  Tiny() {
    scale = register_parameter("scale", torch::full({1}, 2.0));
    shift = register_parameter("shift", torch::full({}, 3.0));
    pair = register_parameter("pair", torch::full({1, 2}, 4.0));
  }
  torch::Tensor forward(torch::Tensor x) override { return x * scale + shift + pair.sum(); }
  torch::Tensor scale, shift, pair;
};

TEST(FullOptimizerStateDict, HandlesSingleElementsAndRanksWithoutAny) {
  const auto step = [](Tiny& net, Optimizer* plain, ShardedOptimizer* sharded) {
    torch::square(net.forward(torch::ones({2, 2}, net.scale.device()))).sum().backward();
    plain ? (void)plain->step() : sharded->step();
  };
  for (const int ranks : {1, 2, 3, 4}) {
    Tiny alone;
    HeavyBall plain(alone.parameters(), 0.1);
    step(alone, &plain, nullptr);
    const OptimizerStateDict expected = state_dict_of(plain);
    run_world(ranks, [&](World& world) {
      for (const ShardPlan& plan : all_plans()) {
        auto net = on_test_device(std::make_shared<Tiny>());
        HeavyBall inner(net->parameters(), 0.1);
        auto sharded = fully_shard(net, plan);
        ShardedOptimizer optimizer(sharded, inner, {.elementwise = true});
        step(*net, nullptr, &optimizer);
        OptimizerStateDict dict = full_state_dict(optimizer, -1);
        expect_same_dict(dict, expected, 1e-5, describe(ranks, plan));
        for (auto& [number, values] : dict.state) values["speed"] = values["speed"].toTensor() + 1;
        load_full_state_dict(optimizer, dict);
        expect_same_dict(full_state_dict(optimizer, -1), dict, 0, describe(ranks, plan));
      }
    });
  }
}

TEST(FullOptimizerStateDict, OfReplicasIsOnThatRankOfEach) {
  run_world(4, [](World& world) {
    const auto process_groups = world.hybrid_process_groups(2);
    Job job(world, make_groups,
            {.unit_bytes = 600,
             .process_group = process_groups.shard,
             .replicate_group = process_groups.replicate});
    job.optimizer.zero_grad();
    rank_loss(*job.net, global_batch(0, 12, kMlpWidth, kMlpOut), world.rank(), 4, 0).backward();
    job.optimizer.step();
    const OptimizerStateDict all = full_state_dict(job.optimizer, -1);
    const OptimizerStateDict dict = full_state_dict(job.optimizer, 1);
    EXPECT_EQ(dict.state.size(), world.rank() % 2 == 1 ? 8u : 0u);
    Plain plain(make_groups);
    train(*plain.net, *plain.optimizer, 4, 0, 1);
    expect_same_dict(all, state_dict_of(*plain.optimizer), 1e-6, "replicas");
    load_full_state_dict(job.optimizer, all);
    expect_same_dict(full_state_dict(job.optimizer, -1), all, 0, "loaded");
  });
}

TEST(FullOptimizerStateDict, GoesToWhereStateIsOffloadedTo) {
  run_world(2, [](World& world) {
    ShardPlan plan{.unit_bytes = 600};
    Job first(world, make_groups, plan);
    first.train(0, 2);
    const OptimizerStateDict dict = full_state_dict(first.optimizer, -1);
    plan.offload = Offload::kHost;
    Job second(world, make_groups, plan);
    load_full_state_dict(second.optimizer, dict);
    expect_same_dict(full_state_dict(second.optimizer, -1), dict, 0, "offloaded");
    const auto& memory = second.sharded.state()->context().offload;
    int64_t tensors = 0;
    for (const auto& item : second.inner->state()) {
      EXPECT_TRUE(memory->holds(static_cast<AdamWParamState&>(*item.second).exp_avg()));
      ++tensors;
    }
    EXPECT_GT(tensors, 0);
    second.sharded.load_full_state(first.state());
    first.train(2, 4);
    second.train(2, 4);
    expect_same_state(second.state(), first.state(), 1e-6, "offloaded");
  });
}

TEST(FullOptimizerStateDict, OfANarrowModelWidensToTheMasters) {
  const auto make = all_optimizers()[0].make;
  Plain plain(make);
  plain.net->to(torch::kBFloat16);
  for (const auto& param : plain.net->parameters()) param.mutable_grad() = param.detach().clone();
  plain.optimizer->step();
  const OptimizerStateDict dict = state_dict_of(*plain.optimizer);
  EXPECT_EQ(dict.state.at(0).at("exp_avg").toTensor().scalar_type(), torch::kBFloat16);
  run_world(2, [&](World& world) {
    Job job(world, make, {.unit_bytes = 600, .precision = {.param_dtype = torch::kBFloat16}});
    load_full_state_dict(job.optimizer, dict);
    const OptimizerStateDict loaded = full_state_dict(job.optimizer, -1);
    const auto got = loaded.state.at(0).at("exp_avg").toTensor();
    EXPECT_EQ(got.scalar_type(), torch::kFloat);
    EXPECT_TRUE(torch::equal(got, dict.state.at(0).at("exp_avg").toTensor().to(torch::kFloat)));
  });
}

// Runs `f` on all ranks of several worlds, and expects no change.
void expect_refused(const std::function<void(World&, Job&)>& f) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job job(world, make_groups, {.unit_bytes = 600});
      job.train(0, 2);
      const OptimizerStateDict before = full_state_dict(job.optimizer, -1);
      f(world, job);
      expect_same_dict(full_state_dict(job.optimizer, -1), before, 0, "after a refusal");
    });
  }
}

TEST(RefusedFullOptimizerStateDict, ARecipientMustBeARankAndTheSameOnAll) {
  expect_refused([](World& world, Job& job) {
    for (const int wrong : {-2, world.size()}) {
      EXPECT_THROW(full_state_dict(job.optimizer, wrong), c10::ValueError);
      const int on_one = world.rank() == 0 ? wrong : 0;
      expect_error([&] { full_state_dict(job.optimizer, on_one); },
                   {"[full_state_dict] `recipient`", fmt::format("got {}", wrong)});
    }
    if (world.size() > 1) {
      EXPECT_THROW(full_state_dict(job.optimizer, world.rank() == 0 ? 0 : 1), c10::ValueError);
    }
  });
}

TEST(RefusedFullOptimizerStateDict, ItMustHaveTheParametersOfTheOptimizer) {
  expect_refused([](World& world, Job& job) {
    const OptimizerStateDict dict = full_state_dict(job.optimizer, -1);
    const auto refuse = [&](const OptimizerStateDict& wrong,
                            const std::vector<std::string>& parts) {
      EXPECT_THROW(load_full_state_dict(job.optimizer, wrong), c10::ValueError);
      expect_error([&] { load_full_state_dict(job.optimizer, wrong); }, parts);
    };
    OptimizerStateDict wrong = dict;
    wrong.param_groups.pop_back();
    refuse(wrong, {"[load_full_state_dict]", "param groups; expected 2, got 1"});
    wrong = dict;
    wrong.param_groups[0].params.pop_back();
    refuse(wrong, {"expected 5 in param group 0, got 4"});
    wrong = dict;
    wrong.state[6]["exp_avg"] = torch::zeros({kMlpWidth, kMlpWidth + 1});
    refuse(wrong, {"'exp_avg' of 'fc1.weight'", "[9, 9]", "[9, 10]"});
    wrong = dict;
    wrong.state[7]["exp_avg"] = torch::zeros({kMlpWidth, kMlpOut});
    refuse(wrong, {"'exp_avg' of 'head.weight'", "[5, 9]", "[9, 5]"});
    // The state of another model altogether.
    wrong = dict;
    for (auto& [number, values] : wrong.state) values["exp_avg"] = torch::zeros({64 + number});
    refuse(wrong, {"'exp_avg' of 'fc0.bias'", "[9]", "[64]"});
    if (world.size() > 1) {
      wrong = dict;
      if (world.rank() == 1) wrong.state.clear();
      refuse(wrong, {"every rank must give the same state", "8 parameters", "0 parameters"});
      if (world.rank() == 0) wrong.state[6]["exp_avg"] = torch::zeros({3, 3});
      if (world.rank() != 0) wrong = dict;
      refuse(wrong, {"every rank must give the same state", "'exp_avg' of parameter 6"});
    }
  });
}

TEST(RefusedFullOptimizerStateDict, WhatLoadFindsUndoesItOnAll) {
  expect_refused([](World& world, Job& job) {
    OptimizerStateDict wrong = full_state_dict(job.optimizer, -1);
    wrong.param_groups[0].options["lr"] = 7.0;
    for (auto& [number, values] : wrong.state) values["step"] = 100;
    wrong.param_groups[1].options["lr"] = "fast";
    expect_error([&] { load_full_state_dict(job.optimizer, wrong); }, {"expected double"});
    EXPECT_EQ(job.inner->param_groups()[0].options().get_lr(), 3e-2);
  });
}

struct FailsToSave : SGD {
  using SGD::SGD;
  void save(torch::serialize::OutputArchive& archive) const override {
    if (fails) throw std::runtime_error("the disk of this rank is full");
    SGD::save(archive);
  }
  bool fails = false;
};

TEST(RefusedFullOptimizerStateDict, AClassWithoutSaveOrOneThatThrowsStopsAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job without(
          world, [](Net& net) { return std::make_unique<WithoutSave>(net.parameters(), 0.1); }, {});
      EXPECT_THROW(full_state_dict(without.optimizer), c10::NotImplementedError);
      OptimizerStateDict dict = state_dict_of(SGD(make_saved_mlp()->parameters(), 0.1));
      EXPECT_THROW(load_full_state_dict(without.optimizer, dict), c10::NotImplementedError);
      Job fails(world,
                [](Net& net) { return std::make_unique<FailsToSave>(net.parameters(), 0.1); }, {});
      static_cast<FailsToSave&>(*fails.inner).fails = world.rank() == 0;
      expect_error([&] { full_state_dict(fails.optimizer); }, {"the disk of this rank is full"});
    });
  }
}

TEST(RefusedFullOptimizerStateDict, DistTensorsAreLeftToDistOptimizer) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world({2, 1}, {"dp", "tp"});
    NormMlp mlp = make_norm_mlp();
    shard_columns_then_rows(mlp, mesh.sub_mesh("tp"));
    SGD inner(mlp->parameters(), 0.1);
    auto model = fully_shard(mlp, {.process_group = mesh.process_group(mesh.dim("dp"))});
    ShardedOptimizer optimizer(model, inner);
    EXPECT_THROW(full_state_dict(optimizer), c10::NotImplementedError);
    expect_error([&] { load_full_state_dict(optimizer, {}); },
                 {"[load_full_state_dict]", "DistOptimizer::state_dict()"});
  });
}

TEST(RefusedFullOptimizerStateDict, TheInnerOptimizerIsNotAPlainOne) {
  expect_refused([](World&, Job& job) {
    EXPECT_THROW(state_dict_of(*job.inner), c10::ValueError);
    expect_error([&] { load_state_dict(*job.inner, full_state_dict(job.optimizer, -1)); },
                 {"[load_state_dict]", "load_full_state_dict()"});
  });
}

TEST(RefusedFullOptimizerStateDict, ReplicasMustWantOneRecipient) {
  run_world(4, [](World& world) {
    const auto process_groups = world.hybrid_process_groups(2);
    Job job(world, make_groups,
            {.process_group = process_groups.shard, .replicate_group = process_groups.replicate});
    expect_error([&] { full_state_dict(job.optimizer, world.rank() / 2); },
                 {"`recipient` must be the same on all ranks"});
  });
}

TEST(RefusedFullOptimizerStateDict, AddedParametersMustBeTheModels) {
  expect_refused([](World&, Job& job) {
    auto& params = job.inner->param_groups()[0].params();
    params.push_back(torch::zeros({3}));
    expect_error([&] { full_state_dict(job.optimizer); },
                 {"the optimizer's parameters must be the model's", "of shape [3]"});
    params.pop_back();
  });
}

// LibTorch's own way of saving, of the optimizer inside.
TEST(RefusedFullOptimizerStateDict, TorchSaveWouldStoreAPart) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World& world) {
      Job job(world, make_groups, {.unit_bytes = 600});
      job.train(0, 2);
      const auto refuses = [&] {
        std::stringstream stream;
        expect_error([&] { torch::save(*job.inner, stream); },
                     {"[tessera] torch::save()", "save_checkpoint()", "full_state_dict()"});
      };
      refuses();
      job.train(2, 3);
      refuses();
      const OptimizerStateDict whole = full_state_dict(job.optimizer, -1);
      load_full_state_dict(job.optimizer, whole);
      refuses();
      job.optimizer.unwrap();
      job.sharded.unwrap();
      expect_same_dict(state_dict_of(*job.inner), whole, 0, "unwrapped");
      std::stringstream stream;
      torch::save(*job.inner, stream);
    });
  }
}

TEST(RefusedFullOptimizerStateDict, TorchLoadPutsWholeStateInPlaceOfAPart) {
  std::stringstream whole;
  Plain plain(named<AdamW>("", AdamWOptions(1e-2)).make);
  train(*plain.net, *plain.optimizer, 1, 0, 1);
  torch::save(*plain.optimizer, whole);
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [&](World& world) {
      Job job(world, named<AdamW>("", AdamWOptions(1e-2)).make, {});
      job.train(0, 1);
      std::stringstream stream(whole.str());
      torch::load(*job.inner, stream);
      const std::vector<std::string> message = {"[ShardedOptimizer]", "'exp_avg' of shape",
                                                "torch::load()", "load_full_state_dict()"};
      expect_error([&] { full_state_dict(job.optimizer); }, message);
      expect_error([&] { job.optimizer.step(); }, message);
    });
  }
}

}  // namespace tessera::testing::full_state_dict_test
