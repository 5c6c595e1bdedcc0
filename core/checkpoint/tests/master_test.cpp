// Master weights in checkpoints: no bits of them are lost, and models of other precisions load
// them.
#include <gtest/gtest.h>

#include "checkpoint/tests/saved_model.h"

namespace tessera::testing::master_test {

std::shared_ptr<Mlp> make_net(uint64_t seed, std::optional<at::ScalarType> dtype = {}) {
  const auto net = seeded(seed, [] { return std::make_shared<Mlp>(13, 2, 5); });
  if (dtype) net->to(*dtype);
  return net;
}

std::vector<NamedTensor> rounded(std::vector<NamedTensor> state, at::ScalarType dtype) {
  for (NamedTensor& item : state) item.tensor = item.tensor.to(dtype);
  return state;
}

class MasterCheckpoint : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(SavedBy, MasterCheckpoint,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Bool()));

// Saves a float model that computes in bfloat16; its values are the masters.
TEST_P(MasterCheckpoint, LoadsWithTheBitsOfTheMastersOrRoundedOnce) {
  const auto [ranks, whole] = GetParam();
  const ScratchDirectory directory;
  const auto values = plain_state(*make_net(1));
  const Precision bfloat = {.param_dtype = at::kBFloat16};
  for (const auto level : {ShardLevel::kNone, ShardLevel::kGradients, ShardLevel::kParameters}) {
    run_world(ranks, [&, whole = whole](World&) {
      const auto saved =
          fully_shard(make_net(1), {.level = level, .unit_bytes = 500, .precision = bfloat});
      save_checkpoint(directory / "saved", saved, nullptr, {.whole_parameters = whole});
    });
    run_world(2, [&](World&) {
      // The masters keep their bits: a float model loads them unchanged.
      const auto float_net = make_net(2);
      load_checkpoint(directory / "saved", *float_net, nullptr);
      expect_same_state(plain_state(*float_net), values, 0, "plain float");
      auto float_sharded = fully_shard(make_net(2), {.level = level});
      load_checkpoint(directory / "saved", float_sharded, nullptr);
      expect_same_state(float_sharded.full_state(), values, 0, "sharded float");
      auto again = fully_shard(make_net(2), {.level = level, .precision = bfloat});
      load_checkpoint(directory / "saved", again, nullptr);
      expect_same_state(again.full_state(), rounded(values, at::kBFloat16), 0, "bfloat16 in use");
      save_checkpoint(directory / "again", again, nullptr);
      load_checkpoint(directory / "again", *float_net, nullptr);
      expect_same_state(plain_state(*float_net), values, 0, "masters went through");
      for (const auto dtype : {at::kBFloat16, at::kHalf}) {
        const auto half_net = make_net(2, dtype);
        load_checkpoint(directory / "saved", *half_net, nullptr);
        expect_same_state(plain_state(*half_net), rounded(values, dtype), 0, "plain half");
      }
      const auto double_net = make_net(2, at::kDouble);
      expect_error([&] { load_checkpoint(directory / "saved", *double_net, nullptr); },
                   {"other dtypes", "F64"});
    });
  }
}

// A checkpoint of rounded frozen parameters has the rounded values, and loads in plans that keep
// all digits; back, those of their checkpoints are rounded. Trained ones keep their bits.
TEST_P(MasterCheckpoint, OfRoundedFrozenParametersHasTheRoundedValues) {
  const auto [ranks, whole] = GetParam();
  const ScratchDirectory directory;
  const auto frozen = [](uint64_t seed) {
    auto net = make_net(seed);
    net->head->weight.requires_grad_(false);
    return net;
  };
  auto values = plain_state(*make_net(1));
  for (NamedTensor& item : values)
    if (item.name == "head.weight") item.tensor = item.tensor.to(at::kBFloat16).to(at::kFloat);
  const Precision exact = {.param_dtype = at::kBFloat16};
  const Precision rounds = {.param_dtype = at::kBFloat16, .round_frozen = true};
  for (const auto level : {ShardLevel::kOptimizerState, ShardLevel::kParameters}) {
    run_world(ranks, [&, whole = whole](World&) {
      const auto save = [&](uint64_t seed, const Precision& precision, const char* name) {
        const auto net = frozen(seed);
        auto sharded = fully_shard(net, {.level = level, .precision = precision});
        if (seed != 1) load_checkpoint(directory / "exact", sharded, nullptr);
        save_checkpoint(directory / name, sharded, nullptr, {.whole_parameters = whole});
        net->head->weight.requires_grad_(true);  // thawed before the second
        save_checkpoint(directory / (name + std::string("-thawed")), sharded, nullptr);
      };
      save(1, exact, "exact");
      save(1, rounds, "rounded");
      save(2, rounds, "loaded");
    });
    run_world(2, [&](World&) {
      for (const char* name : {"rounded", "loaded", "rounded-thawed", "loaded-thawed"}) {
        const auto net = make_net(3);
        load_checkpoint(directory / name, *net, nullptr);
        expect_same_state(plain_state(*net), values, 0, name);
        auto again = fully_shard(frozen(3), {.level = level, .precision = exact});
        load_checkpoint(directory / name, again, nullptr);
        save_checkpoint(directory / "again", again, nullptr);
        load_checkpoint(directory / "again", *net, nullptr);
        expect_same_state(plain_state(*net), values, 0, name);
      }
    });
  }
}

// Parameters in use have the dtype of the masters, and other values.
TEST_P(MasterCheckpoint, OfRoundedGathersHasTheBitsOfTheMasters) {
  const auto [ranks, whole] = GetParam();
  const ScratchDirectory directory;
  for (const auto dtype : {at::kBFloat16, at::kChar}) {
    if (dtype == at::kChar && !tests_on_host()) continue;
    run_world(ranks, [&, whole = whole](World&) {
      const auto saved = fully_shard(make_net(1), {.precision = {.gather_dtype = dtype}});
      save_checkpoint(directory / "saved", saved, nullptr, {.whole_parameters = whole});
    });
    const auto net = make_net(2);
    load_checkpoint(directory / "saved", *net, nullptr);
    expect_same_state(plain_state(*net), plain_state(*make_net(1)), 0, "plain float");
  }
}

TEST(MasterCheckpoint, AScalerThatWasNotSavedIsMissed) {
  const ScratchDirectory directory;
  run_world(2, [&](World&) {
    auto sharded = fully_shard(make_net(1));
    GradScaler scaler({.init_scale = 8}), disabled({.enabled = false});
    save_checkpoint(directory / "without", sharded, nullptr);
    load_checkpoint(directory / "without", sharded, nullptr, {.scaler = &disabled});
    expect_error(
        [&] { load_checkpoint(directory / "without", sharded, nullptr, {.scaler = &scaler}); },
        {"scaler: the checkpoint was saved without one"});
    save_checkpoint(directory / "with", sharded, nullptr, {.scaler = &scaler});
    GradScaler other;
    load_checkpoint(directory / "with", sharded, nullptr, {.scaler = &other});
    EXPECT_EQ(other.get_scale(), 8);
  });
}

}  // namespace tessera::testing::master_test
