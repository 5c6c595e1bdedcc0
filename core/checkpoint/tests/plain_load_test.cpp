#include "checkpoint/tests/saved_job.h"
#include "engine/optim/param_state.h"

namespace tessera::testing::plain_load_test {

using torch::optim::AdamW;

// Returns the tensors of a module and its optimizer, named as `read_all` names them.
std::map<std::string, torch::Tensor> all_of(const Picture& picture, const AdamW& adamw) {
  std::map<std::string, torch::Tensor> all;
  for (const auto& item : picture.named_buffers()) all["buffer/" + item.key()] = item.value();
  std::set<const void*> seen;
  for (const auto& item : picture.named_parameters()) {
    all["param/" + item.key()] = item.value().detach();
    const ParamState state = read_param_state(adamw, item.value());
    for (const auto& [name, value] : state.tensors) all["state/" + name + "/" + item.key()] = value;
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    for (const auto& [name, count] : state.counts)
      all["state/" + name + "/" + item.key()] = torch::tensor(count);
  }
  return all;
}

// Each parameter once, since a plain optimizer steps a tied one as often as it is listed.
std::vector<torch::Tensor> distinct_parameters(const Picture& picture) {
  std::vector<torch::Tensor> params;
  std::set<const void*> seen;
  for (const auto& param : picture.parameters()) {
    if (seen.insert(param.unsafeGetTensorImpl()).second) params.push_back(param);
  }
  return params;
}

// A module that is not sharded, with values and optimizer state of its own.
struct Plain {
  explicit Plain(uint64_t seed)
      : module(make_picture(seed)), adamw(distinct_parameters(*module), adamw_options(0.1)) {
    for (int64_t step = 7; step < 9; ++step) train(step);
  }
  void train(int64_t step) {
    const auto [x, y] = picture_batch(step);
    adamw.zero_grad();
    torch::mse_loss(module->forward(x), y).backward();
    adamw.step();
  }
  std::shared_ptr<Picture> module;
  AdamW adamw;
};

// Loads on each rank, shards afterwards, and continues training.
void expect_goes_on(const Saved& saved, int ranks, const ShardPlan& plan) {
  const std::string what = saved.describe() + " -> plain -> " + describe(ranks, plan);
  run_world(ranks, [&](World& world) {
    auto module = make_picture(2);
    AdamW inner(module->parameters(), adamw_options(0.1));
    EXPECT_EQ(load_checkpoint(saved.path, *module, &inner).numbers.at("step"), 2) << what;
    auto sharded = fully_shard(module, plan);
    ShardedOptimizer optimizer(sharded, inner);
    const auto state = sharded.full_state();
    for (int64_t step = 2; step < 4; ++step) train_step(*module, optimizer, step);
    const auto later = sharded.full_state();
    if (world.rank() != 0) return;
    expect_same_state(state, saved.state, 0, what);
    expect_same_state(later, saved.later, ranks == saved.ranks ? 0 : 1e-5, what + ", later");
  });
}

class CheckpointPlainLoad : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(SavedBy, CheckpointPlainLoad,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Bool()));

TEST_P(CheckpointPlainLoad, TakesAllThatWasSavedAndIsShardedAfterwards) {
  const ScratchDirectory scratch;
  const auto [ranks, whole] = GetParam();
  for (const ShardPlan& plan : plans()) {
    const Saved saved = save_in_middle(ranks, plan, whole, scratch / "one");
    Plain plain(3);
    const void* memory = plain.module->conv->weight.data_ptr();
    EXPECT_EQ(load_checkpoint(saved.path, *plain.module, &plain.adamw).numbers.at("step"), 2);
    expect_same_tensors(all_of(*plain.module, plain.adamw), read_all(saved.path), saved.describe());
    EXPECT_EQ(plain.adamw.param_groups()[0].options().get_lr(), 0.005);
    EXPECT_EQ(plain.module->conv->weight.data_ptr(), memory);
    for (int64_t step = 2; step < 4; ++step) plain.train(step);
    expect_same_state(plain_state(*plain.module), saved.later, 1e-5, saved.describe());
    expect_goes_on(saved, ranks, plan);
    expect_goes_on(saved, 2, plans()[3]);
  }
}

TEST(CheckpointPlain, ALoadTakesStateAwayThatTheCheckpointLacks) {
  const ScratchDirectory scratch;
  run_world(1, [&](World&) {
    Job job(1, plans()[3]);
    save_checkpoint(scratch / "start", job.sharded, &job.optimizer);
  });
  Plain plain(2);
  load_checkpoint(scratch / "start", *plain.module, &plain.adamw);
  EXPECT_TRUE(plain.adamw.state().empty());
}

TEST(CheckpointPlain, ParametersKeepTheirOrderOfMemory) {
  const ScratchDirectory scratch;
  const torch::Tensor values = torch::arange(24.).view({4, 6});
  for (const bool whole : {false, true}) {
    run_world(2, [&](World&) {
      auto bag = std::make_shared<Bag>();
      bag->add("turned", values.clone());
      bag->add("part", values.t().contiguous().t());
      auto sharded = fully_shard(on_test_device(bag));
      save_checkpoint(scratch / "one", sharded, nullptr, {.whole_parameters = whole});
    });
    Bag bag;
    const torch::Tensor around = torch::full({4, 8}, -1., test_device());
    bag.add("turned", torch::zeros({6, 4}, test_device()).t());
    bag.add("part", around.narrow(1, 1, 6));
    load_checkpoint(scratch / "one", bag, nullptr);
    EXPECT_TRUE(same_values(bag.named_parameters()["turned"], values));
    EXPECT_EQ(bag.named_parameters()["turned"].stride(0), 1);
    EXPECT_TRUE(same_values(around.narrow(1, 1, 6), values));
    EXPECT_TRUE((around.select(1, 0) == -1).all().item<bool>());
    EXPECT_TRUE((around.select(1, 7) == -1).all().item<bool>());
  }
}

TEST(CheckpointPlain, WhatDoesNotFitIsRefusedAndTheModuleStays) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    Job job(1, plans()[3]);
    job.train(0, 1);
    save_checkpoint(scratch / "one", job.sharded, &job.optimizer);
    expect_contains(error_of([&] { load_checkpoint(scratch / "one", *job.module, nullptr); }),
                    {"parameter 'decode' is sharded", "expected a plain module"});
  });
  auto wide = on_test_device(std::make_shared<Picture>(14));
  const auto before = plain_state(*wide);
  torch::optim::SGD sgd(wide->parameters(), 0.1);
  EXPECT_THROW(load_checkpoint(scratch / "one", *wide, &sgd), c10::ValueError);
  expect_contains(
      error_of([&] { load_checkpoint(scratch / "one", *wide, &sgd); }),
      {"other shapes: 'decode' [17, 13] (the model's: [17, 14]), 'conv.weight' [13, 3, 3, 3]",
       "optimizer: SGD (the checkpoint's: AdamW)"});
  expect_same_state(plain_state(*wide), before, 0, "after the error");
  auto picture = make_picture(1);
  AdamW other(wide->parameters());
  expect_contains(error_of([&] { load_checkpoint(scratch / "one", *picture, &other); }),
                  {"must be the model's", "[17, 14]"});
  Bag empty;
  expect_contains(error_of([&] { load_checkpoint(scratch / "one", empty, nullptr); }),
                  {"not in the model: 'decode', 'encode.weight'"});
}

// A load between a forward and its backward: the backward would use the loaded values.
TEST(CheckpointPlain, AFileThatIsReadIntoParametersEndsTheGraphsBeforeIt) {
  const ScratchDirectory scratch;
  run_world(2, [&](World&) {
    const DeviceMesh mesh = DeviceMesh::over_world();
    for (const bool is_dist : {false, true}) {
      torch::nn::Linear first(4, 4), second(4, 4);
      auto net = std::make_shared<Bag>();
      net->add("first", first->weight.detach());
      net->add("second", second->weight.detach());
      std::map<std::string, torch::Tensor> params;
      for (const auto& item : net->named_parameters()) {
        if (is_dist) distribute_(item.value(), mesh, {Shard{0}});
        params[item.key()] = item.value();
      }
      const auto loss = [&] { return params["first"].mm(params["second"]).sum(); };
      const auto path = scratch / (is_dist ? "dist" : "plain");
      save_state_dict(path, params);
      const auto before = loss();
      load_state_dict(path, params);
      expect_contains(error_of([&] { before.backward(); }), {"modified by an inplace operation"});
      save_checkpoint(scratch / "model", *net, nullptr);
      const auto later = loss();
      load_checkpoint(scratch / "model", *net, nullptr);
      expect_contains(error_of([&] { later.backward(); }), {"modified by an inplace operation"});
      loss().backward();
    }
  });
}

}  // namespace tessera::testing::plain_load_test
