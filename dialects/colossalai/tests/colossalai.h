#pragma once

// Small models and training runs for the tests of ColossalAI's names.
#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "support/counted.h"
#include "support/models.h"

namespace tessera::testing {

using colossalai::BucketTensorShardStrategy;
using colossalai::no_shard_zero_context;
using colossalai::ShardedModelV2;
using colossalai::ShardedModelV2Options;
using colossalai::ShardedOptimizerV2;
using colossalai::ShardedOptimizerV2Options;
using colossalai::ShardedOptimizerV2State;
using colossalai::ShardStrategyPtr;
using colossalai::TensorShardStrategy;
using colossalai::ZeroInitContext;
using colossalai::ZeroInitOptions;

/// Linear layers of odd sizes, buffers of two dtypes.
struct TowerImpl : torch::nn::Module {
  TowerImpl()
      : first(register_module("first", torch::nn::Linear(6, 13))),
        second(register_module("second", torch::nn::Linear(13, 13))),
        last(register_module("last", torch::nn::Linear(13, 3))),
        offset(register_buffer("offset", torch::full({3}, 0.5))),
        calls(register_buffer("calls", torch::zeros({}, torch::kLong))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::tanh(second(torch::tanh(first(x))))) + offset;
  }
  torch::nn::Linear first, second, last;
  at::Tensor offset, calls;
};
TORCH_MODULE(Tower);

/// Each of its layers is used twice in a forward.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl()
      : in(register_module("in", torch::nn::Linear(6, 12))),
        out(register_module("out", torch::nn::Linear(12, 6))),
        head(register_module("head", torch::nn::Linear(6, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = x;
    for (int i = 0; i < 2; ++i) y = torch::tanh(out(torch::tanh(in(y))));
    return head(y);
  }
  torch::nn::Linear in, out, head;
};
TORCH_MODULE(Twice);

/// A module with children that has parameters itself.
struct NoLeafImpl : torch::nn::Module {
  NoLeafImpl()
      : proj1(register_module("proj1", torch::nn::Linear(6, 9))),
        weight(register_parameter("weight", torch::randn({9, 9}) / 3)),
        proj2(register_module("proj2", torch::nn::Linear(9, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return proj2(torch::tanh(torch::nn::functional::linear(proj1(x), weight)));
  }
  torch::nn::Linear proj1;
  at::Tensor weight;
  torch::nn::Linear proj2;
};
TORCH_MODULE(NoLeaf);

inline const ShardStrategyPtr kTensor = std::make_shared<TensorShardStrategy>();
inline const ShardStrategyPtr kBucket = std::make_shared<BucketTensorShardStrategy>();
inline const ZeroInitOptions kFloatShards = {.shard_param = true, .param_dtype = torch::kFloat};

/// With this scale, half gradients of these losses do not overflow.
inline const ShardedOptimizerV2Options kSmallScale = {.initial_scale = 256};

/// A net built in a context, from values that depend on `seed` alone. It goes to the
/// `test_device()` when it is sharded.
template <class Net>
Net zero_net(const ZeroInitOptions& options = {.shard_param = true},
             const ShardStrategyPtr& strategy = kTensor, uint64_t seed = 3) {
  manual_seed(seed);
  ZeroInitContext context(test_device(), strategy, options);
  return Net();
}
template <class Net>
Net eager_net(uint64_t seed = 3) {
  return seeded(seed, [] { return Net(); });
}

inline Batch tower_batch(int64_t step) { return global_batch(step, 12, 6, 3); }

template <class Model>
at::Tensor tower_loss(Model& model, int64_t step, int rank, int size) {
  const Batch batch = tower_batch(step);
  const at::Tensor y = model.forward(rows_of(batch.x, rank, size));
  return torch::mse_loss(y.to(torch::kFloat), rows_of(batch.y, rank, size));
}

/// Trains `steps` steps in one process that sees the rows of `ranks` ranks; returns the state.
template <class Net>
std::vector<NamedTensor> train_tower_alone(Net& net, torch::optim::Optimizer& optimizer, int ranks,
                                           int steps = 4, double max_norm = 0) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank)
      (tower_loss(net, step, rank, ranks) / ranks).backward();
    if (max_norm > 0) torch::nn::utils::clip_grad_norm_(net.parameters(), max_norm);
    optimizer.step();
  }
  return plain_state(net);
}

template <class Net>
std::vector<NamedTensor> train_tower(ShardedModelV2<Net>& model, ShardedOptimizerV2& optimizer,
                                     const World& world, int steps = 4, double max_norm = 0) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    optimizer.backward(tower_loss(model, step, world.rank(), world.size()));
    if (max_norm > 0) optimizer.clip_grad_norm(model, max_norm);
    EXPECT_TRUE(optimizer.step());
  }
  return model.state_dict();
}

template <class Net>
torch::optim::AdamW adam_of(Net& net) {
  return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(0.01));
}

/// Expects that all ranks have the same bits.
inline void expect_same_bits(World& world, const std::vector<NamedTensor>& state) {
  std::string bytes;
  for (const NamedTensor& item : state) {
    const at::Tensor value = item.tensor.cpu().contiguous();
    bytes.append(static_cast<const char*>(value.data_ptr()), value.nbytes());
  }
  for (const std::string& other :
       all_gather_bytes(*world.process_group(), bytes, {"replicas", Channel::kControl}))
    EXPECT_TRUE(other == bytes) << "ranks differ";
}

}  // namespace tessera::testing
