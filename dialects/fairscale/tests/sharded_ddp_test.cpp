// `ShardedDataParallel`, by the ids of its behaviours.

#include <tessera/comm/process_group_decorators.h>

#include "dialects/fairscale/tests/fairscale.h"

namespace tessera::testing::sharded_ddp_test {

const SGDOptions kSgd = SGDOptions(0.1).momentum(0.9);

// Expects the result of one process with the same batches, on 2, 3 and 4 ranks.
template <class Net>
void expect_parity_of(const ShardedDataParallelOptions& options, double tolerance = -1) {
  for (const int ranks : {2, 3, 4}) {
    Net plain = make_net<Net>();
    SGD alone(plain->parameters(), kSgd);
    const auto expected = train_in_one(plain, alone, ranks);
    run_world(ranks, [&](World& world) {
      Net net = make_net<Net>(3 + world.rank());  // rank 0's values count
      OSS<SGD> optimizer(net->parameters(), kSgd);
      ShardedDataParallel<Net> model(net, optimizer, options);
      expect_same_state(train(model, optimizer, world), expected, tolerance < 0 ? 2e-6 : tolerance,
                        std::to_string(ranks) + " ranks");
      expect_replicas(world, *net);
    });
  }
}

TEST(ShardedDdp, FS_01_TakesRankZerosParametersAndBuffersAtStart) {
  run_world(3, [](World& world) {
    for (const bool sync : {true, false}) {
      NormNet net = make_net<NormNet>(3 + world.rank());
      net->norm->running_mean.fill_(world.rank());
      net->norm->num_batches_tracked.fill_(5 + world.rank());
      const at::Tensor own = net->first->weight.detach().clone();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      ShardedDataParallel<NormNet> model(
          net, optimizer, {.broadcast_buffers = false, .sync_models_at_startup = sync});
      NormNet first = make_net<NormNet>(3);
      EXPECT_EQ(torch::equal(net->first->weight, first->first->weight), sync || world.rank() == 0);
      EXPECT_EQ(torch::equal(net->first->weight, own), !sync || world.rank() == 0);
      EXPECT_EQ(net->norm->running_mean[0].item<float>(), sync ? 0 : world.rank());
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), sync ? 5 : 5 + world.rank());
    }
  });
}

TEST(ShardedDdp, FS_02_TakesRankZerosBuffersBeforeEachForward) {
  run_world(2, [](World& world) {
    for (const bool broadcast : {true, false}) {
      NormNet net = make_net<NormNet>();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      ShardedDataParallel<NormNet> model(net, optimizer, {.broadcast_buffers = broadcast});
      model.eval();
      const auto mean_after_forward = [&] {
        net->norm->running_mean.fill_(world.rank());
        model.forward(on_test_device(torch::ones({2, 6})));
        return net->norm->running_mean[0].item<float>();
      };
      EXPECT_EQ(mean_after_forward(), broadcast ? 0 : world.rank());
      {
        const auto guard = model.no_sync();
        EXPECT_EQ(mean_after_forward(), world.rank());
      }
      net->norm->running_mean.fill_(world.rank());
      model.sync_buffers(/*blocking=*/true);
      EXPECT_EQ(net->norm->running_mean[0].item<float>(), 0);
      net->norm->running_mean.fill_(world.rank());
      model.sync_buffers();
      model.forward(on_test_device(torch::ones({2, 6})));
      EXPECT_EQ(net->norm->running_mean[0].item<float>(), 0);
    }
  });
}

TEST(ShardedDdp, FS_03_LeavesAloneWhatNoOptimizerHas) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    net->second->weight.data().fill_(0.5 + world.rank());
    OSS<SGD> a(net->first->parameters(), kSgd), b(net->last->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, {&a, &b});
    EXPECT_EQ(net->second->weight[0][0].item<float>(), 0.5);  // taken at start
    const at::Tensor before = net->second->weight.detach().clone();
    loss_of(model, 0, world.rank(), 2).backward();
    // Its gradient is this rank's own.
    const at::Tensor own = net->second->weight.grad();
    PlainNet plain = make_net<PlainNet>();
    plain->second->weight.data().fill_(0.5);
    loss_of(*plain, 0, world.rank(), 2).backward();
    EXPECT_TRUE(torch::equal(own, plain->second->weight.grad()));
    a.step();
    b.step();
    EXPECT_TRUE(torch::equal(net->second->weight, before));
    EXPECT_FALSE(torch::equal(net->first->weight, plain->first->weight));
    EXPECT_FALSE(torch::equal(net->last->weight, plain->last->weight));
  });
}

TEST(ShardedDdp, FS_04_TheOwnerHasTheMeanGradient) {
  for (const int ranks : {2, 3}) {
    PlainNet plain = make_net<PlainNet>();
    for (int rank = 0; rank < ranks; ++rank) (loss_of(*plain, 0, rank, ranks) / ranks).backward();
    const auto expected = gradients_on_host(plain);
    run_world(ranks, [&](World& world) {
      PlainNet net = make_net<PlainNet>();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      ShardedDataParallel<PlainNet> model(net, optimizer);
      loss_of(model, 0, world.rank(), ranks).backward();
      const auto owned = optimizer.partition_parameters();
      for (const auto& item : net->named_parameters()) {
        const auto& mine = owned[world.rank()];
        const bool is_mine = std::any_of(mine.begin(), mine.end(), [&](const at::Tensor& param) {
          return param.is_same(item.value());
        });
        const at::Tensor gradient = optimizer.gradient(item.value());
        const at::Tensor& mean = expected.at(item.key());
        EXPECT_EQ(gradient.defined(), is_mine) << item.key();
        if (is_mine) {
          EXPECT_TRUE(torch::allclose(gradient.cpu(), mean, 1e-5, 1e-7));
        }
        EXPECT_TRUE(torch::allclose(model.full_grad(item.value()).cpu(), mean, 1e-5, 1e-7));
        // An error; FairScale's gradient is silently empty on the other ranks.
        expect_error([&] { (void)item.value().grad(); }, {item.key(), "full_grad"});
      }
    });
  }
}

TEST(ShardedDdp, FS_05_BucketsCountElements) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    // first 66 + 11, second 99 + 9, last 27 + 3 elements.
    for (const auto& [size, buckets] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 6}, {77, 3}, {70, 4}, {300, 1}, {int64_t{1} << 60, 1}}) {
      PlainNet net = make_net<PlainNet>();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      ShardedDataParallel<PlainNet> model(net, optimizer, {.reduce_buffer_size = size});
      const auto counts = count(world, [&] { loss_of(model, 0, world.rank(), 2).backward(); });
      EXPECT_EQ(counts.reduce_scatter.calls, buckets) << size;
    }
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    expect_error([&] { ShardedDataParallel<PlainNet>(net, optimizer, {.reduce_buffer_size = -1}); },
                 {"reduce_buffer_size must not be negative", "-1"});
  });
  expect_parity_of<PlainNet>({.reduce_buffer_size = 0});
  expect_parity_of<PlainNet>({.reduce_buffer_size = 80});
}

TEST(ShardedDdp, FS_06_GradientsAreGoneAfterEveryWayOfClearing) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    for (const auto& clear : std::vector<std::function<void()>>{
             [&] { optimizer.zero_grad(); }, [&] { optimizer.zero_grad(false); },
             [&] { net->zero_grad(); }, [&] { net->zero_grad(false); }, [&] { model.zero_grad(); },
             [&] { model.zero_grad(false); }}) {
      loss_of(model, 0, world.rank(), 2).backward();
      EXPECT_TRUE(model.full_grad(net->first->weight).defined());
      clear();
      const at::Tensor rest = model.full_grad(net->first->weight);
      EXPECT_TRUE(!rest.defined() || rest.eq(0).all().item<bool>());
      expect_error([&] { optimizer.step(); }, {"there must be a backward"});
    }
  });
}

// Messages are rounded to fp16: near the result of one process, with half the bytes of fp32.
void expect_half_traffic(int64_t bucket) {
  expect_parity_of<PlainNet>({.reduce_buffer_size = bucket, .reduce_fp16 = true}, 2e-3);
  run_world(2, [&](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    int64_t bytes[2] = {};
    for (const bool half : {false, true}) {
      PlainNet net = make_net<PlainNet>();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      ShardedDataParallel<PlainNet> model(net, optimizer,
                                          {.reduce_buffer_size = bucket, .reduce_fp16 = half});
      const auto counts = count(world, [&] { loss_of(model, 0, world.rank(), 2).backward(); });
      bytes[half] = counts.reduce_scatter.bytes_sent;
    }
    EXPECT_GT(bytes[1], 0);
    EXPECT_EQ(bytes[1] * 2, bytes[0]);
  });
}

TEST(ShardedDdp, FS_07_HalfReductionsWorkWithBuckets) { expect_half_traffic(int64_t{1} << 23); }
TEST(ShardedDdp, FS_08_HalfReductionsWorkWithoutBuckets) { expect_half_traffic(0); }

// Counts warnings that contain `text`.
class Warnings : public c10::WarningHandler {
 public:
  explicit Warnings(std::string text) : text_(std::move(text)), scope_(this) {}
  void process(const c10::Warning& warning) override {
    count_ += warning.msg().find(text_) != std::string::npos;
  }
  int take() { return std::exchange(count_, 0); }

 private:
  std::string text_;
  int count_ = 0;
  c10::WarningUtils::WarningHandlerGuard scope_;
};

// Trains with a layer frozen from step 2 to 4, here and in one process.
template <class BeforeForward>
void train_with_frozen_layer(World& world, const ShardedDataParallelOptions& options,
                             BeforeForward&& before_forward) {
  PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
  OSS<SGD> optimizer(net->parameters(), kSgd);
  SGD alone(plain->parameters(), kSgd);
  ShardedDataParallel<PlainNet> model(net, optimizer, options);
  for (int step = 0; step < 6; ++step) {
    for (PlainNet some : {net, plain}) {
      for (at::Tensor& param : some->second->parameters())
        param.requires_grad_(step < 2 || step >= 4);
    }
    optimizer.zero_grad();
    alone.zero_grad();
    before_forward(model, step);
    loss_of(model, step, world.rank(), 2).backward();
    for (int rank = 0; rank < 2; ++rank) (loss_of(*plain, step, rank, 2) / 2).backward();
    optimizer.step();
    alone.step();
    // LibTorch's fused step rounds differently from its plain one.
    expect_same_state(plain_state(*net), plain_state(*plain), 1e-6, std::to_string(step));
  }
}

TEST(ShardedDdp, FS_09_ChangesOfWhatIsTrainableAreSeenAndRight) {
  run_world(2, [](World& world) {
    Warnings warnings("frozen or unfrozen");
    train_with_frozen_layer(world, {}, [](auto&, int) {});
    EXPECT_EQ(warnings.take(), 2);  // one for each change
    // Without checks, or with checks on demand, it trains the same.
    train_with_frozen_layer(world, {.auto_refresh_trainable = false}, [](auto&, int) {});
    train_with_frozen_layer(world, {.auto_refresh_trainable = false},
                            [](auto& model, int) { model.refresh_trainable(); });
    EXPECT_EQ(warnings.take(), 0);
  });
}

TEST(ShardedDdp, FS_10_WithoutWarningsNothingIsDoneAgain) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    Warnings warnings("frozen or unfrozen");
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer,
                                        {.warn_on_trainable_params_changed = false});
    net->second->weight.requires_grad_(false);
    for (int step = 0; step < 6; ++step) {
      const auto counts = count(world, [&] { model.forward(batch_of(step).x); });
      EXPECT_EQ(counts.calls(), 0) << step;
    }
    EXPECT_EQ(warnings.take(), 0);
  });
}

TEST(ShardedDdp, FS_11_RefreshingWhileGradientsWaitWarns) {
  run_world(2, [](World& world) {
    Warnings warnings("waiting to be reduced");
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    model.refresh_trainable();
    EXPECT_EQ(warnings.take(), 0);
    {
      const auto guard = model.no_sync();
      loss_of(model, 0, world.rank(), 2).backward();
    }
    model.refresh_trainable();
    EXPECT_EQ(warnings.take(), 1);
    // Ranks that train different parameters get an error.
    net->first->weight.requires_grad_(world.rank() == 0);
    expect_error([&] { model.refresh_trainable(); },
                 {"same parameters", "'first.weight' trainable", "'first.weight' frozen"});
  });
}

// The gradients of `backwards` backwards on rank 0's and rank 1's rows, in one process.
PlainNet with_summed_gradients(int backwards) {
  PlainNet plain = make_net<PlainNet>();
  for (int i = 0; i < backwards; ++i) {
    for (int rank = 0; rank < 2; ++rank) (loss_of(*plain, i, rank, 2) / 2).backward();
  }
  return plain;
}

template <class Model>
void expect_gradients_of(Model& model, PlainNet& net, PlainNet plain) {
  const auto expected = plain->named_parameters();
  for (const auto& item : net->named_parameters()) {
    const at::Tensor gradient = model.full_grad(item.value());
    ASSERT_TRUE(gradient.defined()) << item.key();
    EXPECT_TRUE(torch::allclose(gradient, expected[item.key()].grad(), 1e-5, 1e-6)) << item.key();
  }
}

TEST(ShardedDdp, FS_12_NoSyncAccumulatesAndEndsWithExceptions) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    const auto counts = count(world, [&] {
      const auto guard = model.no_sync();
      loss_of(model, 0, world.rank(), 2).backward();
      loss_of(model, 1, world.rank(), 2).backward();
    });
    EXPECT_EQ(counts.calls(), 0);
    loss_of(model, 2, world.rank(), 2).backward();
    expect_gradients_of(model, net, with_summed_gradients(3));
    optimizer.zero_grad();
    try {
      const auto guard = model.no_sync();
      throw std::runtime_error("the user's");
    } catch (const std::runtime_error&) {
    }
    loss_of(model, 0, world.rank(), 2).backward();
    expect_gradients_of(model, net, with_summed_gradients(1));
  });
}

TEST(ShardedDdp, FS_13_ReduceDoesByHandWhatABackwardWould) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    expect_error([&] { model.reduce(); }, {"no rank has any", "called twice"});
    {
      const auto guard = model.no_sync();
      loss_of(model, 0, world.rank(), 2).backward();
      loss_of(model, 1, world.rank(), 2).backward();
      expect_error([&] { model.reduce(); }, {"no_sync() guard has ended"});
    }
    expect_error([&] { optimizer.step(); },
                 {"there must be a backward", "no_sync()", "call reduce()"});
    model.reduce();
    expect_gradients_of(model, net, with_summed_gradients(2));
    expect_error([&] { model.reduce(); }, {"no rank has any"});
    optimizer.step();
    expect_replicas(world, *net);
  });
}

TEST(ShardedDdp, FS_14_EachBackwardAfterAForwardIsReduced) {
  for (const int64_t bucket : {int64_t{0}, int64_t{1} << 23}) {
    run_world(2, [&](World& world) {
      PlainNet net = make_net<PlainNet>();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      ShardedDataParallel<PlainNet> model(net, optimizer, {.reduce_buffer_size = bucket});
      const at::Tensor loss = loss_of(model, 0, world.rank(), 2);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      PlainNet plain = with_summed_gradients(1);
      for (at::Tensor& param : plain->parameters()) param.mutable_grad().mul_(2);
      expect_gradients_of(model, net, plain);
      // Forwards first, then their backwards.
      optimizer.zero_grad();
      const at::Tensor a = loss_of(model, 0, world.rank(), 2);
      const at::Tensor b = loss_of(model, 1, world.rank(), 2);
      b.backward();
      a.backward();
      expect_gradients_of(model, net, with_summed_gradients(2));
    });
  }
}

struct ForkImpl : torch::nn::Module {
  ForkImpl()
      : left(register_module("left", torch::nn::Linear(6, 3))),
        right(register_module("right", torch::nn::Linear(6, 3))),
        both(register_module("both", torch::nn::Linear(6, 3))) {}
  at::Tensor forward(const at::Tensor& x, bool use_left, bool use_right) {
    at::Tensor y = both(x);
    if (use_left) y = y + left(x);
    if (use_right) y = y + right(x);
    return y;
  }
  torch::nn::Linear left, right, both;
};
TORCH_MODULE(Fork);

TEST(ShardedDdp, FS_15_UnusedParametersStayAsTheyAre) {
  for (const int64_t bucket : {int64_t{0}, int64_t{1} << 23}) {
    run_world(2, [&](World& world) {
      Fork net = make_net<Fork>(), plain = make_net<Fork>();
      const SGDOptions options = SGDOptions(0.1).momentum(0.9).weight_decay(0.1);
      OSS<SGD> optimizer(net->parameters(), options);
      SGD alone(plain->parameters(), options);
      ShardedDataParallel<Fork> model(net, optimizer, {.reduce_buffer_size = bucket});
      for (int step = 0; step < 4; ++step) {
        const at::Tensor x = batch_of(step).x;
        optimizer.zero_grad();
        alone.zero_grad();
        model.forward(x, step == 1, step != 1).square().mean().backward();
        plain->forward(x, step == 1, step != 1).square().mean().backward();
        optimizer.step();
        alone.step();
        expect_same_state(plain_state(*net), plain_state(*plain), 1e-6, std::to_string(step));
      }
      expect_replicas(world, *net);
    });
  }
}

TEST(ShardedDdp, FS_16_RanksMayUseDifferentParameters) {
  for (const int64_t bucket : {int64_t{0}, int64_t{1} << 23}) {
    run_world(3, [&](World& world) {
      Fork net = make_net<Fork>(), plain = make_net<Fork>();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      SGD alone(plain->parameters(), kSgd);
      ShardedDataParallel<Fork> model(net, optimizer, {.reduce_buffer_size = bucket});
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = batch_of(step).x;
        optimizer.zero_grad();
        alone.zero_grad();
        const auto loss = [&](auto& some, int rank) {
          return some.forward(x, rank == 0, rank == 2).square().mean();
        };
        loss(model, world.rank()).backward();
        for (int rank = 0; rank < 3; ++rank) (loss(*plain, rank) / 3).backward();
        optimizer.step();
        alone.step();
        expect_same_state(plain_state(*net), plain_state(*plain), 1e-6, std::to_string(step));
      }
      expect_replicas(world, *net);
    });
  }
}

// Sets a momentum by step, too.
template <class Optimizer, class Step>
void take_steps(Optimizer& optimizer, int steps, const Step& step) {
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    step(i);
    auto& options = static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
    options.momentum(0.5 + 0.05 * i);
    optimizer.step();
    scheduler.step();
  }
}

TEST(ShardedDdp, FS_17_StepsOfRanksThatAreDoneAreThoseOfTheOthers) {
  const auto steps_of = [](int rank) { return 1 + 2 * rank; };
  const auto plain = seeded(7, [] { return std::make_shared<Mlp>(); });
  SGD alone(plain->parameters(), kSgd);
  take_steps(alone, steps_of(2), [&](int step) {
    for (int rank = 0; rank < 3; ++rank)
      if (step < steps_of(rank))
        (rank_loss(*plain, global_batch(step, 12, 37, 5), rank, 3, step) / 3).backward();
  });
  run_world(3, [&](World& world) {
    const auto net = seeded(7, [] { return std::make_shared<Mlp>(); });
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<Mlp> model(net, optimizer);
    model.join([&] {
      take_steps(optimizer, steps_of(world.rank()), [&](int step) {
        rank_loss(*net, global_batch(step, 12, 37, 5), world.rank(), 3, step).backward();
      });
    });
    expect_same_state(plain_state(*net), plain_state(*plain), 1e-5, "joined");
  });
}

TEST(ShardedDdp, FS_17_RanksMayTakeDifferentNumbersOfSteps) {
  for (const bool broadcast : {false, true}) {
    run_world(3, [&](World& world) {
      NormNet net = make_net<NormNet>();
      OSS<SGD> optimizer(net->parameters(), kSgd);
      ShardedDataParallel<NormNet> model(net, optimizer, {.broadcast_buffers = broadcast});
      torch::optim::StepLR scheduler(optimizer, 2, 0.5);
      model.join([&] {
        for (int step = 0; step < 2 + 3 * world.rank(); ++step) {
          optimizer.zero_grad();
          loss_of(model, step, world.rank(), 3).backward();
          optimizer.clip_grad_norm(0.5);
          optimizer.step();
          scheduler.step();
        }
      });
      expect_replicas(world, *net);
      // Ranks that were done have taken the steps, too.
      expect_error([&] { optimizer.state_dict(); }, {"after the last step"});
    });
  }
}

TEST(ShardedDdp, FS_18_ToConvertsAndReturnsTheModel) {
  run_world(2, [](World& world) {
    NormNet net = make_net<NormNet>();
    OSS<AdamW> optimizer(net->parameters(), AdamWOptions(0.01));
    ShardedDataParallel<NormNet> model(net, optimizer);
    train(model, optimizer, world, 2);
    const at::Tensor before = net->second->weight.detach().clone();
    EXPECT_EQ(&model.to(at::kBFloat16), &model);
    EXPECT_EQ(net->second->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kBFloat16);
    EXPECT_EQ(net->norm->num_batches_tracked.scalar_type(), at::kLong);
    EXPECT_TRUE(torch::equal(net->second->weight, before.to(at::kBFloat16)));
    model.forward(batch_of(2).x.to(at::kBFloat16)).square().mean().backward();
    optimizer.step();
    expect_replicas(world, *net);
    model.to(at::kFloat);
    train(model, optimizer, world, 2);
    expect_replicas(world, *net);
    EXPECT_EQ(&model.to(test_device()), &model);
    expect_error(
        [&] { model.to(at::Device(at::kMeta)); },
        {"type of device can't change", c10::DeviceTypeName(test_device().type(), true), "meta"});
    expect_error([&] { model.to(at::kLong); }, {"must be floating"});
    const auto guard = model.no_sync();
    expect_error([&] { model.to(at::kDouble); }, {"no_sync()"});
  });
}

struct TwoDevicesImpl : torch::nn::Module {
  TwoDevicesImpl() : first(register_module("first", torch::nn::Linear(6, 3))) {
    register_parameter("second", torch::empty({2}, at::kMeta));
  }
  torch::nn::Linear first;
};

TEST(ShardedDdp, FS_19_OneTypeOfDevice) {
  run_world(2, [](World&) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    {
      const auto mixed = std::make_shared<TwoDevicesImpl>();
      OSS<SGD> some(mixed->first->parameters(), kSgd);
      expect_error([&] { ShardedDataParallel<TwoDevicesImpl>(mixed, some); },
                   {"one type of device", "is on"});
    }
    ShardedDataParallel<PlainNet> model(net, optimizer);
    EXPECT_EQ(&model.module(), net.get());
    EXPECT_FALSE(model.is_multi_device_module());
    EXPECT_EQ(model.device_type(), test_device().type());
    expect_error([&] { ShardedDataParallel<PlainNet>(net, std::vector<AnyOss*>{}); }, {"got none"});
    expect_error([&] { ShardedDataParallel<PlainNet>(net, optimizer); }, {"one module only"});
  });
}

TEST(ShardedDdp, FS_20_TheModulesMembersAreThere) {
  run_world(2, [](World&) {
    NormNet net = make_net<NormNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<NormNet> model(net, optimizer);
    EXPECT_EQ(model->banana(), 7);
    EXPECT_TRUE(model->first->weight.is_same(net->first->weight));
    model.eval();
    EXPECT_FALSE(net->is_training());
    model.train();
    EXPECT_TRUE(net->norm->is_training());
  });
}

TEST(ShardedDdp, FS_21_GradientsThatRequireGradientsAreRefused) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<PlainNet> model(net, optimizer);
    expect_error(
        [&] {
          loss_of(model, 0, world.rank(), 2)
              .backward({}, /*keep_graph=*/true, /*create_graph=*/true);
        },
        {"requires a gradient itself", "last."});
    // Nothing of the failed backward is left.
    loss_of(model, 0, world.rank(), 2).backward();
    expect_gradients_of(model, net, with_summed_gradients(1));
  });
}

struct MixedImpl : torch::nn::Module {
  MixedImpl()
      : single(register_module("single", torch::nn::Linear(6, 5))),
        wide(register_module("wide", torch::nn::Linear(5, 3))),
        counts(register_parameter("counts", torch::arange(4), /*requires_grad=*/false)) {
    wide->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return wide(single(x).to(at::kDouble)).to(at::kFloat) + counts[1];
  }
  torch::nn::Linear single, wide;
  at::Tensor counts;
};
TORCH_MODULE(Mixed);

TEST(ShardedDdp, FS_22_DtypesMix) { expect_parity_of<Mixed>({}); }

// Both layers use the same memory, and so one parameter.
struct TiedImpl : torch::nn::Module {
  TiedImpl()
      : in(register_module("in", torch::nn::Linear(6, 6))),
        out(register_module("out", torch::nn::Linear(6, 6))),
        head(register_module("head", torch::nn::Linear(6, 3))) {
    tie();
  }
  using torch::nn::Module::to;
  void to(torch::Device device, bool non_blocking = false) override {
    torch::nn::Module::to(device, non_blocking);
    tie();  // each has moved by itself
  }
  void tie() { out->weight.set_data(in->weight.data()); }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(out(torch::tanh(in(x))))); }
  torch::nn::Linear in, out, head;
};
TORCH_MODULE(Tied);

TEST(ShardedDdp, FS_23_TiedWeightsCountOnce) {
  expect_parity_of<Tied>({});
  run_world(2, [](World& world) {
    Tied net = make_net<Tied>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<Tied> model(net, optimizer);
    train(model, optimizer, world, 2);
    EXPECT_EQ(net->in->weight.data_ptr(), net->out->weight.data_ptr());
  });
}

// LibTorch's C++ frontend has no SyncBatchNorm. A batch that is a DistTensor gives the statistics
// of the whole batch, on any device.
TEST(ShardedDdp, FS_24_BatchNormOfAWholeBatch) {
  run_world(3, [](World& world) {
    auto plain = on_test_device(torch::nn::BatchNorm1d(4)),
         own = on_test_device(torch::nn::BatchNorm1d(4));
    const at::Tensor x = batch_of(0).x.narrow(1, 0, 4) * 3 + 1;
    const at::Tensor expected = plain(x);
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor rows = from_local(rows_of(x, world.rank(), 3), mesh, {Shard{0}});
    const at::Tensor actual = to_local(
        torch::batch_norm(rows, distribute(own->weight, mesh, {}), distribute(own->bias, mesh, {}),
                          own->running_mean, own->running_var, true, 0.1, 1e-5, false));
    EXPECT_TRUE(torch::allclose(actual, rows_of(expected, world.rank(), 3), 1e-4, 1e-5));
    EXPECT_TRUE(torch::allclose(own->running_var, plain->running_var, 1e-4, 1e-5));
  });
}

TEST(ShardedDdp, FS_25_TwoOptimizersEqualTwoPlainOnes) {
  for (const int ranks : {2, 3, 4}) {
    PlainNet plain = make_net<PlainNet>();
    SGD plain_a(plain->first->parameters(), kSgd);
    std::vector<at::Tensor> rest = plain->second->parameters();
    for (const at::Tensor& param : plain->last->parameters()) rest.push_back(param);
    AdamW plain_b(rest, AdamWOptions(0.02));
    for (int step = 0; step < 4; ++step) {
      plain_a.zero_grad();
      plain_b.zero_grad();
      for (int rank = 0; rank < ranks; ++rank)
        (loss_of(*plain, step, rank, ranks) / ranks).backward();
      plain_a.step();
      plain_b.step();
    }
    const auto expected = plain_state(*plain);
    run_world(ranks, [&](World& world) {
      PlainNet net = make_net<PlainNet>();
      OSS<SGD> a(net->first->parameters(), kSgd);
      std::vector<at::Tensor> others = net->second->parameters();
      for (const at::Tensor& param : net->last->parameters()) others.push_back(param);
      OSS<AdamW> b(others, AdamWOptions(0.02));
      ShardedDataParallel<PlainNet> model(net, {&a, &b});
      for (int step = 0; step < 4; ++step) {
        a.zero_grad();
        b.zero_grad();
        loss_of(model, step, world.rank(), ranks).backward();
        a.step();
        b.step();
      }
      expect_same_state(plain_state(*net), expected, 1e-5, "two optimizers");
      expect_replicas(world, *net);
    });
  }
  run_world(2, [](World&) {
    PlainNet net = make_net<PlainNet>(), other = make_net<PlainNet>();
    OSS<SGD> a(net->parameters(), kSgd), b(net->last->parameters(), kSgd);
    expect_error(
        [&] {
          ShardedDataParallel<PlainNet>(net, {&a, &b});
        },
        {"must be in one optimizer", "'last.weight' is in two"});
    OSS<SGD> c(other->first->parameters(), kSgd);
    expect_error([&] { ShardedDataParallel<PlainNet>(net, c); },
                 {"must be the model's", "[11, 6]"});
    ShardedDataParallel<PlainNet> model(net, a);  // nothing was changed
  });
}

struct ManyInputsImpl : torch::nn::Module {
  ManyInputsImpl() : fc(register_module("fc", torch::nn::Linear(4, 4))) {}
  std::pair<at::Tensor, int> forward(const std::tuple<at::Tensor, at::Tensor>& xs, int times,
                                     const std::string& name, std::vector<int64_t> rows) {
    at::Tensor y = fc(std::get<0>(xs) + std::get<1>(xs));
    for (const int64_t row : rows) y = y + row;
    return {y * times, static_cast<int>(name.size())};
  }
  torch::nn::Linear fc;
};
TORCH_MODULE(ManyInputs);

TEST(ShardedDdp, FS_26_ForwardTakesAnyArguments) {
  run_world(2, [](World&) {
    ManyInputs net = make_net<ManyInputs>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    ShardedDataParallel<ManyInputs> model(net, optimizer);
    const at::Tensor x = on_test_device(torch::ones({2, 4}));
    const auto [y, length] = model(std::make_tuple(x, x), 3, "name", std::vector<int64_t>{1, 2});
    EXPECT_EQ(length, 4);
    EXPECT_TRUE(torch::allclose(y, (net->fc(x + x) + 3) * 3));
    y.sum().backward();
    optimizer.step();
  });
}

TEST(ShardedDdp, FS_27_IsNotCopied) {
  static_assert(!std::is_copy_constructible_v<ShardedDataParallel<PlainNet>>);
  static_assert(!std::is_copy_assignable_v<ShardedDataParallel<PlainNet>>);
  static_assert(!std::is_copy_constructible_v<OSS<SGD>>);
  run_world(2, [](World& world) {
    // The net and the optimizer outlive the wrapper, still sharded.
    PlainNet net = make_net<PlainNet>();
    OSS<SGD> optimizer(net->parameters(), kSgd);
    { ShardedDataParallel<PlainNet> model(net, optimizer); }
    loss_of(*net, 0, world.rank(), 2).backward();
    optimizer.step();
    expect_replicas(world, *net);
  });
}

TEST(ShardedDdp, FS_28_RunsAgainGiveTheSameBits) {
  for (const int64_t bucket : {int64_t{0}, int64_t{1} << 23}) {
    std::vector<std::vector<NamedTensor>> ends;
    for (int run = 0; run < 2; ++run) {
      run_world(2, [&](World& world) {
        PlainNet net = make_net<PlainNet>();
        OSS<SGD> optimizer(net->parameters(), kSgd);
        ShardedDataParallel<PlainNet> model(net, optimizer, {.reduce_buffer_size = bucket});
        const auto end = train(model, optimizer, world, 100);
        if (world.rank() == 0) ends.push_back(end);
      });
    }
    expect_same_state(ends[1], ends[0], 0, "again");
  }
}

TEST(ShardedDdp, FS_65_AnyWayOfClearingGradientsTrainsTheSame) {
  PlainNet plain = make_net<PlainNet>();
  SGD alone(plain->parameters(), kSgd);
  const auto expected = train_in_one(plain, alone, 2, 6);
  for (const bool set_to_none : {true, false}) {
    for (const bool by_module : {true, false}) {
      run_world(2, [&](World& world) {
        PlainNet net = make_net<PlainNet>();
        OSS<SGD> optimizer(net->parameters(), kSgd);
        ShardedDataParallel<PlainNet> model(net, optimizer);
        for (int step = 0; step < 6; ++step) {
          by_module ? net->zero_grad(set_to_none) : optimizer.zero_grad(set_to_none);
          loss_of(model, step, world.rank(), 2).backward();
          optimizer.step();
        }
        expect_same_state(plain_state(*net), expected, 1e-6, "cleared");
      });
    }
  }
}

}  // namespace tessera::testing::sharded_ddp_test
