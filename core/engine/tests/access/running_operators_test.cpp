// Several threads that use one sharded model.
#include "engine/access/running_operators.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <future>
#include <latch>
#include <thread>

#include "engine/model/sharded_state.h"
#include "support/models.h"

namespace tessera::testing::running_operators_test {

thread_local std::function<void()> while_held;

at::Tensor hold(const at::Tensor& tensor) {
  if (while_held) while_held();
  return tensor.clone();
}

at::Tensor& hold_(at::Tensor& tensor) {
  if (while_held) while_held();
  return tensor.add_(1);
}

// Operators that run until a test lets them end.
TORCH_LIBRARY_FRAGMENT(tessera_test, m) {
  constexpr auto kAnyDevice = c10::DispatchKey::CompositeExplicitAutograd;
  m.def("hold(Tensor x) -> Tensor", torch::dispatch(kAnyDevice, &hold));
  m.def("hold_(Tensor(a!) x) -> Tensor(a!)", torch::dispatch(kAnyDevice, &hold_));
}

std::shared_ptr<Mlp> make_mlp() {
  return seeded(7, [] { return std::make_shared<Mlp>(37, 3, 5); });
}

void on_shardings(const std::function<void(World&, Sharded<Mlp>&)>& f,
                  const std::vector<int>& sizes = {1, 2, 3},
                  const std::vector<ShardPlan>& plans = at_each_level({.unit_bytes = 6000})) {
  on_worlds(sizes, plans, [&](World& world, const ShardPlan& plan) {
    auto sharded = fully_shard(make_mlp(), plan);
    f(world, sharded);
  });
}

// Runs `f` while an operator of another thread uses `tensor`.
void while_in_use(const torch::Tensor& tensor, bool writes, const std::function<void()>& f) {
  std::latch begun(1), over(1);
  std::jthread other([&] {
    torch::NoGradGuard no_grad;
    while_held = [&] {
      begun.count_down();
      over.wait();
    };
    static const auto reads =
        c10::Dispatcher::singleton().findSchemaOrThrow("tessera_test::hold", "");
    static const auto changes =
        c10::Dispatcher::singleton().findSchemaOrThrow("tessera_test::hold_", "");
    torch::jit::Stack stack{tensor};
    (writes ? changes : reads).callBoxed(stack);
  });
  begun.wait();
  try {
    f();
  } catch (const std::exception& error) {
    ADD_FAILURE() << error.what();
  }
  over.count_down();
}

void expect_forward_as_ever(Sharded<Mlp>& sharded, Mlp& plain = *make_mlp()) {
  torch::NoGradGuard no_grad;
  const auto x = torch::ones({2, 37}, plain.head->weight.device());
  EXPECT_TRUE(torch::equal(sharded.forward(x), plain.forward(x)));
}

const std::vector<ShardPlan> kParametersOnly = {{.unit_bytes = 6000}};
const std::vector<ShardPlan> kBelowParameters = [] {
  auto plans = at_each_level({.unit_bytes = 6000});
  plans.pop_back();
  return plans;
}();

TEST(SeveralThreads, ThatNeedUnitsWhichAreFreedAtTheSameTimeAreToldSo) {
  on_shardings(
      [](World&, Sharded<Mlp>& sharded) {
        torch::NoGradGuard no_grad;
        while_in_use(sharded->fcs[0]->weight, /*writes=*/false, [&] {
          expect_error([&] { (void)(sharded->fcs[2]->weight + 1); },
                       {"two threads", "fc2", "fc0", "keep_unsharded"});
        });
        expect_forward_as_ever(sharded);
      },
      {2, 3}, kParametersOnly);
}

TEST(SeveralThreads, MayUseAUnitThatIsInUse) {
  on_shardings([](World&, Sharded<Mlp>& sharded) {
    torch::NoGradGuard no_grad;
    while_in_use(sharded->fcs[0]->weight, /*writes=*/false, [&] {
      EXPECT_TRUE(torch::equal(sharded->fcs[0]->weight + 1, make_mlp()->fcs[0]->weight + 1));
    });
    expect_forward_as_ever(sharded);
  });
}

TEST(SeveralThreads, MayUseUnitsThatAreNotFreed) {
  const auto use = [](World&, Sharded<Mlp>& sharded) {
    torch::NoGradGuard no_grad;
    while_in_use(sharded->fcs[0]->weight, /*writes=*/false,
                 [&] { expect_forward_as_ever(sharded); });
    expect_forward_as_ever(sharded);
  };
  on_shardings(use, {1});
  on_shardings(use, {2, 3}, kBelowParameters);
  on_shardings(
      [&](World& world, Sharded<Mlp>& sharded) {
        const auto guard = sharded.keep_unsharded();
        use(world, sharded);
      },
      {2, 3}, kParametersOnly);
}

TEST(SeveralThreads, MustNotReadWhatAnotherOneWritesWhereOtherRanksDoTheSame) {
  on_shardings(
      [](World&, Sharded<Mlp>& sharded) {
        torch::NoGradGuard no_grad;
        while_in_use(sharded->fcs[0]->weight, /*writes=*/true, [&] {
          expect_error([&] { (void)(sharded->fcs[0]->weight + 1); }, {"two threads", "writes to"});
          expect_error([&] { sharded->fcs[0]->weight.mul_(2); }, {"two threads", "writes to"});
        });
        EXPECT_TRUE(torch::equal(sharded->fcs[0]->weight * 1, make_mlp()->fcs[0]->weight + 1));
      },
      {2, 3});
}

TEST(SeveralThreads, MustNotStepWhileAnotherOneUsesTheModel) {
  on_shardings(
      [](World& world, Sharded<Mlp>& sharded) {
        torch::optim::SGD inner(sharded->parameters(), 0.1);
        ShardedOptimizer optimizer(sharded, inner);
        rank_loss(*sharded, global_batch(0, 12, 37, 5), world.rank(), world.size(), 0).backward();
        while_in_use(sharded->fcs[0]->weight, /*writes=*/false, [&] {
          expect_error([&] { optimizer.step(); }, {"[step]", "thread", "fc0"});
        });
        optimizer.step();
      },
      {2, 3});
}

TEST(SeveralThreads, MayUseTheModelInTurns) {
  on_shardings([](World& world, Sharded<Mlp>& sharded) {
    torch::Tensor loss;
    const auto batch = global_batch(0, 12, 37, 5);
    std::thread([&] { loss = rank_loss(*sharded, batch, world.rank(), world.size(), 0); }).join();
    std::thread([&] { loss.backward(); }).join();
    EXPECT_TRUE(sharded.full_grad("fc0.weight").defined());
    expect_forward_as_ever(sharded);
  });
}

TEST(SeveralThreads, EvaluateAtTheSameTimeWhereNothingIsFreed) {
  const auto evaluate = [](World&, Sharded<Mlp>& sharded) {
    const auto plain = make_mlp();
    std::vector<std::future<void>> threads;
    for (int i = 0; i < 4; ++i) {
      threads.push_back(std::async(std::launch::async, [&] {
        for (int round = 0; round < 50; ++round) expect_forward_as_ever(sharded, *plain);
      }));
    }
    for (auto& thread : threads) thread.get();
  };
  on_shardings(evaluate, {1});
  on_shardings(evaluate, {2}, kBelowParameters);
}

TEST(SeveralThreads, OfARankThatIsAloneAddTheirGradients) {
  on_shardings(
      [](World&, Sharded<Mlp>& sharded) {
        constexpr int kThreads = 4, kRounds = 25;
        const auto batch = global_batch(0, 12, 37, 5);
        std::vector<std::future<void>> threads;
        for (int i = 0; i < kThreads; ++i) {
          threads.push_back(std::async(std::launch::async, [&] {
            for (int round = 0; round < kRounds; ++round)
              rank_loss(*sharded, batch, 0, 1, 0).backward();
          }));
        }
        for (auto& thread : threads) thread.get();
        const auto plain = make_mlp();
        (kThreads * kRounds * rank_loss(*plain, batch, 0, 1, 0)).backward();
        for (const auto& item : plain->named_parameters()) {
          EXPECT_TRUE(
              torch::allclose(sharded.full_grad(item.key()), item.value().grad(), 1e-4, 1e-5))
              << item.key();
        }
      },
      {1});
}

}  // namespace tessera::testing::running_operators_test
