// Conversions of a model that an `OSS` steps, and its parameters in fp16, by the ids of their
// behaviours.

#include <tessera/comm/process_group_decorators.h>

#include "dialects/fairscale/tests/fairscale.h"

namespace tessera::testing::oss_precision_test {

using torch::optim::OptimizerParamGroup;

const SGDOptions kSgd = SGDOptions(0.1).momentum(0.9);

at::Tensor loss_in_dtype(PlainNet& net, int64_t step, int rank, int size) {
  return loss_of(*net, step, rank, size, net->first->weight.scalar_type());
}

// Trains an OSS and a plain optimizer; `before` may convert the nets.
template <class Optimizer, class Options, class F>
void expect_conversion_parity(World& world, const Options& options, F&& before) {
  const int ranks = world.size();
  PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
  OSS<Optimizer> optimizer(net->parameters(), options);
  Optimizer alone(plain->parameters(), options);
  for (int step = 0; step < 5; ++step) {
    before(*net, step);
    before(*plain, step);
    optimizer.zero_grad();
    alone.zero_grad();
    loss_in_dtype(net, step, world.rank(), ranks).backward();
    average_gradients(*world.process_group(), net->parameters());
    for (int rank = 0; rank < ranks; ++rank)
      (loss_in_dtype(plain, step, rank, ranks) / ranks).backward();
    optimizer.step();
    alone.step();
    EXPECT_EQ(net->last->bias.scalar_type(), plain->last->bias.scalar_type());
    expect_same_state(plain_state(*net), plain_state(*plain), 1e-5, std::to_string(step));
    expect_replicas(world, *net);
  }
}

TEST(Oss, FS_44_ModelsMayBeConvertedAtAnyTime) {
  const auto at_start = [](torch::nn::Module& net, int step) {
    if (step == 0) net.to(at::kDouble);
  };
  const auto between_steps = [](torch::nn::Module& net, int step) {
    if (step == 2) net.to(at::kDouble);
    if (step == 4) net.to(at::kFloat);
  };
  const auto one_layer = [](torch::nn::Module& net, int step) {
    // The same dtype again, so no change; then new memory for one parameter.
    if (step == 1) net.to(at::kFloat);
    at::Tensor& weight = net.named_children()["second"]->named_parameters()["weight"];
    if (step == 3) weight.set_data(weight.detach() * 2);
  };
  for (const int ranks : {2, 3}) {
    run_world(ranks, [&](World& world) {
      expect_conversion_parity<SGD>(world, kSgd, at_start);
      expect_conversion_parity<SGD>(world, kSgd, between_steps);
      expect_conversion_parity<SGD>(world, kSgd, one_layer);
      expect_conversion_parity<AdamW>(world, AdamWOptions(0.01).eps(1e-4), at_start);
      expect_conversion_parity<AdamW>(world, AdamWOptions(0.01).eps(1e-4), between_steps);
    });
  }
}

TEST(Oss, FS_44_TheStateGoesOnAfterAConversion) {
  run_world(2, [](World& world) {
    PlainNet net = make_net<PlainNet>();
    OSS<AdamW> optimizer(net->parameters(), AdamWOptions(0.01));
    step_alone(*net, optimizer, *world.process_group(), 0);
    const auto before = optimizer.state_dict(true);
    net->to(at::kDouble);
    // Collective calls other than step() detect it, too.
    const auto after = optimizer.state_dict(true);
    ASSERT_EQ(after.state.size(), 6u);
    for (const auto& [number, values] : before.state) {
      EXPECT_TRUE(torch::allclose(after.state.at(number).at("exp_avg").toTensor().to(at::kFloat),
                                  values.at("exp_avg").toTensor()));
    }
    EXPECT_EQ(net->first->weight.scalar_type(), at::kDouble);
  });
}

bool is_half(const at::Tensor& tensor) {
  return torch::equal(tensor.to(at::kHalf).to(tensor.scalar_type()), tensor);
}

TEST(Oss, FS_45_HalfOfTheBytesAndEqualReplicas) {
  const auto run = [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    for (const bool by_itself : {false, true}) {
      int64_t bytes[2] = {};
      for (const bool half : {false, true}) {
        PlainNet net = make_net<PlainNet>(), plain = make_net<PlainNet>();
        OSS<SGD> optimizer(net->parameters(), kSgd, {.broadcast_fp16 = half});
        SGD alone(plain->parameters(), kSgd);
        std::optional<ShardedDataParallel<PlainNet>> model;
        if (!by_itself) model.emplace(net, optimizer);
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          loss_of(*net, step, world.rank(), 2).backward();
          if (by_itself) average_gradients(*world.process_group(), net->parameters());
          bytes[half] = count(world, [&] { optimizer.step(); }).all_gather.bytes_sent;
          expect_replicas(world, *net);
          for (const at::Tensor& param : net->parameters()) EXPECT_EQ(is_half(param), half);
        }
        expect_same_state(plain_state(*net), train_in_one(plain, alone, 2, 3), half ? 2e-3 : 1e-6,
                          half ? "fp16" : "fp32");
      }
      EXPECT_GT(bytes[1], 0);
      EXPECT_EQ(bytes[1] * 2, bytes[0]) << by_itself;
    }
  };
  // Where ranks share memory, nothing is sent.
  run_over(Transport::kGloo, 2, run);
}

// A parameter of ones per rank; each gradient changes it by less than fp16 can represent.
struct TinySteps {
  explicit TinySteps(World& world)
      : world(world), optimizer({first, second}, SGDOptions(1e-4), {.broadcast_fp16 = true}) {}

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      for (at::Tensor& param : params()) param.mutable_grad() = torch::ones_like(param);
      optimizer.step();
      ++done;
      for (const at::Tensor& param : params()) EXPECT_TRUE(is_half(param));
    }
  }
  void expect_sum(const std::string& what) {
    const at::Tensor expected = torch::full({4}, 1 - 1e-4 * done, at::kDouble).to(at::kHalf);
    for (const at::Tensor& param : {first, second})
      EXPECT_TRUE(same_values(param.to(at::kHalf), expected)) << what << param;
    expect_replicas(*world.process_group(), params());
  }
  std::vector<at::Tensor> params() { return optimizer.parameters(); }

  World& world;
  at::Tensor first = leaf_of_ones(4);
  at::Tensor second = leaf_of_ones(4);
  OSS<SGD> optimizer;
  int done = 0;
};

TEST(Oss, FS_45_UpdatesBelowFp16AddUp) {
  run_world(2, [](World& world) {
    TinySteps plain(world);
    plain.run(1);
    EXPECT_TRUE(same_values(plain.first, torch::ones({4})));  // not visible yet
    plain.run(29);
    plain.expect_sum("by itself");
    EXPECT_LT(plain.first[0].item<float>(), 0.998);
  });
}

TEST(Oss, FS_45_MastersOutliveNewGroups) {
  run_world(2, [](World& world) {
    TinySteps some(world);
    // The values lie between two of fp16: losing the remainder would show.
    for (int round = 0; round < 6; ++round) {
      some.run(3);
      some.optimizer.add_param_group(OptimizerParamGroup({leaf_of_ones(3)}));
    }
    some.run(3);
    some.expect_sum("after add_param_group()");
  });
}

TEST(Oss, FS_45_MastersOutliveConversions) {
  run_world(2, [](World& world) {
    TinySteps some(world);
    const at::ScalarType dtypes[] = {at::kDouble, at::kFloat, at::kDouble, at::kFloat};
    for (const at::ScalarType dtype : dtypes) {
      some.run(3);
      for (const at::Tensor& param : {some.first, some.second}) {
        param.mutable_grad().reset();
        param.set_data(param.detach().to(dtype));
      }
    }
    some.run(3);
    some.expect_sum("after conversions");
    // A value that the user sets takes precedence.
    some.first.set_data(on_test_device(torch::full({4}, 0.5)));
    some.second.set_data(on_test_device(torch::full({4}, 0.5)));
    some.run(1);
    EXPECT_TRUE(same_values(some.first, torch::full({4}, 0.5)));
    EXPECT_TRUE(same_values(some.second, torch::full({4}, 0.5)));
  });
}

struct OnesImpl : torch::nn::Module {
  OnesImpl()
      : first(register_parameter("first", torch::ones({4}))),
        second(register_parameter("second", torch::ones({4}))) {}
  at::Tensor forward() { return first.sum() + second.sum(); }
  at::Tensor first, second;
};
TORCH_MODULE(Ones);

TEST(Oss, FS_45_MastersOutliveConversionsOfTheModel) {
  run_world(2, [](World& world) {
    Ones net = on_test_device(Ones());
    OSS<SGD> optimizer(net->parameters(), SGDOptions(1e-4), {.broadcast_fp16 = true});
    ShardedDataParallel<Ones> model(net, optimizer);
    const auto run = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        model.forward().backward();
        optimizer.step();
      }
    };
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      run(3);
      model.to(dtype);
      expect_replicas(world, *net);
    }
    run(3);
    const at::Tensor expected = torch::full({4}, 1 - 9e-4, at::kDouble).to(at::kHalf);
    EXPECT_TRUE(same_values(net->first.to(at::kHalf), expected)) << net->first;
    EXPECT_TRUE(same_values(net->second.to(at::kHalf), expected)) << net->second;
    // As wide as the messages: replicas agree at once. (1 - 20e-4 and its value in fp16 differ in
    // bfloat16.)
    run(11);
    model.to(at::kBFloat16);
    expect_replicas(world, *net);
    run(1);
    expect_replicas(world, *net);
  });
}

}  // namespace tessera::testing::oss_precision_test
