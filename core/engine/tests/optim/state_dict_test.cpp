// The state of optimizers that are not sharded, and the files that hold it.
#include <sstream>

#include "engine/optim/state_shape.h"
#include "engine/tests/optim/saved_optimizers.h"

namespace tessera::testing::state_dict_test {

TEST(OptimizerStateDict, OfOneOptimizerLetsAnotherTrainOnToTheSameBits) {
  for (const auto& [name, make] : all_optimizers()) {
    Plain first(make), second(make);
    train(*first.net, *first.optimizer, 1, 0, 3);
    const OptimizerStateDict dict = state_dict_of(*first.optimizer);
    {
      torch::NoGradGuard no_grad;
      const auto from = first.net->parameters(), to = second.net->parameters();
      for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
    }
    auto* const options = &second.optimizer->param_groups()[0].options();
    const OptimizerStateDict before = copy_of(dict);
    load_state_dict(*second.optimizer, dict);
    EXPECT_EQ(&second.optimizer->param_groups()[0].options(), options) << name;
    expect_same_dict(state_dict_of(*second.optimizer), dict, 0, name);
    train(*first.net, *first.optimizer, 1, 3, 6);
    train(*second.net, *second.optimizer, 1, 3, 6);
    expect_same_state(plain_state(*second.net), plain_state(*first.net), 0, name);
    expect_same_dict(dict, before, 0, name + ", the argument");
  }
}

TEST(OptimizerStateDict, OfANumberIsOnItsDevice) {
  const at::Tensor number = on_test_device(torch::ones({})).requires_grad_();
  torch::optim::Adagrad first({number}), second({number});
  for (auto* optimizer : {&first, &second}) {
    number.mutable_grad() = torch::ones_like(number);
    optimizer->step();
    if (optimizer == &first) load_state_dict(second, state_dict_of(first));
  }
  const auto sum = state_dict_of(second).state.at(0).at("sum").toTensor();
  EXPECT_EQ(sum.item<float>(), 2);
}

TEST(OptimizerStateDict, HasTheWordsOfLibTorch) {
  Plain plain(make_groups);
  train(*plain.net, *plain.optimizer, 1, 0, 2);
  const OptimizerStateDict dict = state_dict_of(*plain.optimizer);
  ASSERT_EQ(dict.param_groups.size(), 2u);
  EXPECT_EQ(dict.param_groups[0].params, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(dict.param_groups[1].params, (std::vector<int64_t>{5, 6, 7}));
  EXPECT_EQ(dict.param_groups[0].options.at("lr").toDouble(), 3e-2);
  EXPECT_EQ(dict.param_groups[1].options.at("amsgrad").toBool(), true);
  ASSERT_EQ(dict.state.size(), 8u);
  EXPECT_EQ(dict.state.at(5).at("step").toInt(), 2);
  EXPECT_EQ(dict.state.at(5).at("exp_avg").toTensor().sizes(),
            (at::IntArrayRef{kMlpWidth, kMlpWidth}));
  EXPECT_TRUE(dict.state.at(5).contains("max_exp_avg_sq"));
  EXPECT_FALSE(dict.state.at(0).contains("max_exp_avg_sq"));
}

TEST(OptimizerStateDict, ReadsAndWritesTheFilesOfLibTorch) {
  for (const auto& [name, make] : all_optimizers()) {
    Plain plain(make), other(make);
    train(*plain.net, *plain.optimizer, 1, 0, 3);
    const OptimizerStateDict dict = state_dict_of(*plain.optimizer);
    std::stringstream from_torch, from_dict;
    torch::save(*plain.optimizer, from_torch);
    torch::serialize::InputArchive input;
    input.load_from(from_torch);
    expect_same_dict(OptimizerStateDict::load(input), dict, 0, name + ", read");
    torch::serialize::OutputArchive output;
    dict.save(output);
    output.save_to(from_dict);
    torch::load(*other.optimizer, from_dict);
    expect_same_dict(state_dict_of(*other.optimizer), dict, 0, name + ", written");
  }
}

TEST(OptimizerStateDict, OfLbfgsKeepsListsAndNothings) {
  const MakeOptimizer make = [](Net& net) -> std::unique_ptr<Optimizer> {
    return std::make_unique<LBFGS>(net.parameters(), LBFGSOptions(0.1).max_iter(3).history_size(2));
  };
  const auto run = [](Plain& plain, int first, int last) {
    for (int step = first; step < last; ++step) {
      plain.optimizer->step([&] {
        plain.optimizer->zero_grad();
        auto loss = rank_loss(*plain.net, global_batch(step, 12, kMlpWidth, kMlpOut), 0, 1, step);
        loss.backward();
        return loss;
      });
    }
  };
  Plain first(make), second(make);
  run(first, 0, 3);
  run(second, 0, 1);
  const OptimizerStateDict dict = state_dict_of(*first.optimizer);
  load_state_dict(*second.optimizer, dict);
  {
    torch::NoGradGuard no_grad;
    const auto from = first.net->parameters(), to = second.net->parameters();
    for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  }
  run(first, 3, 5);
  run(second, 3, 5);
  expect_same_state(plain_state(*second.net), plain_state(*first.net), 0, "LBFGS");
}

TEST(OptimizerStateDict, AParameterThatIsListedTwiceHasOneNumber) {
  const MakeOptimizer make = [](Net& net) -> std::unique_ptr<Optimizer> {
    auto params = net.parameters();
    params.insert(params.begin() + 2, params[0]);
    return std::make_unique<Adam>(params, AdamOptions(1e-2));
  };
  Plain twice(make), once(all_optimizers()[1].make), again(make);
  train(*once.net, *once.optimizer, 1, 0, 2);
  OptimizerStateDict dict = state_dict_of(*once.optimizer);
  load_state_dict(*twice.optimizer, dict);
  train(*twice.net, *twice.optimizer, 1, 0, 1);
  dict = state_dict_of(*twice.optimizer);
  EXPECT_EQ(dict.param_groups[0].params, (std::vector<int64_t>{0, 1, 0, 2, 3, 4, 5, 6, 7}));
  load_state_dict(*again.optimizer, dict);
  expect_same_dict(state_dict_of(*again.optimizer), dict, 0, "listed twice");
  load_state_dict(*once.optimizer, dict);
  EXPECT_EQ(state_dict_of(*once.optimizer).state.size(), 8u);
}

TEST(OptimizerStateDict, StateThatIsNotInItIsDropped) {
  Plain plain(all_optimizers()[0].make), fresh(all_optimizers()[0].make);
  train(*plain.net, *plain.optimizer, 1, 0, 2);
  OptimizerStateDict dict = state_dict_of(*plain.optimizer);
  dict.state.erase(3);
  load_state_dict(*plain.optimizer, dict);
  expect_same_dict(state_dict_of(*plain.optimizer), dict, 0, "without one");
  load_state_dict(*plain.optimizer, state_dict_of(*fresh.optimizer));
  EXPECT_TRUE(plain.optimizer->state().empty());
}

struct WithoutLoad : Adam {
  using Adam::Adam;
  void load(torch::serialize::InputArchive& archive) override { Optimizer::load(archive); }
};

TEST(RefusedOptimizerStateDict, AClassThatSavesOrLoadsNothingIsToldWhatToOverride) {
  Plain plain([](Net& net) { return std::make_unique<WithoutSave>(net.parameters(), 0.1); });
  const OptimizerStateDict dict = state_dict_of(SGD(plain.net->parameters(), 0.1));
  EXPECT_THROW(state_dict_of(*plain.optimizer), c10::NotImplementedError);
  EXPECT_THROW(load_state_dict(*plain.optimizer, dict), c10::NotImplementedError);
  expect_error([&] { state_dict_of(*plain.optimizer); },
               {"[state_dict_of]", "override save() and load()"});
  Plain adam(all_optimizers()[1].make);
  train(*adam.net, *adam.optimizer, 1, 0, 1);
  WithoutLoad without(adam.net->parameters(), 0.1);
  expect_error([&] { load_state_dict(without, state_dict_of(*adam.optimizer)); },
               {"[load_state_dict]", "override load()"});
}

TEST(RefusedOptimizerStateDict, NothingIsChangedByOneThatDoesNotFit) {
  Plain plain(make_groups);
  train(*plain.net, *plain.optimizer, 1, 0, 2);
  const OptimizerStateDict dict = state_dict_of(*plain.optimizer);
  const auto expect_refused = [&](const OptimizerStateDict& wrong,
                                  const std::vector<std::string>& parts) {
    expect_error([&] { load_state_dict(*plain.optimizer, wrong); }, parts);
    expect_same_dict(state_dict_of(*plain.optimizer), dict, 0, parts.back());
  };
  OptimizerStateDict wrong = dict;
  wrong.param_groups.pop_back();
  expect_refused(wrong, {"[load_state_dict]", "param groups; expected 2, got 1"});
  wrong = dict;
  wrong.param_groups[1].params.pop_back();
  expect_refused(wrong, {"expected 3 in param group 1, got 2"});
  // Detected by LibTorch's own load(), after the state has been taken out.
  wrong = dict;
  wrong.param_groups[0].options["lr"] = 7.0;
  wrong.param_groups[1].options["lr"] = "fast";
  expect_refused(wrong, {"expected double"});
}

TEST(RefusedOptimizerStateDict, AFileOfAModuleIsNone) {
  std::stringstream file;
  torch::save(make_saved_mlp(), file);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  EXPECT_THROW(OptimizerStateDict::load(archive), c10::ValueError);
}

TEST(RefusedOptimizerStateDict, DistTensorsAreLeftToDistOptimizer) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const auto param = distribute(torch::ones({4, 4}), mesh, {Shard{0}});
    SGD optimizer({param}, 0.1);
    EXPECT_THROW(state_dict_of(optimizer), c10::NotImplementedError);
    expect_error([&] { state_dict_of(optimizer); }, {"DistOptimizer::state_dict()"});
  });
}

TEST(OptimizerStateShapes, AValueForEachRowOrOneShapeForAllFits) {
  const auto check = [](const std::vector<std::vector<int64_t>>& params,
                        const std::vector<std::vector<int64_t>>& state) {
    std::vector<Values> values;
    for (const auto& sizes : state) values.push_back({{"value", torch::zeros(sizes)}});
    std::vector<ParamValues> items;
    for (size_t i = 0; i < params.size(); ++i)
      items.push_back({fmt::format("p{}", i), params[i], values[i]});
    check_shapes(items, "check");
  };
  check({{4, 3}, {5}}, {{4, 3}, {5}});       // each element
  check({{4, 3}, {5, 2}}, {{4}, {5}});       // each row
  check({{4, 3}, {5, 2}}, {{2}, {2}});       // the same for all
  check({{4, 3}, {5}, {1}}, {{1}, {}, {}});  // counts
  expect_error([&] { check({{4, 3}, {5}}, {{4, 3}, {1}}); }, {"'value' of 'p1'", "[5]", "[1]"});
  expect_error([&] { check({{4, 3}, {5}}, {{3, 4}, {5}}); }, {"'value' of 'p0'"});
  expect_error([&] { check({{4, 3}, {5}}, {{6, 3}, {7}}); }, {"'value' of 'p0'"});
  expect_error([&] { check({{4, 3}}, {{2}}); }, {"'value' of 'p0'", "[4, 3]", "[2]"});
}

}  // namespace tessera::testing::state_dict_test
