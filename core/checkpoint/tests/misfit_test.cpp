#include "checkpoint/tests/saved_model.h"

namespace tessera::testing::misfit_test {

std::shared_ptr<Bag> saved_bag() {
  auto bag = std::make_shared<Bag>();
  bag->add("same", torch::ones({7, 5}));
  bag->add("shape", torch::ones({3, 4}));
  bag->add("dtype", torch::ones({6}));
  bag->add("old", torch::ones({2}));
  bag->add_buffer("mean", torch::ones({4}));
  bag->add_buffer("old_count", torch::ones({}, torch::kLong));
  return on_test_device(bag);
}

TEST(CheckpointMisfit, OneErrorOnEveryRankListsAllAndTheModelStays) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    auto saved = fully_shard(saved_bag());
    save_checkpoint(scratch / "one", saved, nullptr);
    auto bag = std::make_shared<Bag>();
    bag->add("same", torch::zeros({7, 5}));
    bag->add("shape", torch::zeros({4, 3}));
    bag->add("dtype", torch::zeros({6}, torch::kDouble));
    bag->add("fresh", torch::zeros({2}));
    bag->add_buffer("mean", torch::zeros({5}));
    bag->add_buffer("fresh_count", torch::zeros({}, torch::kLong));
    auto sharded = fully_shard(on_test_device(bag));
    const auto before = sharded.full_state();
    EXPECT_THROW(load_checkpoint(scratch / "one", sharded, nullptr), c10::ValueError);
    expect_contains(
        error_of([&] { load_checkpoint(scratch / "one", sharded, nullptr); }),
        {"[load_checkpoint]", "missing in the checkpoint: 'fresh', buffer 'fresh_count'",
         "not in the model: 'old', buffer 'old_count'", "'shape' [3, 4] (the model's: [4, 3])",
         "'mean' [4] (the model's: [5])", "'dtype' F32 (the model's: F64)"});
    expect_same_state(sharded.full_state(), before, 0, "after the error");
  });
}

// `b` is tied to `a`, or has its own values.
std::shared_ptr<Bag> pair(bool tied, double value) {
  auto bag = std::make_shared<Bag>();
  const torch::Tensor a = torch::full({5, 3}, value);
  bag->add("a", a);
  bag->add("b", tied ? a : torch::full({5, 3}, value));
  return on_test_device(bag);
}

TEST(CheckpointMisfit, TiesMayBeLoosenedButNotMade) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    auto tied = fully_shard(pair(true, 1));
    auto loose = fully_shard(pair(false, 2));
    save_checkpoint(scratch / "tied", tied, nullptr);
    save_checkpoint(scratch / "loose", loose, nullptr);
    load_checkpoint(scratch / "tied", loose, nullptr);
    for (const NamedTensor& named : loose.full_state())
      EXPECT_TRUE((named.tensor == 1).all().item<bool>());
    expect_contains(error_of([&] { load_checkpoint(scratch / "loose", tied, nullptr); }),
                    {"tied only in the model: 'a' = 'b'"});
  });
}

TEST(CheckpointMisfit, OptimizersMustFit) {
  using namespace torch::optim;
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    auto picture = make_picture(1);
    auto sharded = fully_shard(picture);
    AdamW inner(picture->parameters());
    ShardedOptimizer adamw(sharded, inner);
    train_step(*picture, adamw, 0);
    save_checkpoint(scratch / "one", sharded, &adamw);
    save_checkpoint(scratch / "model", sharded, nullptr);
    const auto error_with = [&](Optimizer& other, const std::shared_ptr<Picture>& module,
                                const char* path) {
      auto target = fully_shard(module);
      ShardedOptimizer optimizer(target, other);
      return error_of([&] { load_checkpoint(scratch / path, target, &optimizer); });
    };
    auto module = make_picture(2);
    SGD sgd(module->parameters(), 0.1);
    expect_contains(error_with(sgd, module, "one"), {"optimizer: SGD (the checkpoint's: AdamW)"});
    module = make_picture(2);
    AdamW some(module->norm->parameters());
    expect_contains(
        error_with(some, module, "one"),
        {"'conv.weight' of the checkpoint's param group 0 is in none of the optimizer's"});
    module = make_picture(2);
    AdamW two({OptimizerParamGroup(module->norm->parameters()),
               OptimizerParamGroup(module->encode->parameters())});
    expect_contains(error_with(two, module, "one"), {"2 param groups (the checkpoint's: 1)"});
    module = make_picture(2);
    AdamW whole(module->parameters());
    expect_contains(error_with(whole, module, "model"), {"optimizer: it was saved without one"});
    auto other = fully_shard(make_picture(3));
    expect_contains(error_of([&] { load_checkpoint(scratch / "one", other, &adamw); }),
                    {"made for another one"});
    expect_contains(error_of([&] { save_checkpoint(scratch / "two", other, &adamw); }),
                    {"made for another one"});
  });
}

TEST(CheckpointMisfit, UnknownOptimizersAreRefused) {
  struct Sign : torch::optim::SGD {
    using SGD::SGD;
  };
  struct Own : torch::optim::Optimizer {
    explicit Own(std::vector<torch::Tensor> params)
        : Optimizer({torch::optim::OptimizerParamGroup(std::move(params))},
                    std::make_unique<torch::optim::SGDOptions>(0.1)) {}
    torch::Tensor step(LossClosure) override { return {}; }
  };
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    auto picture = make_picture(1);
    auto sharded = fully_shard(picture);
    Own own(picture->parameters());
    ShardedOptimizer optimizer(sharded, own, {.elementwise = true});
    EXPECT_THROW(save_checkpoint(scratch / "one", sharded, &optimizer), c10::NotImplementedError);
    auto other = make_picture(1);
    auto derived = fully_shard(other);
    Sign sign(other->parameters(), 0.1);
    ShardedOptimizer known(derived, sign, {.elementwise = true});
    save_checkpoint(scratch / "one", derived, &known);
    load_checkpoint(scratch / "one", derived, &known);
  });
  EXPECT_EQ(read_index(scratch / "one").at("optimizer").at("kind"), "SGD");
}

}  // namespace tessera::testing::misfit_test
