// Ranks that use subsets of a model's layers, each in an order that it keeps: any such program
// runs, and its numbers are those of one process.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "engine/model/sharded_state.h"
#include "support/models.h"

namespace tessera::testing::subset_order_test {

constexpr int64_t kWidth = 8, kRows = 4;
constexpr int kLayers = 7, kSteps = 6;
constexpr int kPrograms = 6;

using Layers = std::vector<int>;

// Layers of equal shapes; a forward uses those of `uses`, in that order.
struct Stack : Net {
  explicit Stack(const Layers& registration)
      : layers(registration.size(), torch::nn::Linear(nullptr)) {
    for (const int i : registration)
      layers[i] = register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth));
  }
  torch::Tensor forward(torch::Tensor x) override {
    for (const int i : uses) x = torch::tanh(layers[i](x));
    return x;
  }
  Layers uses;
  std::vector<torch::nn::Linear> layers;
};

struct Program {
  Layers registration;
  std::vector<std::vector<Layers>> uses;  // by step and rank
  ShardPlan plan;
  int passes = 1;       // backwards of a step; all but the last are under no_sync()
  int evaluations = 0;  // between steps
};

// Makes programs from a seed.
class Generator {
 public:
  explicit Generator(int seed) : random_(seed) {}

  int below(int bound) { return static_cast<int>(random_() % bound); }
  Layers permutation() {
    Layers layers(kLayers);
    std::iota(layers.begin(), layers.end(), 0);
    for (int i = kLayers - 1; i > 0; --i) std::swap(layers[i], layers[below(i + 1)]);
    return layers;
  }
  // At least one of them.
  Layers subset(const Layers& layers) {
    Layers result;
    while (result.empty())
      for (const int i : layers)
        if (below(2)) result.push_back(i);
    return result;
  }
  // `order_of(rank)`: the layers in that rank's order; `choose`: those used in one pass.
  template <class OrderOf, class Choose>
  Program program(int ranks, const OrderOf& order_of, const Choose& choose) {
    Program made{.registration = permutation(),
                 .plan = {.unit_bytes = 300,
                          .resident_bytes = std::array{0, 0, 600, -1}[below(4)],
                          .prefetch = below(3),
                          .average = false}};
    std::vector<Layers> orders;
    for (int rank = 0; rank < ranks; ++rank) orders.push_back(order_of(rank));
    for (int step = 0; step < kSteps; ++step) {
      made.uses.emplace_back();
      for (const Layers& order : orders) made.uses.back().push_back(choose(order, step));
    }
    return made;
  }

 private:
  std::mt19937 random_;
};

struct Trained {
  std::vector<double> losses;
  std::vector<NamedTensor> state;
};

std::shared_ptr<Stack> net_of(const Program& program) {
  return seeded(7, [&] { return std::make_shared<Stack>(program.registration); });
}

torch::optim::AdamW optimizer_of(Net& net) {
  // Weight decay would move a parameter that the step does not use.
  return torch::optim::AdamW(net.parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
}

torch::Tensor loss_of(Stack& net, const Program& program, int step, int pass, int rank, int ranks) {
  net.uses = program.uses[(step + pass) % kSteps][rank];
  const Batch batch = global_batch(step, kRows * ranks, kWidth, kWidth);
  return rank_loss(net, batch, rank, ranks, step);
}

// Each rank's loss one after another, so that gradients are summed in the order of ranks.
Trained train_alone(const Program& program, int ranks) {
  const auto net = net_of(program);
  auto optimizer = optimizer_of(*net);
  Trained result;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<torch::Tensor> sums(net->parameters().size());
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank) {
      for (int pass = 0; pass < program.passes; ++pass) {
        const auto loss = loss_of(*net, program, step, pass, rank, ranks);
        if (pass == 0) result.losses.push_back(loss.item<double>());
        loss.backward();
      }
      for (size_t i = 0; i < sums.size(); ++i) {
        torch::Tensor& grad = net->parameters()[i].mutable_grad();
        if (!grad.defined()) continue;
        sums[i] = sums[i].defined() ? sums[i] + grad : grad.clone();
        grad.reset();
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) net->parameters()[i].mutable_grad() = sums[i];
    optimizer.step();
  }
  result.state = plain_state(*net);
  return result;
}

void expect_parity_on(World& world, const Program& program, const Trained& expected,
                      const std::string& what) {
  const int rank = world.rank(), ranks = world.size();
  const auto net = net_of(program);
  auto inner = optimizer_of(*net);
  auto sharded = fully_shard(net, program.plan);
  ShardedOptimizer optimizer(sharded, inner, {.fused = false});
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto backward = [&](int pass) {
      const auto loss = loss_of(*net, program, step, pass, rank, ranks);
      if (pass == 0) {
        EXPECT_EQ(loss.item<double>(), expected.losses[step * ranks + rank])
            << what << ", " << step;
      }
      loss.backward();
    };
    for (int pass = 0; pass + 1 < program.passes; ++pass) {
      const auto guard = sharded.no_sync();
      backward(pass);
    }
    backward(program.passes - 1);
    optimizer.step();
    for (int i = 0; i < program.evaluations; ++i) {
      const torch::NoGradGuard no_grad;
      net->uses = program.uses[(step + i) % kSteps][rank];
      sharded.forward(on_test_device(torch::ones({1, kWidth})));
    }
  }
  expect_same_state(sharded.full_state(), expected.state, 0, what);
}

using Make = Program (*)(Generator& generator, int ranks);

void expect_parity_of_programs(const std::string& kind, Make make, int on_two = kPrograms) {
  for (const int ranks : {2, 3}) {
    const int count = ranks == 2 ? on_two : on_two / 3;
    std::vector<Program> programs;
    std::vector<Trained> expected;
    for (int seed = 0; seed < count; ++seed) {
      Generator generator(seed);
      programs.push_back(make(generator, ranks));
      expected.push_back(train_alone(programs.back(), ranks));
    }
    run_world(ranks, [&](World& world) {
      for (int seed = 0; seed < count; ++seed)
        expect_parity_on(world, programs[seed], expected[seed],
                         fmt::format("{}, {} ranks, seed {}", kind, ranks, seed));
    });
  }
}

Program one_order_program(Generator& generator, int ranks) {
  const Layers order = generator.permutation();
  return generator.program(
      ranks, [&](int) { return order; },
      [&](const Layers& layers, int) { return generator.subset(layers); });
}
TEST(SubsetOrder, OfAllRanksMayDifferFromRegistration) {
  expect_parity_of_programs("one order", one_order_program);
}

Program another_first_layer_program(Generator& generator, int ranks) {
  Program program = generator.program(
      ranks, [&](int) { return Layers{0, 1, 2, 3, 4, 5, 6}; },
      [&](const Layers& layers, int) {
        return Layers(layers.begin() + generator.below(kLayers), layers.end());
      });
  std::sort(program.registration.begin(), program.registration.end());
  return program;
}
TEST(SubsetOrder, MayBeginWithAnotherLayerInEachPass) {
  expect_parity_of_programs("another first layer", another_first_layer_program);
}

Program fixed_ends_program(Generator& generator, int ranks) {
  const Layers order = generator.permutation();
  return generator.program(
      ranks, [&](int) { return order; },
      [&](const Layers& layers, int) {
        Layers used = generator.subset({layers.begin() + 1, layers.end() - 1});
        used.insert(used.begin(), layers.front());
        used.push_back(layers.back());
        return used;
      });
}
TEST(SubsetOrder, MayHaveAFixedFirstAndLastLayer) {
  expect_parity_of_programs("fixed ends", fixed_ends_program);
}

Program all_layers_first_program(Generator& generator, int ranks) {
  const Layers order = generator.permutation();
  return generator.program(
      ranks, [&](int) { return order; },
      [&](const Layers& layers, int step) {
        return step == 0 ? layers : generator.subset(layers);
      });
}
TEST(SubsetOrder, MayFollowAPassOfAllLayers) {
  expect_parity_of_programs("all layers first", all_layers_first_program);
}

Program own_orders_program(Generator& generator, int ranks) {
  return generator.program(
      ranks, [&](int) { return generator.permutation(); },
      [&](const Layers& layers, int) { return generator.subset(layers); });
}
TEST(SubsetOrder, OfEachRankMayBeItsOwn) {
  expect_parity_of_programs("own orders", own_orders_program);
}

Program no_order_program(Generator& generator, int ranks) {
  return generator.program(
      ranks, [&](int) { return Layers{}; },
      [&](const Layers&, int) { return generator.subset(generator.permutation()); });
}
TEST(SubsetOrder, MayChangeInEachPass) { expect_parity_of_programs("no order", no_order_program); }

Program no_sync_program(Generator& generator, int ranks) {
  const Layers order = generator.permutation();
  Program program = generator.program(
      ranks, [&](int) { return order; },
      [&](const Layers& layers, int) { return generator.subset(layers); });
  program.passes = 3;
  return program;
}
TEST(SubsetOrder, HoldsWhileGradientsAreAccumulated) {
  expect_parity_of_programs("no_sync", no_sync_program);
}

Program evaluations_program(Generator& generator, int ranks) {
  const Layers order = generator.permutation();
  Program program = generator.program(
      ranks, [&](int) { return order; },
      [&](const Layers& layers, int step) {
        return step == 0 ? layers : generator.subset(layers);
      });
  program.evaluations = 2;
  return program;
}
TEST(SubsetOrder, HoldsWithEvaluationsBetweenSteps) {
  expect_parity_of_programs("evaluations", evaluations_program);
}

TEST(SubsetOrder, NightlyOfManyPrograms) {
  const std::pair<const char*, Make> kinds[] = {
      {"one order", one_order_program},   {"another first layer", another_first_layer_program},
      {"fixed ends", fixed_ends_program}, {"all layers first", all_layers_first_program},
      {"own orders", own_orders_program}, {"no order", no_order_program},
      {"no_sync", no_sync_program},       {"evaluations", evaluations_program},
  };
  for (const auto& [kind, make] : kinds) expect_parity_of_programs(kind, make, 40);
}

TEST(SubsetOrder, CostsAgreementsOnlyWhereAUseIsNotExpected) {
  run_world(2, [](World& world) {
    auto counter = counting_process_group(world.process_group());
    const auto net = seeded(7, [] { return std::make_shared<Stack>(Layers{0, 1, 2, 3}); });
    torch::optim::SGD inner(net->parameters(), 0.1);
    auto sharded = fully_shard(net, {.unit_bytes = 300, .process_group = counter});
    ShardedOptimizer optimizer(sharded, inner);
    for (int step = 0; step < 8; ++step) {
      counter->reset_counts();
      optimizer.zero_grad();
      net->uses = world.rank() == 1 && step >= 4 ? Layers{0, 2, 1, 3} : Layers{0, 1, 2, 3};
      net->forward(on_test_device(torch::ones({2, kWidth}))).sum().backward();
      optimizer.step();
      const CollectiveCounts counts = counter->counts();
      if (step == 4) {
        EXPECT_GT(counts.all_reduce.calls, 1);
      } else {
        EXPECT_EQ(counts.all_reduce.calls, 1) << step;
      }
      // 4 in forward, and in backward the first two of layers 3, 2 and 1 are still there.
      if (step == 1 || step == 3) {
        EXPECT_EQ(counts.all_gather.calls, 5) << step;
      }
    }
  });
}

// A rank that uses less comes to the change first, while others still gather from it.
TEST(SubsetOrder, AnEvaluationSeesTheValuesBeforeAChange) {
  run_world(2, [](World& world) {
    const auto net = seeded(7, [] { return std::make_shared<Stack>(Layers{0, 1, 2, 3}); });
    torch::optim::SGD inner(net->parameters(), 0.1);
    auto sharded = fully_shard(net, {.unit_bytes = 300, .prefetch = 0});
    ShardedOptimizer optimizer(sharded, inner);
    const auto ones = on_test_device(torch::ones({2, kWidth}));
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      net->uses = world.rank() == 1 ? Layers{0, 1, 2, 3} : Layers{0};
      return net->forward(ones);
    };
    net->uses = {0, 1, 2, 3};
    net->forward(ones).sum().backward();
    const auto before = evaluate();
    optimizer.step();
    auto state = sharded.full_state();
    for (NamedTensor& item : state) item.tensor.mul_(2);
    const auto stepped = evaluate();
    sharded.load_full_state(state);
    const auto loaded = evaluate();
    sharded.full_state();
    // One process.
    const auto alone = seeded(7, [] { return std::make_shared<Stack>(Layers{0, 1, 2, 3}); });
    torch::optim::SGD plain(alone->parameters(), 0.1);
    const auto expect_value = [&](const torch::Tensor& value, const char* what) {
      const torch::NoGradGuard no_grad;
      alone->uses = world.rank() == 1 ? Layers{0, 1, 2, 3} : Layers{0};
      EXPECT_TRUE(torch::equal(value, alone->forward(ones))) << what << ", rank " << world.rank();
    };
    expect_value(before, "before the step");
    alone->uses = {0, 1, 2, 3};
    alone->forward(ones).sum().backward();
    plain.step();
    expect_value(stepped, "before the load");
    torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : alone->parameters()) parameter.mul_(2);
    expect_value(loaded, "after it");
  });
}

TEST(SubsetOrder, OfEvaluationsMustBeOneOnAllRanks) {
  TESSERA_ON_HOST_ONLY("NCCL does not say what the others issued");
  run_world(2, [](World& world) {
    const auto net = seeded(7, [] { return std::make_shared<Stack>(Layers{0, 1, 2, 3}); });
    torch::optim::SGD inner(net->parameters(), 0.1);
    auto sharded = fully_shard(net, {.unit_bytes = 300, .prefetch = 0});
    ShardedOptimizer optimizer(sharded, inner);
    const auto forward = [&](const Layers& uses) {
      net->uses = uses;
      return sharded.forward(on_test_device(torch::ones({2, kWidth})));
    };
    const auto train = [&] {
      forward({0, 1, 2, 3}).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    train();
    expect_error(
        [&] {
          {
            const torch::NoGradGuard no_grad;
            forward(world.rank() == 1 ? Layers{3, 2, 1, 0} : Layers{0, 1, 2, 3});
          }
          train();
        },
        {"issued another collective at position", "in the order of use that they share: layer0",
         "this rank has used"});
  });
}

}  // namespace tessera::testing::subset_order_test
