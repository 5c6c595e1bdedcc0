// torch::autograd::grad() on a sharded model.
#include "engine/grad/capture_watch.h"

#include <gtest/gtest.h>

#include "support/error_of.h"
#include "support/models.h"
#include "support/warnings.h"

namespace tessera::testing::capture_watch_test {

using torch::autograd::grad;

std::shared_ptr<Mlp> make_mlp() {
  return seeded(7, [] { return std::make_shared<Mlp>(37, 2, 5); });
}

torch::Tensor input(World& world) {
  return seeded(world.rank(), [] { return torch::randn({3, 37}); }).requires_grad_();
}

void on_shardings(const std::function<void(World&, Sharded<Mlp>&)>& f,
                  std::vector<int> sizes = {2, 3}) {
  on_worlds(sizes, at_each_level({.unit_bytes = 6000}), [&](World& world, const ShardPlan& plan) {
    auto sharded = fully_shard(make_mlp(), plan);
    f(world, sharded);
  });
}

TEST(CaptureWatch, GradientsOfParametersThatNobodyReducesAreToldOnceWithTheCallToUse) {
  on_shardings([](World& world, Sharded<Mlp>& sharded) {
    const auto x = input(world);
    const auto ask = [&] {
      return warnings_of([&] { grad({sharded.forward(x).sum()}, {sharded->fcs[1]->weight}); });
    };
    const auto first = ask();
    ASSERT_EQ(first.size(), 1U);
    expect_contains(first[0], {"fc1.weight"});
    expect_contains(first[0], {"full_grad"});
    EXPECT_TRUE(ask().empty());
  });
}

TEST(CaptureWatch, TheGradientsAreThisRanksOwn) {
  on_shardings([](World& world, Sharded<Mlp>& sharded) {
    const auto x = input(world);
    const auto plain = make_mlp();
    const auto expected = grad({plain->forward(x).sum()}, {plain->fcs[1]->weight})[0];
    const auto got = grad({sharded.forward(x).sum()}, {sharded->fcs[1]->weight})[0];
    EXPECT_TRUE(torch::equal(got, expected));
  });
}

TEST(CaptureWatch, ParametersThatWereFrozenAtTheWrapAreWatched) {
  run_world(2, [](World& world) {
    const auto net = make_mlp();
    net->fcs[0]->weight.requires_grad_(false);
    auto sharded = fully_shard(net);
    net->fcs[0]->weight.requires_grad_(true);
    EXPECT_EQ(warnings_of([&] {
                grad({sharded.forward(input(world)).sum()}, {net->fcs[0]->weight});
              }).size(),
              1U);
  });
}

TEST(CaptureWatch, AnUnwrappedModelIsNoReasonToWarn) {
  on_shardings([](World& world, Sharded<Mlp>& sharded) {
    const auto net = sharded.ptr();
    sharded.unwrap();
    EXPECT_TRUE(warnings_of([&] {
                  grad({net->forward(input(world)).sum()}, {net->fcs[1]->weight});
                }).empty());
  });
}

TEST(CaptureWatch, AGradientPenaltyIsNoReasonToWarn) {
  on_shardings([](World& world, Sharded<Mlp>& sharded) {
    const auto x = input(world);
    EXPECT_TRUE(warnings_of([&] {
                  const auto y = sharded.forward(x);
                  const auto slope = grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
                  (y.sum() + slope.square().sum()).backward();
                }).empty());
    EXPECT_TRUE(sharded.full_grad("fc0.weight").defined());
  });
}

TEST(CaptureWatch, GradientsOfInputsAndActivationsAreNoReasonToWarn) {
  on_shardings([](World& world, Sharded<Mlp>& sharded) {
    const auto x = input(world);
    EXPECT_TRUE(warnings_of([&] {
                  const auto hidden = torch::gelu(sharded->fcs[0]->forward(x));
                  const auto y = sharded->head->forward(hidden).sum();
                  grad({y}, {x, hidden}, {}, /*retain_graph=*/true);
                  y.backward({}, false, false, std::vector<torch::Tensor>{sharded->head->weight});
                }).empty());
    EXPECT_TRUE(sharded.full_grad("head.weight").defined());
  });
}

TEST(CaptureWatch, ARankThatIsAloneHasNothingToReduce) {
  on_shardings(
      [](World& world, Sharded<Mlp>& sharded) {
        EXPECT_TRUE(warnings_of([&] {
                      grad({sharded.forward(input(world)).sum()}, {sharded->fcs[1]->weight});
                    }).empty());
      },
      {1});
}

// A layer that recomputes in backward, and passes on the results of autograd::grad().
struct Again : torch::autograd::Function<Again> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               torch::Tensor weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list grads) {
    at::AutoGradMode enable_grad(true);
    const auto saved = context->get_saved_variables();
    const auto x = saved[0].detach().requires_grad_();
    return grad({x.matmul(saved[1])}, {x, saved[1]}, {grads[0]});
  }
};

TEST(CaptureWatch, ABackwardThatHandsThemToTheOneAroundItIsNoReasonToWarn) {
  on_shardings([](World& world, Sharded<Mlp>& sharded) {
    const auto x = input(world);
    EXPECT_TRUE(
        warnings_of([&] { Again::apply(x, sharded->fcs[1]->weight).sum().backward(); }).empty());
    EXPECT_TRUE(sharded.full_grad("fc1.weight").defined());
  });
}

}  // namespace tessera::testing::capture_watch_test
