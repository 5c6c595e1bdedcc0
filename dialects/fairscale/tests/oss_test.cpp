// `OSS` by itself and under `ShardedDataParallel`, by the ids of its behaviours. Precision,
// clipping and state have files of their own.

#include <tessera/comm/process_group_decorators.h>

#include <numeric>
#include <set>

#include "dialects/fairscale/tests/fairscale.h"

namespace tessera::testing::oss_test {

using torch::optim::OptimizerParamGroup;

const SGDOptions kSgd = SGDOptions(0.1).momentum(0.9);

std::vector<at::Tensor> params_of(const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> params;
  for (const int64_t size : sizes) params.push_back(leaf_of_ones(size));
  return params;
}

std::vector<int64_t> sizes_of(const std::vector<at::Tensor>& params) {
  std::vector<int64_t> sizes;
  for (const at::Tensor& param : params) sizes.push_back(param.numel());
  return sizes;
}

int64_t sum_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

using Sizes = std::vector<int64_t>;

TEST(Oss, FS_40_EachParameterGoesToTheLeastLoadedRank) {
  run_world(4, [](World&) {
    Sizes sizes;
    for (int i = 0; i < 4; ++i) sizes.insert(sizes.end(), {9, 7, 5, 3});
    OSS<SGD> all(params_of(sizes), kSgd);
    const auto owned = all.partition_parameters();
    for (const auto& own : owned) EXPECT_EQ(sum_of(sizes_of(own)), 24);
    // Ties go to the lowest rank: 9 7 5 3, then 9 to the rank with 3, 7 to that with 5, ...
    EXPECT_EQ(sizes_of(owned[0]), (Sizes{9, 3, 9, 3}));
    EXPECT_EQ(sizes_of(owned[3]), (Sizes{3, 9, 3, 9}));
    // The last one is added as a group of its own: all others keep their owners.
    const Sizes most(sizes.begin(), sizes.end() - 1);
    OSS<SGD> grown(params_of(most), kSgd);
    const auto before = grown.partition_parameters();
    grown.add_param_group(OptimizerParamGroup(params_of({3})));
    const auto after = grown.partition_parameters();
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(sum_of(sizes_of(after[rank])), 24);
      for (size_t i = 0; i < before[rank].size(); ++i)
        EXPECT_TRUE(after[rank][i].is_same(before[rank][i]));
    }
  });
  run_world(2, [](World&) {
    const auto params = params_of({1000, 5, 5, 5});
    params[0].requires_grad_(false);  // counts 1
    OSS<SGD> optimizer(params, kSgd);
    EXPECT_EQ(sizes_of(optimizer.partition_parameters()[0]), (Sizes{1000, 5}));
    EXPECT_EQ(sizes_of(optimizer.partition_parameters()[1]), (Sizes{5, 5}));
    OSS<SGD> equal(params_of({4, 4, 4}), kSgd);
    EXPECT_EQ(sizes_of(equal.partition_parameters()[0]), (Sizes{4, 4}));
    expect_error([] { OSS<SGD>(std::vector<at::Tensor>(), kSgd); }, {"must have parameters"});
  });
}

TEST(Oss, FS_41_ParametersLieInOneBufferAndFrozenOnesStayOut) {
  run_world(2, [](World& world) {
    const auto params = params_of({6, 4, 3, 5});
    params[2].requires_grad_(false);
    OSS<SGD> optimizer(params, kSgd);
    for (const at::Tensor& param : params) {
      if (param.requires_grad()) param.mutable_grad() = torch::ones_like(param);
    }
    optimizer.step();
    const auto buffer = [](const at::Tensor& tensor) {
      return tensor.storage().unsafeGetStorageImpl();
    };
    EXPECT_EQ(buffer(params[0]), buffer(params[1]));
    EXPECT_EQ(buffer(params[0]), buffer(params[3]));
    EXPECT_NE(buffer(params[0]), buffer(params[2]));
    EXPECT_TRUE(same_values(params[2], torch::ones({3})));
    for (const int i : {0, 1, 3})
      EXPECT_TRUE(torch::equal(params[i], torch::full_like(params[i], 1 - 0.1f)));
    // A rank's own parameters are adjacent, so that one message sends them.
    const auto owned = optimizer.partition_parameters();
    EXPECT_EQ(sizes_of(owned[0]), (Sizes{6}));
    EXPECT_EQ(sizes_of(owned[1]), (Sizes{4, 3, 5}));  // of which 3 is frozen
    EXPECT_GT(params[3].storage_offset(), params[1].storage_offset());
    EXPECT_GT(params[1].storage_offset(), params[0].storage_offset());
    world.set_process_group(counting_process_group(world.process_group()));
    OSS<SGD> counted(params_of({6, 4, 5}), kSgd);
    for (auto& param : counted.param_groups()[0].params())
      param.mutable_grad() = torch::ones_like(param);
    counted.step();
    EXPECT_EQ(count(world, [&] { counted.step(); }).all_gather.calls, 1);
  });
}

TEST(Oss, FS_42_ExactNumbers) {
  run_world(2, [](World& world) {
    const at::Tensor x = leaf_of_ones(1);
    OSS<SGD> optimizer({x}, kSgd);
    x.backward();
    optimizer.step();
    EXPECT_FLOAT_EQ(x.item<float>(), 0.9f);
    optimizer.zero_grad();
    x.backward();
    optimizer.step();
    EXPECT_FLOAT_EQ(x.item<float>(), 0.71f);
    const auto state = optimizer.state_dict(/*all_ranks=*/true);
    EXPECT_FLOAT_EQ(state.state.at(0).at("momentum_buffer").toTensor().item<float>(), 1.9f);

    auto fc = on_test_device(torch::nn::Linear(1, 1));
    const auto reset = [&] {
      fc->weight.data().fill_(1);
      fc->bias.data().fill_(2);
      fc->zero_grad();
    };
    const at::Tensor input = on_test_device(torch::full({1}, world.rank() + 1.0));
    reset();
    OSS<SGD> mean(fc->parameters(), SGDOptions(0.1));
    fc(input).backward(input);
    average_gradients(*world.process_group(), fc->parameters());
    EXPECT_FALSE(mean.step().defined());
    EXPECT_EQ(fc->weight.item<float>(), 0.75f);
    EXPECT_EQ(fc->bias.item<float>(), 1.85f);
  });
}

TEST(Oss, FS_42_ClosuresAreEvaluatedOnce) {
  run_world(2, [](World& world) {
    auto fc = on_test_device(torch::nn::Linear(1, 1));
    fc->weight.data().fill_(1);
    fc->bias.data().fill_(2);
    OSS<SGD> optimizer(fc->parameters(), SGDOptions(0.1));
    const at::Tensor x = on_test_device(torch::full({1}, world.rank() + 1.0)), target = x + 3;
    int calls = 0;
    torch::NoGradGuard no_grad;  // the closure computes gradients all the same
    const at::Tensor loss = optimizer.step([&] {
      ++calls;
      optimizer.zero_grad();
      const at::Tensor error = torch::l1_loss(fc(x), target);
      error.backward();
      return error;
    });
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(loss.item<float>(), 1);
    // Each parameter is stepped by its owner's gradient; the weight's is -1 on rank 0.
    EXPECT_EQ(fc->weight.item<float>(), 1.1f);
    EXPECT_EQ(fc->bias.item<float>(), 2.1f);
    expect_replicas(world, *fc);
  });
}

// Steps an OSS and a plain optimizer, each with a scheduler.
template <class Schedule>
void expect_same_schedule(const Schedule& make_scheduler) {
  run_world(2, [&](World& world) {
    PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    SGD alone(plain->parameters(), kSgd);
    auto schedule = make_scheduler(optimizer);
    auto expected = make_scheduler(alone);
    std::set<double> rates;
    for (int step = 0; step < 5; ++step) {
      step_alone(*net, optimizer, *world.process_group(), step);
      alone.zero_grad();
      for (int rank = 0; rank < 2; ++rank) (loss_of(*plain, step, rank, 2) / 2).backward();
      alone.step();
      schedule(step);
      expected(step);
      rates.insert(optimizer.param_groups()[0].options().get_lr());
      EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(),
                alone.param_groups()[0].options().get_lr());
      expect_same_state(plain_state(*net), plain_state(*plain), 1e-6, std::to_string(step));
    }
    EXPECT_GT(rates.size(), 2u);
  });
}

TEST(Oss, FS_42_SchedulersActOnIt) {
  expect_same_schedule([](torch::optim::Optimizer& optimizer) {
    auto scheduler = std::make_shared<torch::optim::StepLR>(optimizer, 2, 0.5);
    return [scheduler](int) { scheduler->step(); };
  });
  expect_same_schedule([](torch::optim::Optimizer& optimizer) {
    using torch::optim::ReduceLROnPlateauScheduler;
    auto scheduler = std::make_shared<ReduceLROnPlateauScheduler>(
        optimizer, ReduceLROnPlateauScheduler::min, 0.5, /*patience=*/0);
    return [scheduler](int step) { scheduler->step(step < 1 ? 1 : 2); };
  });
}

// Halves its learning rate in each step.
struct Halving : SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::Tensor loss = SGD::step(std::move(closure));
    for (auto& group : param_groups()) group.options().set_lr(group.options().get_lr() / 2);
    return loss;
  }
};

TEST(Oss, FS_42_OptionsAreThoseOfTheUserAndOfTheOptimizer) {
  run_world(2, [](World&) {
    const at::Tensor x = leaf_of_ones(1);
    const at::Tensor y = leaf_of_ones(1);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{x});
    groups.emplace_back(std::vector<at::Tensor>{y});
    OSS<Halving> optimizer(groups, SGDOptions(0.5));
    auto& options = static_cast<SGDOptions&>(optimizer.param_groups()[1].options());
    OptimizerParamGroup& group = optimizer.param_groups()[0];
    const auto step = [&] {
      optimizer.zero_grad();
      (x + y).backward();
      optimizer.step();
    };
    step();
    EXPECT_FLOAT_EQ(x.item<float>(), 0.5);
    EXPECT_EQ(options.lr(), 0.25);
    EXPECT_EQ(group.options().get_lr(), 0.25);
    options.lr(0.125);
    step();
    EXPECT_FLOAT_EQ(x.item<float>(), 0.25);
    EXPECT_FLOAT_EQ(y.item<float>(), 0.375);
    optimizer.state_dict(true);
    EXPECT_EQ(&options, &optimizer.param_groups()[1].options());
    EXPECT_EQ(options.lr(), 0.0625);
    EXPECT_TRUE(group.params()[0].is_same(x));
    step();
    EXPECT_FLOAT_EQ(y.item<float>(), 0.3125);
  });
}

TEST(Oss, FS_43_RanksMayOwnNothing) {
  run_world(4, [](World& world) {
    for (const bool by_itself : {true, false}) {
      torch::nn::Linear net = seeded(3, [] { return torch::nn::Linear(6, 3); });
      torch::nn::Linear plain = seeded(3, [] { return torch::nn::Linear(6, 3); });
      OSS<SGD> optimizer(net->parameters(), kSgd);
      SGD alone(plain->parameters(), kSgd);
      EXPECT_TRUE(optimizer.partition_parameters()[2].empty());
      EXPECT_TRUE(optimizer.partition_parameters()[3].empty());
      const auto expected = train_in_one(plain, alone, 4);
      if (by_itself) {
        for (int step = 0; step < 4; ++step)
          step_alone(*net, optimizer, *world.process_group(), step);
      } else {
        ShardedDataParallel<torch::nn::Linear> model(net, optimizer);
        train(model, optimizer, world);
      }
      expect_same_state(plain_state(*net), expected, 1e-6, "two parameters on 4 ranks");
      expect_replicas(world, *net);
      EXPECT_EQ(optimizer.state_dict(true).state.size(), 2u);
      EXPECT_EQ(optimizer.memory().optimizer_state, world.rank() == 0   ? 18 * 4
                                                    : world.rank() == 1 ? 3 * 4
                                                                        : 0);
      EXPECT_GT(optimizer.clip_grad_norm(0.1), 0);
    }
  });
}

TEST(Oss, FS_53_ByItselfItIsOneProcessWithLessState) {
  for (const int ranks : {2, 3, 4}) {
    PlainNet plain = make_net<PlainNet>();
    AdamW alone(plain->parameters(), AdamWOptions(0.01));
    const auto expected = train_in_one(plain, alone, ranks);
    run_world(ranks, [&](World& world) {
      PlainNet net = make_net<PlainNet>();
      OSS<AdamW> optimizer(net->parameters(), AdamWOptions(0.01));
      EXPECT_EQ(optimizer.memory().optimizer_state, 0);
      for (int step = 0; step < 4; ++step) {
        step_alone(*net, optimizer, *world.process_group(), step);
        expect_replicas(world, *net);
      }
      expect_same_state(plain_state(*net), expected, 1e-5, std::to_string(ranks) + " ranks");
      int64_t own = 0;
      const auto owned = optimizer.partition_parameters()[world.rank()];
      for (const at::Tensor& param : owned) own += param.numel();
      EXPECT_EQ(optimizer.memory().optimizer_state, 2 * 4 * own);
      // Gradients stay the user's: whole, readable and writable.
      EXPECT_EQ(net->first->weight.grad().sizes(), net->first->weight.sizes());
      net->first->weight.mutable_grad().zero_();
    });
  }
}

TEST(Oss, FS_54_AGroupOfEverySecondRank) {
  TESSERA_ON_HOST_ONLY("the simulated accelerator has no 6 devices");
  PlainNet plain = make_net<PlainNet>(), odd = make_net<PlainNet>(4);
  SGD alone(plain->parameters(), kSgd), odd_alone(odd->parameters(), kSgd);
  const auto expected = train_in_one(plain, alone, 3),
             odd_expected = train_in_one(odd, odd_alone, 3);
  run_world(6, [&](World& world) {
    const auto even_group = world.new_process_group({0, 2, 4});
    const auto odd_group = world.new_process_group({1, 3, 5});
    const bool is_even = world.rank() % 2 == 0;
    const auto group = is_even ? even_group : odd_group;
    for (const bool by_itself : {true, false}) {
      // The values of rank 0 of each group count.
      PlainNet net = make_net<PlainNet>(by_itself ? 3 + world.rank() % 2 : 3 + world.rank());
      OSS<SGD> optimizer(net->parameters(), kSgd, {.group = group});
      EXPECT_EQ(optimizer.partition_parameters().size(), 3u);
      if (by_itself) {
        for (int step = 0; step < 4; ++step) step_alone(*net, optimizer, *group, step);
      } else {
        ShardedDataParallel<PlainNet> model(net, optimizer, {.process_group = group});
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          loss_of(model, step, group->rank(), 3).backward();
          optimizer.step();
        }
      }
      expect_same_state(plain_state(*net), is_even ? expected : odd_expected, 2e-6, "in a group");
      expect_replicas(*group, net->parameters());
      optimizer.consolidate_state_dict(/*recipient_rank=*/2);  // a rank of the group
      if (group->rank() == 2) {
        EXPECT_EQ(optimizer.state_dict().state.size(), 6u);
      } else {
        expect_error([&] { optimizer.state_dict(); }, {"must be gathered"});
      }
    }
  });
}

}  // namespace tessera::testing::oss_test
