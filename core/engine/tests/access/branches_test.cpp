// Ranks that take different branches through layers that are not ordinary ones: functions with a
// backward of their own, whose forward runs without gradients, parameters without elements, and
// parameters that an operator has written to. Numbers are those of one process.
#include <gtest/gtest.h>

#include "support/models.h"

namespace tessera::testing::branches_test {

using torch::Tensor;

constexpr int64_t kWidth = 6;
constexpr int kRanks = 2, kSteps = 3;

struct Scale : torch::autograd::Function<Scale> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& factor) {
    context->save_for_backward({x, factor});
    return x * factor;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], (grads[0] * saved[0]).sum(0)};
  }
};

// A module of one parameter, so that it is registered where the module is.
struct OneParameter : torch::nn::Module {
  explicit OneParameter(at::IntArrayRef sizes) { p = register_parameter("p", torch::rand(sizes)); }
  Tensor p;
};

struct Layers : torch::nn::Module {
  // Registered in another order than they are used in.
  OneParameter& factor = add("factor", {kWidth});
  torch::nn::Linear last = register_module("last", torch::nn::Linear(kWidth, kWidth));
  OneParameter& none = add("none", {0, 3});
  torch::nn::Linear first = register_module("first", torch::nn::Linear(kWidth, kWidth));
  OneParameter& late = add("late", {kWidth});
  bool is_new = true;

 private:
  OneParameter& add(const char* name, at::IntArrayRef sizes) {
    return *register_module(name, std::make_shared<OneParameter>(sizes));
  }
};

// One step's forward on a rank; evaluations and writes of its own may come first.
using Forward = std::function<Tensor(Layers&, const Tensor& x, int rank)>;

std::vector<Tensor> train_alone(const Forward& forward) {
  const auto net = seeded(7, [] { return on_test_device(std::make_shared<Layers>()); });
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<Tensor> sums(net->parameters().size());
    for (int rank = 0; rank < kRanks; ++rank) {
      const Tensor x = on_test_device(torch::full({2, kWidth}, 0.5 + step + rank));
      forward(*net, x, rank).square().mean().backward();
      for (size_t i = 0; i < sums.size(); ++i) {
        Tensor& grad = net->parameters()[i].mutable_grad();
        if (grad.defined()) sums[i] = sums[i].defined() ? sums[i] + grad : grad.clone();
        grad.reset();
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) net->parameters()[i].mutable_grad() = sums[i];
    optimizer.step();
    optimizer.zero_grad();
  }
  return net->parameters();
}

void expect_parity(const Forward& forward, ShardLevel level = ShardLevel::kParameters,
                   bool by_handle = false) {
  const auto expected = train_alone(forward);
  run_world(kRanks, [&](World& world) {
    const auto net = seeded(7, [] { return on_test_device(std::make_shared<Layers>()); });
    torch::optim::SGD inner(net->parameters(), 0.1);
    auto sharded = fully_shard(net, {.level = level, .unit_bytes = 0, .average = false});
    ShardedOptimizer optimizer(sharded, inner, {.fused = false});
    for (int step = 0; step < kSteps; ++step) {
      const Tensor x = on_test_device(torch::full({2, kWidth}, 0.5 + step + world.rank()));
      if (by_handle) sharded.begin_forward();
      forward(*net, x, world.rank()).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto state = sharded.full_state();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::equal(state[i].tensor.cpu(), expected[i].cpu())) << state[i].name;
  });
}

TEST(Branches, MayHaveAFunctionWithItsOwnBackward) {
  expect_parity([](Layers& net, const Tensor& x, int rank) {
    const Tensor y = net.first(x);
    return net.last(rank == 1 ? Scale::apply(y, net.factor.p) : y);
  });
}

TEST(Branches, MayBeginWithAFunctionWithItsOwnBackwardByTheHandle) {
  expect_parity(
      [](Layers& net, const Tensor& x, int rank) {
        return net.last(rank == 1 ? Scale::apply(x, net.late.p) : net.first(x));
      },
      ShardLevel::kParameters, /*by_handle=*/true);
}

TEST(Branches, MayHaveAParameterWithoutElements) {
  expect_parity([](Layers& net, const Tensor& x, int rank) {
    const Tensor y = net.first(rank == 0 ? x + net.none.p.sum() : x);
    return net.last(rank == 1 ? y * net.factor.p : y);
  });
}

TEST(Branches, MayUseWhatAnOperatorWrote) {
  for (const ShardLevel level : {ShardLevel::kNone, ShardLevel::kParameters}) {
    expect_parity(
        [](Layers& net, const Tensor& x, int rank) {
          if (std::exchange(net.is_new, false)) {
            const torch::NoGradGuard no_grad;
            net.factor.p.mul_(0.5);
          }
          const Tensor y = net.first(x);
          return net.last(rank == 1 ? y * net.factor.p : y);
        },
        level);
  }
}

TEST(Branches, MayEvaluateOtherLayersBetweenForwardAndBackward) {
  expect_parity([](Layers& net, const Tensor& x, int rank) {
    const Tensor y = net.last(net.first(x));
    const torch::NoGradGuard no_grad;
    if (rank == 0) net.last(x * net.factor.p);
    return y;
  });
}

}  // namespace tessera::testing::branches_test
