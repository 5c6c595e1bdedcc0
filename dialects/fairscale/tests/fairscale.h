#pragma once

// Small models and training runs for the tests of FairScale's names.
#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/counted.h"
#include "support/models.h"

namespace tessera::testing {

using fairscale::AnyOss;
using fairscale::OSS;
using fairscale::OssOptions;
using fairscale::ShardedDataParallel;
using fairscale::ShardedDataParallelOptions;
using fairscale::ShardedGradScaler;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// Three Linear layers of odd sizes and a BatchNorm for its buffers.
struct NormNetImpl : torch::nn::Module {
  explicit NormNetImpl(int64_t width = 13)
      : first(register_module("first", torch::nn::Linear(6, width))),
        norm(register_module("norm", torch::nn::BatchNorm1d(width))),
        second(register_module("second", torch::nn::Linear(width, width))),
        last(register_module("last", torch::nn::Linear(width, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::relu(second(torch::relu(norm(first(x))))));
  }
  int64_t banana() const { return 7; }
  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear second, last;
};
TORCH_MODULE(NormNet);

/// The same without buffers, so that ranks and one process compute the same.
struct PlainNetImpl : torch::nn::Module {
  PlainNetImpl()
      : first(register_module("first", torch::nn::Linear(6, 11))),
        second(register_module("second", torch::nn::Linear(11, 9))),
        last(register_module("last", torch::nn::Linear(9, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::tanh(second(torch::tanh(first(x)))));
  }
  torch::nn::Linear first, second, last;
};
TORCH_MODULE(PlainNet);

/// A leaf of ones that requires a gradient.
inline at::Tensor leaf_of_ones(int64_t numel) {
  return on_test_device(torch::ones({numel})).requires_grad_();
}

/// A net whose values depend on `seed` alone.
template <class Net>
Net make_net(uint64_t seed = 3) {
  return seeded(seed, [] { return Net(); });
}

inline Batch batch_of(int64_t step, int64_t rows = 12) { return global_batch(step, rows, 6, 3); }

/// The loss of one rank's rows of a batch, computed in `dtype`.
template <class Model>
at::Tensor loss_of(Model& model, int64_t step, int rank, int size,
                   at::ScalarType dtype = at::kFloat) {
  const Batch batch = batch_of(step);
  return torch::mse_loss(model.forward(rows_of(batch.x, rank, size).to(dtype)),
                         rows_of(batch.y, rank, size).to(dtype));
}

/// Gradients by name, in host memory: a rank that reads another device waits for the work queued
/// there, and that may wait for the rank.
template <class Net>
std::map<std::string, at::Tensor> gradients_on_host(const Net& net) {
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : net->named_parameters())
    if (item.value().grad().defined()) gradients[item.key()] = item.value().grad().cpu();
  return gradients;
}

/// Takes the steps from `first` to `last` on the batches of `ranks` ranks in one process.
template <class Model>
void train_plain(Model& net, torch::optim::Optimizer& optimizer, int ranks, int first, int last) {
  for (int step = first; step < last; ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < ranks; ++rank) (loss_of(net, step, rank, ranks) / ranks).backward();
    optimizer.step();
  }
}
/// The same from the start; returns the state.
template <class Net>
State train_in_one(Net& net, torch::optim::Optimizer& optimizer, int ranks, int steps = 4) {
  train_plain(*net, optimizer, ranks, 0, steps);
  return plain_state(*net);
}

/// This rank's part of these steps.
template <class Model>
void train_sharded(Model& model, AnyOss& optimizer, const World& world, int first, int last) {
  for (int step = first; step < last; ++step) {
    optimizer.zero_grad();
    loss_of(model, step, world.rank(), world.size()).backward();
    optimizer.step();
  }
}
template <class Model>
State train(Model& model, AnyOss& optimizer, const World& world, int steps = 4) {
  train_sharded(model, optimizer, world, 0, steps);
  return plain_state(model.module());
}

/// Expects that all ranks of the group have the same bits.
inline void expect_replicas(ProcessGroup& group, const std::vector<at::Tensor>& tensors) {
  std::string bytes;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor value = tensor.detach().cpu().clone(at::MemoryFormat::Contiguous);
    bytes.append(static_cast<const char*>(value.data_ptr()), value.nbytes());
  }
  for (const std::string& other : all_gather_bytes(group, bytes, {"replicas", Channel::kControl}))
    EXPECT_TRUE(other == bytes) << "ranks differ";
}
/// Compares the parameters of a module. (Buffers are equal only from the next forward on.)
inline void expect_replicas(World& world, torch::nn::Module& module) {
  expect_replicas(*world.process_group(), module.parameters());
}

/// Averages the gradients of `params` over the ranks of the group, as users of an OSS by itself
/// have to.
inline void average_gradients(ProcessGroup& group, const std::vector<at::Tensor>& params) {
  for (const at::Tensor& param : params) {
    if (!param.grad().defined()) continue;
    group.all_reduce(param.grad(), ReduceOp::kSum, {"gradients", Channel::kGrads})->wait();
    param.grad().div_(group.size());
  }
}

/// Takes a step of an OSS by itself on the batch of `step`.
template <class Model>
void step_alone(Model& net, AnyOss& optimizer, ProcessGroup& group, int step) {
  optimizer.zero_grad();
  loss_of(net, step, group.rank(), group.size()).backward();
  average_gradients(group, net.parameters());
  optimizer.step();
}

}  // namespace tessera::testing
