#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "benchmarks/loop.h"

namespace tessera::tools {

struct Batch {
  torch::Tensor inputs;
  torch::Tensor targets;
};

/// A model of the step benchmark, with its loss.
class BenchModel : public torch::nn::Module {
 public:
  explicit BenchModel(const LoopSwitches& switches) : switches_(switches) {}
  virtual torch::Tensor loss(const Batch& batch) = 0;

 protected:
  /// Returns the output of a block for `x`, with the loop's `checkpoint` and `dropout`.
  template <class Block>
  torch::Tensor pass(Block& block, const torch::Tensor& x);

 private:
  LoopSwitches switches_;
};

/// Makes the model of a workload (`tiny`, `small`, `medium` or `mlp`) with its initial values.
/// They are fixed to the bit.
///
/// The values come from a generator of their own in the order of `named_parameters()`, so that any
/// framework with LibTorch's random numbers can make the same ones. With the switch `bf16` they are
/// rounded.
std::shared_ptr<BenchModel> make_bench_model(const std::string& workload,
                                             const LoopSwitches& switches = {});

/// The matrices that AdamW steps beside Muon: embeddings and the head.
const std::vector<std::string>& muon_exceptions();

/// The batches that one rank trains on, one after the other, fixed to the bit as well.
class BatchStream {
 public:
  BatchStream(std::string workload, int rank);
  Batch next();

 private:
  std::string workload_;
  at::Generator generator_;
};

}  // namespace tessera::tools
