// A new `OSS` on the parameters of one that is destroyed, as in FairScale's own tests: parameters
// are released, and state is passed from one to the next.

#include "dialects/fairscale/tests/fairscale.h"
#include "engine/unit/unit_storage.h"

namespace tessera::testing::oss_again_test {

using torch::optim::OptimizerParamGroup;
using torch::optim::RMSprop;
using torch::optim::RMSpropOptions;

const SGDOptions kSgd = SGDOptions(0.1).momentum(0.9);

// Runs `f` on 1, 2 and 3 ranks, over messages and over shared memory.
void run_everywhere(const std::function<void(World&)>& f) {
  for (const int ranks : {1, 2, 3}) {
    for (const Transport transport : kTransports) run_over(transport, ranks, f);
  }
}

void expect_ordinary(const at::Tensor& param) {
  EXPECT_EQ(unit_of(param), nullptr);
  EXPECT_FALSE(param.key_set().has(kUnitKey));
  EXPECT_EQ(param.storage().nbytes(), param.nbytes());
  EXPECT_NE(param.data_ptr(), nullptr);
}

double momentum_of(const OptimizerStateDict& state, int64_t number = 0) {
  return state.state.at(number).at("momentum_buffer").toTensor().item<double>();
}

TEST(OssAgain, LoadsTheStateOfOneThatIsGone) {
  run_everywhere([](World&) {
    const at::Tensor x = leaf_of_ones(1);
    auto optimizer = std::make_unique<OSS<SGD>>(std::vector<at::Tensor>{x}, kSgd);
    x.backward();
    optimizer->step();
    EXPECT_FLOAT_EQ(x.item<float>(), 0.9f);
    optimizer->zero_grad();
    const OptimizerStateDict state = optimizer->state_dict(/*all_ranks=*/true);
    EXPECT_FLOAT_EQ(momentum_of(state), 1);
    // As in Python: the new one exists before the old one is destroyed.
    optimizer = std::make_unique<OSS<SGD>>(std::vector<at::Tensor>{x}, SGDOptions(0.01));
    optimizer->load_state_dict(state);
    EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), 0.1);
    x.backward();
    optimizer->step();
    EXPECT_FLOAT_EQ(x.item<float>(), 0.71f);
    EXPECT_FLOAT_EQ(momentum_of(optimizer->state_dict(true)), 1.9);
  });
}

// Returns the state as one rank has it, sent to all ranks.
OptimizerStateDict taken_from(AnyOss& optimizer, World& world, int rank) {
  optimizer.consolidate_state_dict(rank);
  std::string bytes;
  if (world.rank() == rank) {
    std::stringstream stream;
    torch::save(optimizer, stream);
    bytes = stream.str();
  }
  const auto all = all_gather_bytes(*world.process_group(), bytes, {"state", Channel::kControl});
  torch::serialize::InputArchive archive;
  std::istringstream stream(all[static_cast<size_t>(rank)]);
  archive.load_from(stream);
  return OptimizerStateDict::load(archive);
}

// A trunk and a head; the head's parameters are added as a group of their own.
struct Split {
  PlainNet net = make_net<PlainNet>();
  std::unique_ptr<AnyOss> optimizer;

  void renew(double lr, double momentum) {
    std::vector<at::Tensor> trunk = net->first->parameters();
    for (const at::Tensor& param : net->second->parameters()) trunk.push_back(param);
    const SGDOptions options = SGDOptions(lr).momentum(momentum);
    optimizer = std::make_unique<OSS<SGD>>(trunk, options);
    optimizer->add_param_group(OptimizerParamGroup(net->last->parameters()));
  }
};

TEST(OssAgain, StateOfOneRankGoesIntoNewOptimizers) {
  run_world(2, [](World& world) {
    Split untouched, renewed;
    untouched.renew(0.1, 0.99);
    renewed.renew(0.1, 0.99);
    int done = 0;
    const auto step = [&](const std::string& what) {
      for (Split* some : {&untouched, &renewed})
        step_alone(*some->net, *some->optimizer, *world.process_group(), done);
      ++done;
      expect_same_state(plain_state(*renewed.net), plain_state(*untouched.net), 0, what);
    };
    step("before");
    for (int round = 0; round < 2; ++round) {
      const OptimizerStateDict state = taken_from(*renewed.optimizer, world, 1);
      renewed.renew(1e6, 0.0001);
      renewed.optimizer->load_state_dict(state);
      expect_same_state(plain_state(*renewed.net), plain_state(*untouched.net), 0, "loaded");
      step("after");
      taken_from(*renewed.optimizer, world, 1);
      step("consolidated");
    }
    expect_replicas(world, *renewed.net);
  });
}

TEST(OssAgain, CollectedStateIsSteppedOn) {
  run_world(3, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    auto optimizer = std::make_unique<OSS<SGD>>(net->parameters(), SGDOptions(0.1).momentum(0.99));
    const auto closure = [&] {
      optimizer->zero_grad();
      const at::Tensor loss = loss_of(*net, 0, 0, 1);  // all ranks see the same rows
      loss.backward();
      return loss;
    };
    optimizer->step(closure);
    const OptimizerStateDict state = taken_from(*optimizer, world, 0);
    EXPECT_EQ(state.state.size(), net->parameters().size());
    optimizer->load_state_dict(state);
    optimizer->step(closure);
    const OptimizerStateDict own = optimizer->state_dict(/*all_ranks=*/true);
    optimizer = std::make_unique<OSS<SGD>>(net->parameters(), SGDOptions(7));
    optimizer->load_state_dict(own);
    optimizer->step(closure);
    expect_replicas(world, *net);
    PlainNet plain = make_net<PlainNet>();
    SGD alone(plain->parameters(), SGDOptions(0.1).momentum(0.99));
    for (int i = 0; i < 3; ++i) {
      alone.zero_grad();
      loss_of(*plain, 0, 0, 1).backward();
      alone.step();
    }
    expect_same_state(plain_state(*net), plain_state(*plain), 1e-6, "three steps");
  });
}

TEST(OssAgain, ParametersAreOrdinaryWhenTheLastOneIsGone) {
  run_everywhere([](World& world) {
    PlainNet net = make_net<PlainNet>();
    {
      OSS<SGD> optimizer(net->parameters(), kSgd);
      step_alone(*net, optimizer, *world.process_group(), 0);
    }
    const auto after = plain_state(*net);
    for (const at::Tensor& param : net->parameters()) {
      expect_ordinary(param);
      EXPECT_TRUE(param.grad().defined());  // the gradients were the user's
    }
    // One rank goes on alone, without any need of the others.
    if (world.rank() == world.size() - 1) {
      SGD plain(net->parameters(), SGDOptions(0.1));
      plain.step();
      net->zero_grad();
      loss_of(*net, 1, 0, 1).backward();
      plain.step();
      EXPECT_FALSE(same_values(net->first->weight, after[0].tensor));
    } else {
      expect_same_state(plain_state(*net), after, 0, "as after the last step");
    }
  });
}

TEST(OssAgain, TheModelIsOrdinaryWhenItsWrapperAndOptimizersAreGone) {
  run_everywhere([](World& world) {
    PlainNet net = make_net<PlainNet>();
    std::vector<NamedTensor> after;
    {
      OSS<SGD> a(net->first->parameters(), kSgd), b(net->last->parameters(), kSgd);
      auto model =
          std::make_unique<ShardedDataParallel<PlainNet>>(net, std::vector<AnyOss*>{&a, &b});
      for (int step = 0; step < 2; ++step) {
        a.zero_grad();
        b.zero_grad();
        loss_of(*model, step, world.rank(), world.size()).backward();
        a.step();
        b.step();
      }
      model.reset();
      EXPECT_NE(unit_of(net->first->weight), nullptr);  // the optimizers still exist
      after = plain_state(*net);
    }
    expect_same_state(plain_state(*net), after, 0, "as after the last step");
    for (const at::Tensor& param : net->parameters()) {
      expect_ordinary(param);
      EXPECT_NO_THROW((void)param.grad());
    }
    net->zero_grad();
    loss_of(*net, world.rank(), world.rank(), world.size()).backward();  // reduces nothing
    for (const at::Tensor& param : net->parameters()) EXPECT_TRUE(param.grad().defined());
  });
}

// After operators have written to parameters, these are whole again only after a collective.
TEST(OssAgain, ParametersThatWereWrittenToAreTakenOver) {
  run_everywhere([](World& world) {
    PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
    const auto set = [](PlainNet& some) {
      torch::NoGradGuard no_grad;
      for (const at::Tensor& param : some->parameters()) param.fill_(0.01 * param.numel());
    };
    auto optimizer = std::make_unique<OSS<SGD>>(net->parameters(), kSgd);
    step_alone(*net, *optimizer, *world.process_group(), 0);
    set(net);
    optimizer = std::make_unique<OSS<SGD>>(net->parameters(), kSgd);
    step_alone(*net, *optimizer, *world.process_group(), 1);
    set(plain);
    SGD alone(plain->parameters(), kSgd);
    train_plain(*plain, alone, world.size(), 1, 2);
    expect_same_state(plain_state(*net), plain_state(*plain), 1e-6, "from what was written");
    expect_replicas(world, *net);
  });
}

TEST(OssAgain, AnOptimizerServesAWrapperAfterAnother) {
  run_everywhere([](World& world) {
    PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    for (int round = 0; round < 2; ++round) {
      ShardedDataParallel<PlainNet> model(net, optimizer);
      loss_of(model, round, world.rank(), world.size()).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    SGD alone(plain->parameters(), kSgd);
    const auto expected = train_in_one(plain, alone, world.size(), 2);
    expect_same_state(plain_state(*net), expected, 2e-6, "two wrappers");
    expect_replicas(world, *net);
  });
}

TEST(OssAgain, OneThatLivesKeepsItsParameters) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> first(net->parameters(), kSgd), second(net->parameters(), kSgd);
    step_alone(*net, first, *world.process_group(), 0);
    expect_error([&] { second.step(); }, {"is sharded already"});
    step_alone(*net, first, *world.process_group(), 1);
    expect_replicas(world, *net);
  });
}

TEST(OssAgain, WithoutItsOptimizersAWrapperConvertsNothing) {
  run_world(2, [](World&) {
    PlainNet net = make_net<PlainNet>();
    auto optimizer = std::make_unique<OSS<SGD>>(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, *optimizer);
    optimizer.reset();
    expect_error([&] { model.to(at::kDouble); }, {"no optimizer any more"});
  });
}

// A graph keeps the values that the parameters had when it was made.
TEST(OssAgain, AGraphFromBeforeIsRight) {
  run_everywhere([](World& world) {
    PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
    at::Tensor loss;
    {
      OSS<SGD> optimizer(net->parameters(), kSgd);
      for (const at::Tensor& param : net->parameters())
        param.mutable_grad() = torch::zeros_like(param);
      optimizer.step();
      loss = loss_of(*net, 0, world.rank(), world.size());
      optimizer.zero_grad();
    }
    loss.backward();
    loss_of(*plain, 0, world.rank(), world.size()).backward();
    const auto expected = plain->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(torch::allclose(item.value().grad(), expected[item.key()].grad())) << item.key();
  });
}

// Takes five steps, rewinds to the state before them, and expects the same losses again.
template <class Load>
void expect_repeated_losses(World& world, const OssOptions& options, bool by_itself, Load&& load) {
  PlainNet net = make_net<PlainNet>();
  OSS<RMSprop> optimizer(net->parameters(), RMSpropOptions(0.01), options);
  std::optional<ShardedDataParallel<PlainNet>> model;
  if (!by_itself) model.emplace(net, optimizer);
  const auto step = [&] {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(*net, 0, world.rank(), world.size());
    loss.backward();
    if (by_itself) average_gradients(*world.process_group(), net->parameters());
    optimizer.step();
    return loss.item<double>();
  };
  for (int i = 0; i < 3; ++i) step();
  const OptimizerStateDict state = optimizer.state_dict(/*all_ranks=*/true);
  std::vector<at::Tensor> values;
  for (const at::Tensor& param : net->parameters()) values.push_back(param.detach().clone());
  std::vector<double> losses;
  for (int i = 0; i < 5; ++i) losses.push_back(step());
  load(optimizer, state, [&] {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < values.size(); ++i) net->parameters()[i].copy_(values[i]);
  });
  for (int i = 0; i < 5; ++i) EXPECT_EQ(step(), losses[static_cast<size_t>(i)]) << "step " << i;
  expect_replicas(world, *net);
}

TEST(OssAgain, RewoundStateRepeatsItsLosses) {
  const auto model_first = [](AnyOss& optimizer, const OptimizerStateDict& state, auto&& load) {
    load();
    optimizer.load_state_dict(state);
  };
  const auto optimizer_first = [](AnyOss& optimizer, const OptimizerStateDict& state, auto&& load) {
    optimizer.load_state_dict(state);
    load();
  };
  const auto through_a_file = [](AnyOss& optimizer, const OptimizerStateDict& state, auto&& load) {
    optimizer.load_state_dict(state);
    load();
    optimizer.consolidate_state_dict(-1);
    std::stringstream file;
    torch::save(optimizer, file);
    torch::load(optimizer, file);
  };
  run_everywhere([&](World& world) {
    for (const bool half : {false, true}) {
      for (const bool by_itself : {false, true}) {
        const OssOptions options{.broadcast_fp16 = half};
        expect_repeated_losses(world, options, by_itself, model_first);
        expect_repeated_losses(world, options, by_itself, optimizer_first);
        expect_repeated_losses(world, options, by_itself, through_a_file);
      }
    }
  });
}

// State saved before master weights were part of it, or by a plain optimizer.
TEST(OssAgain, StateWithoutMasterWeightsIsLoaded) {
  run_world(2, [](World& world) {
    const OssOptions options{.broadcast_fp16 = true};
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd, options);
    step_alone(*net, optimizer, *world.process_group(), 0);
    OptimizerStateDict state = optimizer.state_dict(true);
    EXPECT_TRUE(state.extra.contains("master_weights"));
    const auto before = plain_state(*net);
    state.extra.clear();
    optimizer.load_state_dict(state);
    expect_same_state(plain_state(*net), before, 0, "parameters stay");
    step_alone(*net, optimizer, *world.process_group(), 1);
    expect_replicas(world, *net);
    // A plain optimizer loads state that has master weights.
    PlainNet plain = make_net<PlainNet>();
    SGD alone(plain->parameters(), kSgd);
    optimizer.consolidate_state_dict(-1);
    std::stringstream file;
    torch::save(optimizer, file);
    torch::load(alone, file);
    EXPECT_EQ(alone.state().size(), plain->parameters().size());
  });
}

TEST(OssAgain, MasterWeightsChangeNoParameter) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd, {.broadcast_fp16 = true});
    step_alone(*net, optimizer, *world.process_group(), 0);
    OptimizerStateDict state = optimizer.state_dict(true);
    {
      torch::NoGradGuard no_grad;
      for (const at::Tensor& param : net->parameters()) param.add_(0.25);
    }
    const auto other = plain_state(*net);
    optimizer.load_state_dict(state);
    expect_same_state(plain_state(*net), other, 0, "the user's values count");
    auto masters = state.extra.at("master_weights").toGenericDict().copy();
    masters.insert_or_assign("0", torch::zeros({2, 2}));
    state.extra["master_weights"] = masters;
    expect_error([&] { optimizer.load_state_dict(state); },
                 {"master weights must have", "[11, 6]", "[2, 2]"});
    step_alone(*net, optimizer, *world.process_group(), 1);
    expect_replicas(world, *net);
  });
}

TEST(OssUnwrap, ByItselfItsParametersAreOrdinaryUntilItsNextCall) {
  run_everywhere([](World& world) {
    for (const bool half : {false, true}) {
      PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
      OSS<SGD> optimizer(net->parameters(), kSgd, {.broadcast_fp16 = half});
      optimizer.unwrap();  // nothing to do
      step_alone(*net, optimizer, *world.process_group(), 0);
      const auto before = plain_state(*net);
      optimizer.unwrap();
      expect_same_state(plain_state(*net), before, 0, "what all ranks use");
      for (const at::Tensor& param : net->parameters()) expect_ordinary(param);
      step_alone(*net, optimizer, *world.process_group(), 1);
      EXPECT_EQ(unit_of(net->first->weight) != nullptr, true);
      SGD alone(plain->parameters(), kSgd);
      expect_same_state(plain_state(*net), train_in_one(plain, alone, world.size(), 2),
                        half ? 2e-3 : 2e-6, "with its momentum");
      expect_replicas(world, *net);
    }
  });
}

TEST(OssUnwrap, TheModelIsOrdinaryAndItsOptimizersGoOn) {
  run_everywhere([](World& world) {
    PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
    OSS<SGD> a(net->first->parameters(), kSgd), b(net->last->parameters(), kSgd);
    {
      ShardedDataParallel<PlainNet> model(net, {&a, &b});
      expect_error([&] { a.unwrap(); }, {"call unwrap() of that"});
      loss_of(model, 0, world.rank(), world.size()).backward();
      a.step();
      b.step();
      {
        const auto guard = model.no_sync();
        expect_error([&] { model.unwrap(); }, {"no_sync()"});
      }
      const auto before = plain_state(*net);
      model.unwrap();
      expect_same_state(plain_state(*net), before, 0, "what all ranks use");
      for (const at::Tensor& param : net->parameters()) {
        expect_ordinary(param);
        EXPECT_NO_THROW((void)param.grad());
      }
      expect_error([&] { model.forward(batch_of(0).x); }, {"was unwrapped"});
      expect_error([&] { model.unwrap(); }, {"was unwrapped"});
    }
    // The optimizers by themselves, each with its state.
    net->zero_grad();
    loss_of(*net, 1, world.rank(), world.size()).backward();
    average_gradients(*world.process_group(), net->parameters());
    a.step();
    b.step();
    std::vector<at::Tensor> trained = plain->first->parameters();
    for (const at::Tensor& param : plain->last->parameters()) trained.push_back(param);
    SGD alone(trained, kSgd);
    expect_same_state(plain_state(*net), train_in_one(plain, alone, world.size(), 2), 2e-6,
                      "two steps");
    expect_replicas(world, *net);
  });
}

}  // namespace tessera::testing::oss_again_test
