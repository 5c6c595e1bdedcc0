// Clipping, offload, overlap, outputs, access to whole parameters and traffic of
// `group_sharded_parallel`, by the ids of the project's list of behaviours.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include <filesystem>
#include <fstream>
#include <tuple>

#include "dialects/tests/training.h"
#include "engine/model/sharded_state.h"
#include "support/scratch_directory.h"

namespace tessera::testing::group_sharded_features_test {

using namespace paddle;

const char* const kLevels[] = {"os", "os_g", "p_g_os"};

// One process with Paddle's formula: clip / max(norm, clip), without the parameters in `no_clip`.
std::vector<NamedTensor> clip_alone(double clip, const std::set<std::string>& no_clip) {
  const auto net = make_mlp();
  const auto optimizer = make_sgd(*net);
  const Training training;
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    accumulate(training, step, 0, 1, [&](const torch::Tensor& x) { return net->forward(x); });
    double square = 0;
    for (const auto& item : net->named_parameters())
      if (!no_clip.contains(item.key())) square += item.value().grad().pow(2).sum().item<double>();
    const double factor = clip / std::max(std::sqrt(square), clip);
    for (const auto& item : net->named_parameters())
      if (!no_clip.contains(item.key())) item.value().grad().mul_(factor);
    optimizer->step();
  }
  return plain_state(*net);
}

TEST(GroupSharded, GS_12_ClipGradByGlobalNormIsThatOfPaddleWithoutParametersThatNeedNoClip) {
  for (const std::set<std::string>& no_clip :
       {std::set<std::string>{}, {"fc2.weight", "fc1.bias"}}) {
    const auto expected = clip_alone(0.02, no_clip);
    Training training{.steps = 3};
    training.options.segment_size = 300;  // fc3 and the biases stay whole: counted once
    training.options.grad_clip = {.clip_norm = 0.02, .no_clip = {no_clip.begin(), no_clip.end()}};
    for (const std::string level : kLevels) {
      for (const int ranks : {1, 2, 3, 4})
        expect_same_state(train_sharded(ranks, level, training), expected, 2e-6, level);
    }
  }
}

TEST(GroupSharded, GS_12_ClippingIsRightUnderHybridSharding) {
  const auto expected = clip_alone(0.02, {});
  for (const std::string level : kLevels) {
    run_world(4, [&](World& world) {
      const auto process_groups = world.hybrid_process_groups(2);
      Training training{.steps = 3};
      training.options.segment_size = 300;
      training.options.grad_clip = {.clip_norm = 0.02};
      training.options.group = process_groups.shard;
      training.options.dp_group = process_groups.replicate;
      expect_same_state(train_as_rank(world, level, training), expected, 2e-6, level);
    });
  }
}

TEST(GroupSharded, GS_21_OffloadNeedsNoHalfPrecisionAndGoesWithReplicas) {
  const ScratchDirectory directory;
  for (const auto& make_optimizer : {MakeOptimizer(make_sgd), MakeOptimizer(make_adamw)}) {
    for (const std::string level : {"os", "os_g"}) {
      std::vector<NamedTensor> expected;
      for (const std::string& where :
           {std::string("none"), std::string("cpu"), directory.path().string()}) {
        run_world(4, [&](World& world) {
          const auto process_groups = world.hybrid_process_groups(2);
          Training training{.optimizer = make_optimizer};
          training.options.offload = where;
          training.options.group = process_groups.shard;
          training.options.dp_group = process_groups.replicate;
          const auto state = train_as_rank(world, level, training);
          if (where == "none" && world.rank() == 0) expected = state;
          if (where != "none") expect_same_state(state, expected, 0, level + ", " + where);
        });
      }
    }
  }
}

// Returns the state after three steps in half precision, and its memory, offloaded bytes included.
std::pair<std::vector<NamedTensor>, ShardMemory> train_half(
    World& world, at::ScalarType dtype, const std::variant<bool, std::string>& offload) {
  const auto net = make_mlp();
  net->to(dtype);
  const auto inner = make_adamw(*net);
  GradScaler scaler({.init_scale = 1024});
  auto [model, optimizer, same] = group_sharded_parallel(
      net, *inner, "p_g_os", {.scaler = &scaler, .offload = offload, .segment_size = 100});
  EXPECT_EQ(same, &scaler);
  for (int step = 0; step < 3; ++step) {
    optimizer.clear_grad();
    const Batch batch = global_batch(step, kRows, kIn, kOut);
    const auto out = model(rows_of(batch.x, world.rank(), world.size()).to(dtype));
    const auto loss =
        torch::mse_loss(out.to(torch::kFloat), rows_of(batch.y, world.rank(), world.size()));
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
  }
  EXPECT_EQ(optimizer.steps(), 3);
  return {model.full_state(), optimizer.memory()};
}

TEST(GroupSharded, GS_22_OffloadOfShardedParametersGivesTheSameBitsInEveryDtype) {
  const ScratchDirectory directory;
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    run_world(2, [&](World& world) {
      const auto [expected, kept] = train_half(world, dtype, false);
      for (const std::string& where : {std::string("cpu"), directory.path().string()}) {
        const auto [state, memory] = train_half(world, dtype, where);
        expect_same_state(state, expected, 0, where);
        EXPECT_EQ(memory.optimizer_state + memory.master_weights, 0);
        EXPECT_GT(memory.offloaded, kept.optimizer_state + kept.master_weights - 1);
        EXPECT_LT(memory.parameters, kept.parameters) << "sharded units keep nothing here";
      }
    });
  }
}

TEST(GroupSharded, GS_23_OverlapIsTheDefaultAndReadingWaitsByItself) {
  const ScratchDirectory directory;
  for (const std::string level : kLevels) {
    const Training training;
    const auto expected = train_alone(training);
    run_world(2, [&](World& world) {
      const auto net = make_mlp();
      const auto inner = make_sgd(*net);
      auto [model, optimizer, scaler] =
          group_sharded_parallel(net, *inner, level, training.options);
      for (int step = 0; step < training.steps; ++step) {
        optimizer.clear_grad();
        accumulate(training, step, world.rank(), 2,
                   [&net = net](const torch::Tensor& x) { return net->forward(x); });
        optimizer.step();
      }
      // The gathers of the last step may still run: inference, saving and reading need no call.
      torch::NoGradGuard no_grad;
      const auto x = global_batch(9, kRows, kIn, kOut).x;
      const auto out = net->forward(x);
      save_group_sharded_model(model, directory / level, &optimizer);
      expect_same_state(model.full_state(), expected, 2e-6, level);
      const auto fresh = make_mlp();
      load_group_sharded_model(*fresh, directory / level);
      EXPECT_TRUE(fresh->forward(x).equal(out));
    });
  }
}

// Returns numbers, nested tuples and tensors without gradients, from layers with the parameters.
struct Outputs : torch::nn::Module {
  struct LayerImpl : torch::nn::Module {
    using Result = std::tuple<torch::Tensor, std::tuple<double, std::vector<torch::Tensor>>>;
    Result forward(const torch::Tensor& x) {
      const auto y = fc(x);
      return {y, {0.5, {y.detach(), torch::arange(3)}}};
    }
    torch::nn::Linear fc = register_module("fc", torch::nn::Linear(kIn, kIn));
  };
  TORCH_MODULE(Layer);
  LayerImpl::Result forward(const torch::Tensor& x) {
    const auto [y, extra] = first(x);
    auto [z, more] = second(y + std::get<1>(extra)[0] * std::get<0>(extra));
    return {z * std::get<0>(more), more};
  }
  Layer first = register_module("first", Layer()), second = register_module("second", Layer());
};

TEST(GroupSharded, GS_27_LayersMayReturnAnything) {
  const auto train = [](Outputs& net, torch::optim::Optimizer& inner, auto&& forward,
                        auto&& zero_grad, auto&& step, int rank, int size) {
    for (int i = 0; i < 3; ++i) {
      zero_grad();
      const auto x = rows_of(global_batch(i, kRows, kIn, kOut).x, rank, size);
      const auto [out, extra] = forward(x);
      EXPECT_EQ(std::get<0>(extra), 0.5);
      EXPECT_EQ(std::get<1>(extra)[1].size(0), 3);
      EXPECT_FALSE(std::get<1>(extra)[0].requires_grad());
      out.pow(2).mean().backward();
      step();
    }
  };
  const auto make = [] { return with_values(std::make_shared<Outputs>()); };
  const auto alone = make();
  torch::optim::SGD plain(alone->parameters(), torch::optim::SGDOptions(0.1));
  train(
      *alone, plain, [&](const torch::Tensor& x) { return alone->forward(x); },
      [&] { plain.zero_grad(); }, [&] { plain.step(); }, 0, 1);
  for (const std::string level : kLevels) {
    run_world(2, [&](World& world) {
      const auto net = make();
      torch::optim::SGD inner(net->parameters(), torch::optim::SGDOptions(0.1));
      auto [model, optimizer, scaler] =
          group_sharded_parallel(net, inner, level, {.segment_size = 0});
      train(
          *net, inner, [&model = model](const torch::Tensor& x) { return model(x); },
          [&optimizer = optimizer] { optimizer.clear_grad(); },
          [&optimizer = optimizer] { optimizer.step(); }, world.rank(), 2);
      expect_same_state(model.full_state(), plain_state(*alone), 2e-6, level);
    });
  }
}

TEST(GroupSharded, GS_28_WholeParametersAreAScopeAfterWhichTrainingIsShardedAgain) {
  const Training training;
  const auto expected = train_alone(training);
  run_world(3, [&](World& world) {
    const auto net = make_mlp();
    const auto inner = make_sgd(*net);
    auto [model, optimizer, scaler] =
        group_sharded_parallel(net, *inner, "p_g_os", training.options);
    const auto resident = [&model = model] { return model.state()->context().unsharded_bytes; };
    for (int step = 0; step < training.steps; ++step) {
      optimizer.clear_grad();
      accumulate(training, step, world.rank(), 3,
                 [&net = net](const torch::Tensor& x) { return net->forward(x); });
      optimizer.step();
      {
        const auto whole = model.keep_unsharded();
        // Raw memory may be read now.
        const auto weight = net->parameters()[0];
        if (tests_on_host()) {
          EXPECT_EQ(weight.data_ptr<float>()[0], weight[0][0].item<float>());
        }
      }
      EXPECT_ANY_THROW(net->parameters()[0].data_ptr<float>()) << "sharded again";
      EXPECT_EQ(resident(), 0);
    }
    expect_same_state(model.full_state(), expected, 2e-6, "trained on between scopes");
  });
}

TEST(GroupSharded, GS_31_StateIsThatOfTheInnerLayer) {
  for (const std::string level : kLevels) {
    run_world(3, [&](World&) {
      const auto net = make_mlp();
      const auto other = with_values(std::make_shared<PaddleMlp>(), 99);
      const auto names_before = net->named_parameters().keys();
      const auto inner = make_sgd(*net);
      auto [model, optimizer, scaler] =
          group_sharded_parallel(net, *inner, level, {.segment_size = 0});
      std::vector<std::string> names;
      for (const auto& item : model.full_state()) names.push_back(item.name);
      EXPECT_EQ(names, names_before);
      EXPECT_EQ(model->named_parameters().keys(), names_before);
      auto state = plain_state(*other);
      model.load_full_state(state);
      expect_same_state(model.full_state(), plain_state(*other), 0, "loaded");
      state.pop_back();
      state.push_back({"fc9.weight", torch::zeros({2})});
      state[0].tensor = torch::zeros({7});
      const auto error = message_of<c10::ValueError>([&] { model.load_full_state(state); });
      expect_contains(error, {"'fc9.weight' is not in the model"});
      expect_contains(error, {"is missing"});
      expect_contains(error, {"must have the shape ["});
      expect_same_state(model.full_state(), plain_state(*other), 0, "unchanged");
    });
  }
}

TEST(GroupSharded, GS_47_GradientsOfShardedParametersAreReduceScatteredNotAllReduced) {
  for (const int ranks : {2, 3, 4}) {
    run_world(ranks, [&](World& world) {
      const auto counter = counting_process_group(world.process_group());
      const auto net = make_mlp();
      const auto inner = make_sgd(*net);
      auto [model, optimizer, scaler] =
          group_sharded_parallel(net, *inner, "p_g_os", {.group = counter, .segment_size = 0});
      for (int step = 0; step < 3; ++step) {
        counter->reset_counts();
        optimizer.clear_grad();
        accumulate(Training{}, step, world.rank(), ranks,
                   [&net = net](const torch::Tensor& x) { return net->forward(x); });
        optimizer.step();
      }
      int64_t bytes = 0;
      for (const auto& unit : model.state()->units()) bytes += unit->layout().nbytes();
      const auto counts = counter->counts();
      EXPECT_EQ(counts.reduce_scatter.bytes_sent, bytes * (ranks - 1) / ranks);
      EXPECT_EQ(counts.all_reduce.calls, 1) << "which parameters were used";
      EXPECT_LT(counts.all_reduce.bytes_sent, 100);
    });
  }
}

// Parameters outside of fused buffers, one of them without a gradient, with a dp_group.
struct Spare : PaddleMlp {
  Spare() { spare = register_parameter("spare", torch::ones({5})); }
  torch::Tensor spare;
};

TEST(GroupSharded, GS_48_ParametersOutsideOfBuffersWorkWithADpGroup) {
  Training training{.net = [] { return with_values(std::make_shared<Spare>()); },
                    .optimizer = make_adamw};
  const auto expected = train_alone(training);
  for (const std::string level : kLevels) {
    for (const int64_t buffer_max_size : {int64_t{0}, int64_t{1} << 23}) {
      run_world(4, [&](World& world) {
        Training hybrid = training;
        const auto process_groups = world.hybrid_process_groups(2);
        hybrid.options.group = process_groups.shard;
        hybrid.options.dp_group = process_groups.replicate;
        hybrid.options.buffer_max_size = buffer_max_size;
        expect_same_state(train_as_rank(world, level, hybrid), expected, 1e-5, level);
      });
    }
  }
}

}  // namespace tessera::testing::group_sharded_features_test
