// Training under `group_sharded_parallel`: param groups, accumulation, frozen parameters,
// optimizers.
#include <gtest/gtest.h>

#include "dialects/tests/training.h"

namespace tessera::testing::group_sharded_training_test {

using paddle::group_sharded_parallel;

// Weights and biases in a param group each.
std::unique_ptr<torch::optim::Optimizer> make_two_groups(Net& net, double bias_rate) {
  std::vector<torch::Tensor> weights, biases;
  for (const auto& param : net.parameters()) (param.dim() == 2 ? weights : biases).push_back(param);
  std::vector<torch::optim::OptimizerParamGroup> groups = {
      {weights, std::make_unique<torch::optim::SGDOptions>(0.1)},
      {biases, std::make_unique<torch::optim::SGDOptions>(bias_rate)}};
  return std::make_unique<torch::optim::SGD>(std::move(groups), torch::optim::SGDOptions(0.1));
}

TEST(GroupSharded, GS_14_ParamGroupsKeepTheirOptions) {
  expect_parity({.optimizer = [](Net& net) { return make_two_groups(net, 0.01); }});
}

TEST(GroupSharded, GS_14_EqualParamGroupsGiveTheBitsOfOneList) {
  Training groups;
  groups.optimizer = [](Net& net) { return make_two_groups(net, 0.1); };
  for (const std::string level : {"os_g", "p_g_os"}) {
    expect_same_state(train_sharded(2, level, groups), train_sharded(2, level, {}), 0, level);
  }
}

TEST(GroupSharded, GS_15_SeveralBackwardsAccumulateWithoutAContext) {
  expect_parity({.backwards = 2});
}

TEST(GroupSharded, GS_16_ClearGradForgetsWhatWasReduced) {
  run_world(2, [](World& world) {
    const auto net = make_mlp();
    const auto inner = make_sgd(*net);
    auto [model, optimizer, scaler] = group_sharded_parallel(net, *inner, "os_g");
    const auto forward = [&model = model](const torch::Tensor& x) { return model(x); };
    const auto norm_of_step = [&, &optimizer = optimizer](int step) {
      accumulate({}, step, world.rank(), world.size(), forward);
      return optimizer.clip_grad_norm_(1e9);
    };
    const double first = norm_of_step(0);
    EXPECT_GT(optimizer.memory().gradients, 0);
    optimizer.clear_grad();
    EXPECT_EQ(optimizer.memory().gradients, 0);
    expect_contains(message_of<c10::Error>([&optimizer = optimizer] { optimizer.step(); }),
                    {"there must be a backward since the last zero_grad()"});
    EXPECT_EQ(norm_of_step(0), first);
    EXPECT_NE(norm_of_step(0), first);  // not cleared in between, so added
  });
}

TEST(GroupSharded, GS_17_ParametersCanBeFrozenAndThawedBetweenSteps) {
  Training training{.steps = 6};
  training.before_step = [](Net& net, int step) {
    auto& mlp = dynamic_cast<PaddleMlp&>(net);
    mlp.fc2->weight.set_requires_grad(step < 2 || step >= 4);
    mlp.fc1->bias.set_requires_grad(step >= 3);
  };
  // Frozen parameters do not move, not even with momentum.
  training.optimizer = [](Net& net) {
    return std::make_unique<torch::optim::SGD>(net.parameters(),
                                               torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  expect_parity(training);
}

TEST(GroupSharded, GS_18_EvaluationBetweenStepsChangesNothing) {
  Training training;
  for (const std::string level : {"os", "os_g", "p_g_os"}) {
    training.before_step = [](Net&, int) {};
    const auto expected = train_sharded(2, level, training);
    training.before_step = [](Net& net, int step) {
      torch::NoGradGuard no_grad;
      net.eval();
      for (int i = 0; i < step; ++i) net.forward(on_test_device(torch::ones({2, kIn})));
      net.train();
    };
    expect_same_state(train_sharded(2, level, training), expected, 0, level);
  }
}

TEST(GroupSharded, GS_19_ConversionComesBeforeShardingAndIsFoundAfterIt) {
  run_world(2, [](World& world) {
    const auto net = make_mlp();
    net->to(torch::kDouble);
    const auto inner = make_sgd(*net);
    auto [model, optimizer, scaler] = group_sharded_parallel(net, *inner, "os_g");
    const auto forward = [&model = model](const torch::Tensor& x) {
      return model(x.to(torch::kDouble)).to(torch::kFloat);
    };
    net->to(test_device());  // it is there already
    accumulate({}, 0, world.rank(), world.size(), forward);
    optimizer.step();
    net->to(torch::kFloat);
    expect_contains(message_of<c10::Error>([&optimizer = optimizer] { optimizer.step(); }),
                    {"Convert the model before sharding it"});
  });
}

TEST(GroupSharded, GS_20_ASecondOptimizerTakesOtherParametersOfTheModel) {
  const auto split = [](Net& net) {
    auto& mlp = dynamic_cast<PaddleMlp&>(net);
    auto head = mlp.fc3->parameters();
    auto body = mlp.fc1->parameters();
    const auto middle = mlp.fc2->parameters();
    body.insert(body.end(), middle.begin(), middle.end());
    return std::pair(body, head);
  };
  const auto alone = make_mlp();
  const auto [body, head] = split(*alone);
  torch::optim::SGD first(body, torch::optim::SGDOptions(0.1));
  torch::optim::AdamW second(head, torch::optim::AdamWOptions(1e-3));
  for (int step = 0; step < 3; ++step) {
    alone->zero_grad();
    accumulate({}, step, 0, 1, [&](const torch::Tensor& x) { return alone->forward(x); });
    first.step();
    second.step();
  }
  const auto expected = plain_state(*alone);
  for (const std::string level : {"os_g", "p_g_os"}) {
    run_world(2, [&](World& world) {
      const auto net = make_mlp();
      const auto [body, head] = split(*net);
      torch::optim::SGD sgd(body, torch::optim::SGDOptions(0.1));
      torch::optim::AdamW adamw(head, torch::optim::AdamWOptions(1e-3));
      auto [model, optimizer, scaler] =
          group_sharded_parallel(net, sgd, level, {.segment_size = 100});
      ShardedOptimizer other(model, adamw);
      for (int step = 0; step < 3; ++step) {
        optimizer.clear_grad();
        other.zero_grad();
        accumulate({}, step, world.rank(), world.size(),
                   [&model = model](const torch::Tensor& x) { return model(x); });
        optimizer.step();
        other.step();
      }
      expect_same_state(model.full_state(), expected, 1e-5, level);
    });
  }
}

TEST(GroupSharded, UnwrapGivesTheModelAndTheOptimizerBack) {
  for (const int ranks : {1, 2, 3}) {
    for (const std::string level : {"os_g", "p_g_os"}) {
      run_world(ranks, [&](World& world) {
        const auto net = make_mlp(), plain = make_mlp();
        const auto inner = make_adamw(*net), alone = make_adamw(*plain);
        auto parts = group_sharded_parallel(net, *inner, level, {.segment_size = 0});
        const auto train_alone = [&](Net& some, torch::optim::Optimizer& optimizer, int step) {
          optimizer.zero_grad();
          for (int rank = 0; rank < ranks; ++rank)
            (rank_loss(some, global_batch(step, kRows, kIn, kOut), rank, ranks, step) / ranks)
                .backward();
          optimizer.step();
        };
        for (int step = 0; step < 3; ++step) {
          parts.optimizer.clear_grad();
          rank_loss(*net, global_batch(step, kRows, kIn, kOut), world.rank(), ranks, step)
              .backward();
          parts.optimizer.step();
          train_alone(*plain, *alone, step);
        }
        parts.unwrap();
        expect_contains(message_of<c10::Error>([&] {
                          parts.model(on_test_device(torch::ones({1, kIn})));
                        }),
                        {"was unwrapped"});
        for (int step = 3; step < 5; ++step) {
          train_alone(*net, *inner, step);
          train_alone(*plain, *alone, step);
        }
        expect_same_state(plain_state(*net), plain_state(*plain), 1e-5, level);
      });
    }
  }
}

}  // namespace tessera::testing::group_sharded_training_test
