// Operators on DistTensors beside those on ordinary tensors, on one rank, with tensors so small
// that the computation costs little: microseconds a call.

#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

#include "benchmarks/seconds.h"
#include "rounds.h"

namespace tessera::micro {
namespace {

using torch::Tensor;

constexpr int kCalls = 2000;

struct Operator {
  std::string name;
  std::function<Tensor(const std::vector<Tensor>&)> run;
  std::vector<std::vector<int64_t>> sizes;
};

std::vector<Operator> operators() {
  return {
      {"add", [](const auto& x) { return x[0] + x[1]; }, {{16, 16}, {16, 16}}},
      {"add_", [](const auto& x) { return x[0].add_(x[1]); }, {{16, 16}, {16, 16}}},
      {"mm", [](const auto& x) { return torch::mm(x[0], x[1]); }, {{16, 16}, {16, 16}}},
      {"addmm",
       [](const auto& x) { return torch::addmm(x[0], x[1], x[2]); },
       {{16}, {16, 16}, {16, 16}}},
      {"view",
       [](const auto& x) {
         return x[0].view({4, 64});
       },
       {{16, 16}}},
      {"transpose", [](const auto& x) { return x[0].transpose(0, 1); }, {{16, 16}}},
      {"gelu", [](const auto& x) { return torch::gelu(x[0]); }, {{16, 16}}},
      {"layer_norm",
       [](const auto& x) { return torch::layer_norm(x[0], {16}, x[1], x[2]); },
       {{16, 16}, {16}, {16}}},
      {"sum", [](const auto& x) { return x[0].sum(); }, {{16, 16}}},
      {"softmax", [](const auto& x) { return torch::softmax(x[0], 1); }, {{16, 16}}},
  };
}

Round rounds_of(const Operator& op) {
  at::set_num_threads(1);
  const auto mesh = DeviceMesh::over_world();
  std::vector<Tensor> plain, dist;
  for (const auto& sizes : op.sizes) {
    plain.push_back(torch::rand(sizes));
    // The first tensor is sharded by rows if it is a matrix; the others are replicated.
    dist.push_back(
        distribute(plain.back().clone(), mesh,
                   {sizes.size() == 2 && dist.empty() ? Placement(Shard{0}) : Replicate{}}));
  }
  return [=]() -> Numbers {
    torch::NoGradGuard no_grad;
    const auto us_of_call = [&](const std::vector<Tensor>& inputs) {
      return 1e6 / kCalls * seconds_of([&] {
               for (int i = 0; i < kCalls; ++i) op.run(inputs);
             });
    };
    const double plain_us = us_of_call(plain), dist_us = us_of_call(dist);
    return {{"plain_us", plain_us}, {"dist_us", dist_us}, {"beyond_us", dist_us - plain_us}};
  };
}

}  // namespace

void add_dispatch() {
  for (const Operator& op : operators())
    add_rounds("dispatch/" + op.name, [op] { return rounds_of(op); });
}

}  // namespace tessera::micro
