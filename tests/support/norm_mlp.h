#pragma once

// A small model, and the sharding of it that needs the fewest messages.
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/test_device.h"

namespace tessera::testing {

namespace nn = torch::nn;

struct NormMlpImpl : nn::Module {
  NormMlpImpl()
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})))),
        up(register_module("up", nn::Linear(6, 10))),
        down(register_module("down", nn::Linear(10, 6))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(NormMlp);

inline NormMlp make_norm_mlp() {
  NormMlp mlp;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  torch::NoGradGuard no_grad;
  for (at::Tensor& parameter : mlp->parameters()) parameter.normal_(0, 0.5, generator);
  return testing::on_test_device(mlp);
}

/// Shards the first matrix by columns, the second by rows: nothing is sent between them. `outer`:
/// placements along the mesh dims before the one that shards.
inline void shard_columns_then_rows(NormMlp& mlp, const DeviceMesh& mesh,
                                    const Placements& outer = {}) {
  const auto placed = [&](Placement inner) {
    Placements placements = outer;
    placements.push_back(inner);
    return placements;
  };
  distribute_(mlp->up->weight, mesh, placed(Shard{0}));
  distribute_(mlp->up->bias, mesh, placed(Shard{0}));
  distribute_(mlp->down->weight, mesh, placed(Shard{1}));
  distribute_(mlp->down->bias, mesh, placed(Replicate{}));
  distribute_(mlp->norm->weight, mesh, placed(Replicate{}));
  distribute_(mlp->norm->bias, mesh, placed(Replicate{}));
}

}  // namespace tessera::testing
