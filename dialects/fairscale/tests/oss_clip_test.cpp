// Clipping by `OSS`, by the ids of its behaviours.

#include <cmath>
#include <limits>

#include "dialects/fairscale/tests/fairscale.h"

namespace tessera::testing::oss_clip_test {

using torch::nn::utils::clip_grad_norm_;

const SGDOptions kSgd = SGDOptions(0.1).momentum(0.9);
const double kNormTypes[] = {1.0, 2.0, 3.0, 0.5, std::numeric_limits<double>::infinity()};

// Returns a net with the gradients of `ranks` ranks together.
PlainNet with_gradients(int ranks, const std::set<std::string>& frozen = {}) {
  PlainNet plain = make_net<PlainNet>();
  for (const auto& item : plain->named_parameters())
    item.value().requires_grad_(!frozen.contains(item.key()));
  for (int rank = 0; rank < ranks; ++rank) (loss_of(*plain, 0, rank, ranks) / ranks).backward();
  return plain;
}

// `gradient_of` returns a parameter's gradient, undefined if this rank has none.
template <class F>
void expect_gradients(PlainNet& net, const std::map<std::string, at::Tensor>& expected,
                      const std::string& what, F&& gradient_of) {
  for (const auto& item : net->named_parameters()) {
    const at::Tensor gradient = gradient_of(item.value());
    if (!gradient.defined()) continue;
    EXPECT_TRUE(torch::allclose(gradient.cpu(), expected.at(item.key()), 1e-5, 1e-7))
        << what << ": " << item.key();
  }
}

TEST(Oss, FS_46_ClipsAsLibTorchDoes) {
  for (const int ranks : {2, 3, 4}) {
    run_world(ranks, [&](World& world) {
      for (const double norm_type : kNormTypes) {
        for (const double max_norm : {0.01, 1e6}) {
          const std::string what =
              std::to_string(ranks) + " ranks, norm " + std::to_string(norm_type);
          PlainNet plain = with_gradients(ranks), net = make_net<PlainNet>(),
                   other = make_net<PlainNet>();
          const double expected = clip_grad_norm_(plain->parameters(), max_norm, norm_type);
          const auto clipped = gradients_on_host(plain);
          OSS<SGD> optimizer(net->parameters(), kSgd), by_itself(other->parameters(), kSgd);
          ShardedDataParallel<PlainNet> model(net, optimizer);
          loss_of(model, 0, world.rank(), ranks).backward();
          const at::Tensor before = model.full_grad(net->last->weight);
          EXPECT_NEAR(optimizer.clip_grad_norm(max_norm, norm_type), expected, 1e-5 * expected)
              << what;
          expect_gradients(net, clipped, what,
                           [&](const at::Tensor& p) { return model.full_grad(p); });
          EXPECT_EQ(torch::equal(model.full_grad(net->last->weight), before), max_norm > 1) << what;
          expect_gradients(net, clipped, what,
                           [&](const at::Tensor& p) { return optimizer.gradient(p); });

          loss_of(*other, 0, world.rank(), ranks).backward();
          average_gradients(*world.process_group(), other->parameters());
          EXPECT_NEAR(by_itself.clip_grad_norm(max_norm, norm_type), expected, 1e-5 * expected)
              << what;
          const auto owned = by_itself.partition_parameters()[world.rank()];
          expect_gradients(other, clipped, what, [&](const at::Tensor& p) {
            const bool is_mine = std::any_of(owned.begin(), owned.end(),
                                             [&](const at::Tensor& own) { return own.is_same(p); });
            return is_mine ? p.grad() : at::Tensor();
          });
        }
      }
    });
  }
}

TEST(Oss, FS_46_FiltersChooseWhatIsClipped) {
  run_world(3, [](World& world) {
    PlainNet plain = with_gradients(3), net = make_net<PlainNet>();
    OSS<SGD> a(net->first->parameters(), kSgd);
    std::vector<at::Tensor> others = net->second->parameters();
    for (const at::Tensor& param : net->last->parameters()) others.push_back(param);
    OSS<SGD> b(others, kSgd);
    ShardedDataParallel<PlainNet> model(net, {&a, &b});
    loss_of(model, 0, world.rank(), 3).backward();
    // Each optimizer clips its own parameters; the filter selects some of them.
    const double first = clip_grad_norm_(plain->first->parameters(), 0.01);
    const double weights = clip_grad_norm_({plain->second->weight, plain->last->weight}, 0.02);
    EXPECT_NEAR(a.clip_grad_norm(0.01), first, 1e-5 * first);
    EXPECT_NEAR(b.clip_grad_norm(0.02, 2, [](const at::Tensor& p) { return p.dim() == 2; }),
                weights, 1e-5 * weights);
    expect_gradients(net, gradients_on_host(plain), "filtered",
                     [&](const at::Tensor& p) { return model.full_grad(p); });
    EXPECT_EQ(b.clip_grad_norm(1, 2, [](const at::Tensor&) { return false; }), 0);
    expect_error([&] { b.clip_grad_norm(-1); }, {"must not be negative"});
    expect_error([&] { b.clip_grad_norm(1, 0); }, {"must be positive"});
  });
}

TEST(Oss, FS_46_TrainingWithClippingIsThatOfOneProcess) {
  for (const int ranks : {2, 3, 4}) {
    PlainNet plain = make_net<PlainNet>();
    SGD alone(plain->parameters(), kSgd);
    for (int step = 0; step < 4; ++step) {
      alone.zero_grad();
      for (int rank = 0; rank < ranks; ++rank)
        (loss_of(*plain, step, rank, ranks) / ranks).backward();
      EXPECT_GT(clip_grad_norm_(plain->parameters(), 0.1), 0.1);
      alone.step();
    }
    const auto expected = plain_state(*plain);
    run_world(ranks, [&](World& world) {
      PlainNet net = make_net<PlainNet>();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        loss_of(*net, step, world.rank(), ranks).backward();
        average_gradients(*world.process_group(), net->parameters());
        optimizer.clip_grad_norm(0.1);
        optimizer.step();
        expect_replicas(world, *net);
      }
      expect_same_state(plain_state(*net), expected, 2e-6, "clipped");
    });
  }
}

TEST(Oss, FS_47_ClipsOverItsGroupAlone) {
  PlainNet plain = with_gradients(2);
  const double expected = clip_grad_norm_(plain->parameters(), 0.1);
  const auto clipped = gradients_on_host(plain);
  run_world(4, [&](World& world) {
    const auto low = world.new_process_group({0, 1}), high = world.new_process_group({2, 3});
    if (!low) return;  // the others do nothing, and no rank waits for them
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd, {.group = low});
    ShardedDataParallel<PlainNet> model(net, optimizer);  // with the optimizer's group
    loss_of(model, 0, low->rank(), 2).backward();
    EXPECT_NEAR(optimizer.clip_grad_norm(0.1), expected, 1e-5 * expected);
    expect_gradients(net, clipped, "group",
                     [&](const at::Tensor& p) { return model.full_grad(p); });
  });
}

TEST(Oss, FS_48_CountsWhatIsTrainableNow) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    for (at::Tensor& param : net->last->parameters()) param.requires_grad_(false);
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer,
                                        {.warn_on_trainable_params_changed = false});
    const auto expect_norm = [&](const std::set<std::string>& frozen) {
      for (const auto& item : net->named_parameters())
        item.value().requires_grad_(!frozen.contains(item.key()));
      optimizer.zero_grad();
      loss_of(model, 0, world.rank(), 2).backward();
      PlainNet plain = with_gradients(2, frozen);
      const double expected = clip_grad_norm_(plain->parameters(), 1e6);
      EXPECT_NEAR(optimizer.clip_grad_norm(1e6), expected, 1e-5 * expected);
      return expected;
    };
    const double some = expect_norm({"last.weight", "last.bias"});
    const double all = expect_norm({});
    const double without_first = expect_norm({"first.weight", "first.bias"});
    EXPECT_GT(all, some + 1e-3);
    EXPECT_GT(all, without_first + 1e-3);
  });
}

}  // namespace tessera::testing::oss_clip_test
