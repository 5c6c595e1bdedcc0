// Calls that must not compile, each with a part of the error that says what to write. This file is
// read by refused_calls.py and is no part of the build.
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/sharded_optimizer.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

namespace tessera {

struct Net : torch::nn::Module {};

void calls_that_work(const std::shared_ptr<Net>& net) {
  fully_shard(net, {});
  fully_shard(std::shared_ptr<torch::nn::Module>(net), {.level = ShardLevel::kGradients});
  torch::nn::Sequential holder(torch::nn::Linear(2, 2));
  fully_shard(holder, {});
  torch::optim::AdamW adamw(net->parameters());
  ShardedOptimizer optimizer(fully_shard(net), adamw);
  torch::optim::StepLR scheduler(optimizer, 10, 0.5);
}

void calls_that_do_not(const std::shared_ptr<Net>& net) {
  Net value;
  fully_shard(value);                        // error: takes a std::shared_ptr: auto net =
  fully_shard(Net(), {});                    // error: takes a std::shared_ptr: auto net =
  fully_shard(*net);                         // the same instance as the first
  fully_shard(net.get());                    // error: not a pointer: auto net =
  fully_shard(std::make_unique<Net>());      // error: not a unique_ptr: fully_shard(
  fully_shard(net, ShardLevel::kGradients);  // error: the level is a field of the plan
  auto sharded = fully_shard(net);
  torch::save(sharded, "model.pt");  // error: call save_checkpoint(
  torch::load(sharded, "model.pt");  // error: call load_checkpoint(
  torch::optim::AdamW adamw(net->parameters());
  ShardedOptimizer optimizer(sharded, adamw);
  torch::save(optimizer, "optimizer.pt");  // error: call save_checkpoint(
  torch::load(optimizer, "optimizer.pt");  // error: call load_checkpoint(
}

}  // namespace tessera
