// Backwards that run at the same time.
#include "engine/grad/open_backwards.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <future>
#include <latch>

#include "support/models.h"
#include "support/recomputed_layer.h"

namespace tessera::testing::open_backwards_test {

TEST(OpenBackwards, OfWhichOneRunsInsideAnotherAreOne) {
  OpenBackwards backwards(/*may_overlap=*/false);
  const auto alive = std::make_shared<int>(0);
  EXPECT_TRUE(backwards.add(4, alive));
  EXPECT_TRUE(backwards.is_latest(4));
  EXPECT_TRUE(backwards.add(5, alive));
  EXPECT_FALSE(backwards.is_latest(4));
  EXPECT_FALSE(backwards.end(5));
  EXPECT_FALSE(backwards.add(4, alive));
  EXPECT_TRUE(backwards.end(4));
  EXPECT_TRUE(backwards.empty());
}

TEST(OpenBackwards, ThatFailedAreOver) {
  OpenBackwards backwards(false);
  auto outer = std::make_shared<int>(0), inner = std::make_shared<int>(0);
  backwards.add(4, outer);
  backwards.add(5, inner);
  inner.reset();
  EXPECT_FALSE(backwards.add(4, outer));
  outer.reset();
  EXPECT_TRUE(backwards.empty());
}

TEST(OpenBackwards, ThatOverlapAllFailUntilTheyAreOver) {
  OpenBackwards backwards(false);
  auto one = std::make_shared<int>(0), other = std::make_shared<int>(0);
  backwards.add(4, one);
  backwards.add(5, other);
  expect_error([&] { backwards.add(4, one); }, {"two backwards", "thread"});
  expect_error([&] { backwards.end(4); }, {"two backwards"});
  expect_error([&] { backwards.add(5, other); }, {"two backwards"});
  EXPECT_FALSE(backwards.is_latest(5));
  one.reset();
  expect_error([&] { backwards.end(5); }, {"two backwards"});
  other.reset();
  EXPECT_TRUE(backwards.empty());
  EXPECT_TRUE(backwards.add(6, std::make_shared<int>(0)));
}

TEST(OpenBackwards, ThatMayOverlapAreOverWithTheLast) {
  OpenBackwards backwards(/*may_overlap=*/true);
  const auto alive = std::make_shared<int>(0);
  backwards.add(4, alive);
  backwards.add(5, alive);
  EXPECT_FALSE(backwards.add(4, alive));
  EXPECT_FALSE(backwards.end(4));
  EXPECT_TRUE(backwards.end(5));
}

// A backward that waits here for the other thread's.
struct Meeting : torch::autograd::Function<Meeting> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               std::function<void()>* meet) {
    context->saved_data["meet"] = reinterpret_cast<int64_t>(meet);
    return x.clone();
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list grads) {
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["meet"].toInt()))();
    return {grads[0], torch::Tensor()};
  }
};

struct Meets : Net {
  Meets() {
    first = register_module("first", torch::nn::Linear(37, 37));
    head = register_module("head", torch::nn::Linear(37, 5));
  }
  torch::Tensor forward(torch::Tensor x) override {
    return head->forward(Meeting::apply(first->forward(x), meet));
  }
  std::function<void()>* meet = nullptr;
  torch::nn::Linear first{nullptr}, head{nullptr};
};

constexpr const char* kOneThread =
    "LibTorch has one thread for all backwards on a device, and the first would wait on it forever";

// Two backwards: the second begins and ends while the first one waits, or both go on together.
struct TwoBackwards {
  explicit TwoBackwards(Meets& net, const torch::Tensor& x) {
    net.meet = &first_meets;
    first = net.forward(x).sum();
    net.meet = &second_meets;
    second = net.forward(x).sum();
  }
  std::latch first_began{1}, second_began{1};
  std::function<void()> first_meets = [this] {
    first_began.count_down();
    second_began.wait();
  };
  std::function<void()> second_meets = [this] { second_began.count_down(); };
  torch::Tensor first, second;
};

std::shared_ptr<Meets> make_meets() {
  return seeded(7, [] { return std::make_shared<Meets>(); });
}

TEST(TwoThreadsInBackward, AreToldSoOnAllRanksAndCanGoOnOneAfterAnother) {
  TESSERA_ON_HOST_ONLY(kOneThread);
  on_worlds({2, 3}, at_each_level(), [](World&, const ShardPlan& plan) {
    auto sharded = fully_shard(make_meets(), plan);
    const auto x = torch::ones({2, 37}, test_device());
    std::latch failed(1);
    {
      TwoBackwards backwards(*sharded, x);
      // The second waits until the first one has gone on, and failed.
      backwards.second_meets = [&] {
        backwards.second_began.count_down();
        failed.wait();
      };
      auto other = std::async(std::launch::async, [&] {
        expect_error([&] { backwards.first.backward(); }, {"two backwards", "thread"});
        failed.count_down();
      });
      backwards.first_began.wait();
      expect_error([&] { backwards.second.backward(); }, {"two backwards", "thread"});
      other.get();
    }
    sharded.zero_grad();
    std::function<void()> nothing = [] {};
    sharded->meet = &nothing;
    sharded.forward(x).sum().backward();
    const auto plain = make_meets();
    plain->meet = &nothing;
    plain->forward(x).sum().backward();
    EXPECT_TRUE(torch::allclose(sharded.full_grad("first.weight"), plain->first->weight.grad()));
  });
}

TEST(TwoThreadsInBackward, OfARankThatIsAloneAddTheirGradients) {
  TESSERA_ON_HOST_ONLY(kOneThread);
  on_worlds({1}, at_each_level(), [](World&, const ShardPlan& plan) {
    auto sharded = fully_shard(make_meets(), plan);
    const auto plain = make_meets();
    const auto x = torch::ones({2, 37}, test_device());
    for (Meets* net : {&*sharded, &*plain}) {
      TwoBackwards backwards(*net, x);
      auto other = std::async(std::launch::async, [&] { backwards.first.backward(); });
      backwards.first_began.wait();
      backwards.second.backward();
      other.get();
    }
    for (const auto& item : plain->named_parameters())
      EXPECT_TRUE(torch::equal(sharded.full_grad(item.key()), item.value().grad())) << item.key();
  });
}

}  // namespace tessera::testing::open_backwards_test
