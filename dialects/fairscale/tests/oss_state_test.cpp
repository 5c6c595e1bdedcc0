// The state of `OSS`: gathered, saved, loaded, and kept when groups are added, by the ids of its
// behaviours.

#include "dialects/fairscale/tests/fairscale.h"
#include "engine/tests/optim/saved_optimizers.h"

namespace tessera::testing::oss_state_test {

const SGDOptions kSgd = SGDOptions(0.1).momentum(0.9);

// The parameters of a net in two interleaved groups, with options of their own.
template <class Options>
std::vector<OptimizerParamGroup> interleaved(const PlainNet& net, double lr) {
  std::vector<at::Tensor> even, odd;
  for (const at::Tensor& param : net->parameters())
    (even.size() > odd.size() ? odd : even).push_back(param);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(odd, std::make_unique<Options>(lr));
  groups.emplace_back(even, std::make_unique<Options>(lr / 2));
  return groups;
}

// A rank that reads another device would wait for the work queued there, and that may wait for the
// rank.
OptimizerStateDict on_host(OptimizerStateDict dict) {
  for (auto& [number, values] : dict.state) {
    for (auto& [name, value] : values)
      if (value.isTensor()) value = value.toTensor().cpu();
  }
  return dict;
}

// A net with these values.
PlainNet net_with(const std::vector<NamedTensor>& values) {
  PlainNet net = make_net<PlainNet>(9);
  for (size_t i = 0; i < values.size(); ++i) net->parameters()[i].data().copy_(values[i].tensor);
  return net;
}

TEST(Oss, FS_49_StateIsGatheredWhereItIsAskedFor) {
  run_world(3, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    const std::vector<std::string> message = {"must be gathered", "consolidate_state_dict()"};
    expect_error([&] { optimizer.state_dict(); }, message);
    std::stringstream file;
    expect_error([&] { torch::save(optimizer, file); }, message);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    for (const int recipient : {0, 1, -1}) {
      train_sharded(model, optimizer, world, 0, 1);
      expect_error([&] { optimizer.state_dict(); }, message);  // older than the last step
      optimizer.consolidate_state_dict(recipient);
      if (recipient != -1 && recipient != world.rank()) {
        expect_error([&] { optimizer.state_dict(); }, message);
        continue;
      }
      const OptimizerStateDict state = optimizer.state_dict();
      EXPECT_EQ(state.state.size(), 6u);
      for (const auto& [number, values] : state.state)
        EXPECT_TRUE(values.at("momentum_buffer").toTensor().device().is_cpu());
    }
    train_sharded(model, optimizer, world, 0, 1);
    EXPECT_EQ(optimizer.state_dict(/*all_ranks=*/true).state.size(), 6u);
    EXPECT_EQ(optimizer.state_dict().state.size(), 6u);
    // It is a copy: later steps leave it alone.
    const OptimizerStateDict state = optimizer.state_dict(), copy = copy_of(state);
    train_sharded(model, optimizer, world, 1, 2);
    expect_same_dict(state, copy, 0, "kept");
    expect_error([&] { optimizer.consolidate_state_dict(3); }, {"expected -1 to 2, got 3"});
    expect_error([&] { optimizer.consolidate_state_dict(world.rank()); },
                 {"must be the same on all ranks"});
  });
}

// Trains, saves and loads both ways, and trains on.
template <class Optimizer, class Options, class Params>
void expect_plain_layout(const std::string& what, const Params& params_of, const Options& options) {
  for (const int ranks : {2, 3}) {
    PlainNet plain = make_net<PlainNet>();
    Optimizer alone(params_of(plain), options);
    train_plain(*plain, alone, ranks, 0, 3);
    std::stringstream plain_file;
    torch::save(alone, plain_file);
    const OptimizerStateDict expected = on_host(state_dict_of(alone));
    const auto weights = plain_state(*plain);
    train_plain(*plain, alone, ranks, 3, 5);
    const auto ends = plain_state(*plain);
    run_world(ranks, [&](World& world) {
      PlainNet net = make_net<PlainNet>();
      OSS<Optimizer> optimizer(params_of(net), options);
      ShardedDataParallel<PlainNet> model(net, optimizer);
      train_sharded(model, optimizer, world, 0, 3);
      expect_same_dict(optimizer.state_dict(true), expected, 1e-5, what);
      std::stringstream file;
      torch::save(optimizer, file);

      // The plain optimizer goes on from the sharded one's saved state.
      PlainNet other = net_with(plain_state(*net));
      Optimizer loaded(params_of(other), options);
      torch::load(loaded, file, test_device());  // what is saved is in host memory
      train_plain(*other, loaded, ranks, 3, 5);
      expect_same_state(plain_state(*other), ends, 1e-5, what + ", plain");

      // And the sharded optimizer from the plain one's.
      PlainNet third = net_with(weights);
      OSS<Optimizer> again(params_of(third), options);
      std::stringstream copy(plain_file.str());
      torch::load(again, copy);
      ShardedDataParallel<PlainNet> third_model(third, again);
      train_sharded(third_model, again, world, 3, 5);
      expect_same_state(plain_state(*third), ends, 1e-5, what + ", sharded");
      expect_replicas(world, *third);
    });
  }
}

TEST(Oss, FS_50_TheLayoutIsThatOfThePlainOptimizer) {
  const auto all = [](const PlainNet& net) { return net->parameters(); };
  expect_plain_layout<SGD>("SGD", all, kSgd);
  expect_plain_layout<HeavyBall>("HeavyBall", all, HeavyBallOptions(0.1));
  expect_plain_layout<AdamW>(
      "AdamW in groups", [](const PlainNet& net) { return interleaved<AdamWOptions>(net, 0.02); },
      AdamWOptions(0.01).eps(1e-4));
  expect_plain_layout<RMSprop>(
      "RMSprop in groups",
      [](const PlainNet& net) { return interleaved<RMSpropOptions>(net, 0.004); },
      RMSpropOptions(0.01).momentum(0.5).eps(1e-4));
}

TEST(Oss, FS_51_StateLoadsAtAnyNumberOfRanks) {
  const auto options = AdamWOptions(0.02).eps(1e-4).amsgrad(true);
  OptimizerStateDict saved;
  std::vector<NamedTensor> weights;
  run_world(3, [&](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<AdamW> optimizer(net->parameters(), options);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    train_sharded(model, optimizer, world, 0, 3);
    const auto state = optimizer.state_dict(true);
    if (world.rank() == 1) saved = state;
    if (world.rank() == 0) weights = plain_state(*net);
  });
  for (const int ranks : {1, 2, 4}) {
    PlainNet plain = net_with(weights);
    AdamW alone(plain->parameters(), AdamWOptions(0.5));
    load_state_dict(alone, saved);
    train_plain(*plain, alone, ranks, 3, 6);
    const OptimizerStateDict before = copy_of(saved);
    const auto expected = plain_state(*plain);
    run_world(ranks, [&](World& world) {
      PlainNet net = net_with(weights);
      OSS<AdamW> optimizer(net->parameters(), AdamWOptions(0.5));
      const auto& held = static_cast<AdamWOptions&>(optimizer.param_groups()[0].options());
      optimizer.load_state_dict(saved);
      EXPECT_EQ(held.lr(), 0.02);  // options come with the state
      expect_error([&] { optimizer.state_dict(); }, {"must be gathered"});
      expect_same_dict(optimizer.state_dict(true), saved, 0, "at once");
      ShardedDataParallel<PlainNet> model(net, optimizer);
      train_sharded(model, optimizer, world, 3, 6);
      expect_same_state(plain_state(*net), expected, 1e-5, std::to_string(ranks));
      expect_replicas(world, *net);
    });
    expect_same_dict(saved, before, 0, "the argument");
  }
}

TEST(Oss, FS_51_StateThatDoesNotFitChangesNothing) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd), half(net->first->parameters(), kSgd);
    step_alone(*net, optimizer, *world.process_group(), 0);
    const OptimizerStateDict state = optimizer.state_dict(true);
    OptimizerStateDict other = copy_of(state);
    other.param_groups[0].params.pop_back();
    EXPECT_THROW(optimizer.load_state_dict(other), c10::ValueError);
    other = copy_of(state);
    other.state.at(0)["momentum_buffer"] = torch::zeros({2, 2});
    EXPECT_THROW(optimizer.load_state_dict(other), c10::ValueError);
    if (world.rank() == 1) other.state.clear();
    EXPECT_THROW(optimizer.load_state_dict(other), c10::ValueError);
    expect_same_dict(optimizer.state_dict(true), state, 0, "as before");
  });
}

enum class When { kBeforeStep, kAfterStep, kBeforeModel };

OptimizerParamGroup last_of(const PlainNet& net) {
  return OptimizerParamGroup(net->last->parameters(),
                             std::make_unique<AdamWOptions>(AdamWOptions(0.03).eps(1e-4)));
}

std::vector<at::Tensor> first_of(const PlainNet& net) {
  std::vector<at::Tensor> params = net->first->parameters();
  for (const at::Tensor& param : net->second->parameters()) params.push_back(param);
  return params;
}

// Adds the last layer as a group of its own, before or after the first steps and the model.
void expect_added(int ranks, When when, bool by_itself) {
  const auto options = AdamWOptions(0.01).eps(1e-4);
  const int added_at = when == When::kAfterStep ? 2 : 0;
  PlainNet plain = make_net<PlainNet>();
  AdamW alone(first_of(plain), options);
  train_plain(*plain, alone, ranks, 0, added_at);
  alone.add_param_group(last_of(plain));
  train_plain(*plain, alone, ranks, added_at, 5);
  const OptimizerStateDict state = on_host(state_dict_of(alone));
  const auto expected = plain_state(*plain);
  const std::string what = std::to_string(ranks) + " ranks, when " + std::to_string(int(when)) +
                           (by_itself ? ", by itself" : "");
  run_world(ranks, [&](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<AdamW> optimizer(first_of(net), options);
    std::optional<ShardedDataParallel<PlainNet>> model;
    if (when == When::kBeforeModel) optimizer.add_param_group(last_of(net));
    if (!by_itself) model.emplace(net, optimizer);
    for (int step = 0; step < 5; ++step) {
      if (step == added_at && when != When::kBeforeModel) optimizer.add_param_group(last_of(net));
      optimizer.zero_grad();
      if (by_itself) net->zero_grad();
      loss_of(*net, step, world.rank(), ranks).backward();
      if (by_itself) average_gradients(*world.process_group(), net->parameters());
      optimizer.step();
    }
    expect_same_state(plain_state(*net), expected, 1e-5, what);
    expect_same_dict(optimizer.state_dict(true), state, 1e-4, what);
    expect_replicas(world, *net);
    optimizer.zero_grad();
    EXPECT_FALSE(by_itself ? net->last->bias.grad().defined()
                           : model->full_grad(net->last->bias).defined());
  });
}

TEST(Oss, FS_52_GroupsAreAddedAtAnyTime) {
  for (const int ranks : {2, 3}) {
    for (const When when : {When::kBeforeStep, When::kAfterStep, When::kBeforeModel}) {
      expect_added(ranks, when, /*by_itself=*/false);
      expect_added(ranks, when, /*by_itself=*/true);
    }
  }
}

TEST(Oss, FS_52_SteppedByItselfThenGivenToAModel) {
  PlainNet plain = make_net<PlainNet>();
  SGD alone(plain->parameters(), kSgd);
  train_plain(*plain, alone, 2, 0, 4);
  const auto expected = plain_state(*plain);
  const OptimizerStateDict state = on_host(state_dict_of(alone));
  run_world(2, [&](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    for (int step = 0; step < 2; ++step) step_alone(*net, optimizer, *world.process_group(), step);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    train_sharded(model, optimizer, world, 2, 4);
    expect_same_state(plain_state(*net), expected, 1e-6, "with its momentum");
    expect_same_dict(optimizer.state_dict(true), state, 1e-5, "with its momentum");
  });
}

// Gradients are the user's, who need not compute them again.
TEST(Oss, FS_52_GradientsOfAnOssByItselfStay) {
  run_world(2, [](World& world) {
    const at::Tensor x = leaf_of_ones(1);
    const at::Tensor y = leaf_of_ones(1);
    OSS<SGD> optimizer({x}, SGDOptions(0.25));
    x.backward();
    optimizer.step();
    optimizer.add_param_group(OptimizerParamGroup({y}));
    y.backward();
    optimizer.step();
    EXPECT_EQ(x.item<float>(), 0.5);
    EXPECT_EQ(y.item<float>(), 0.75);
    expect_replicas(*world.process_group(), {x, y});
  });
}

TEST(Oss, FS_52_GroupsThatCannotBeAddedChangeNothing) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    const OptimizerParamGroup foreign({leaf_of_ones(3)});
    {
      const auto guard = model.no_sync();
      expect_error([&] { optimizer.add_param_group(foreign); }, {"no_sync()"});
    }
    EXPECT_EQ(optimizer.param_groups().size(), 1u);
    EXPECT_THROW(optimizer.add_param_group(OptimizerParamGroup({net->first->weight})), c10::Error);
    EXPECT_EQ(optimizer.param_groups().size(), 1u);
    expect_error([&] { optimizer.add_param_group(foreign); }, {"must be the model's", "[3]"});
    EXPECT_EQ(optimizer.param_groups().size(), 1u);
    train_sharded(model, optimizer, world, 0, 2);
    expect_replicas(world, *net);
  });
}

}  // namespace tessera::testing::oss_state_test
