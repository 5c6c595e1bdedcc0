#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>
#include <tessera/tensor/device_mesh.h>
#include <tessera/tensor/placement.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera {

// Tensor parallelism by a plan, as `torch.distributed.tensor.parallel` has it:
//
//     tessera::parallelize_module(*model, mesh, {
//         {"layers.*.attention.w[qkv]", tessera::ColwiseParallel{}},
//         {"layers.*.attention.wo", tessera::RowwiseParallel{}},
//     });
//
// A style places the parameters of a module, and the tensors that go in and out. Placements are
// those along one mesh dim; along other dims, parameters are replicated and activations keep their
// placements. Negative dims of a `Shard` count from the end.
//
// Modules pass DistTensors to each other. An ordinary tensor that goes into a module counts as
// whole, as in all operators on DistTensors, unless the style's `input` is given: then it is this
// rank's part (all parts of one size) of a tensor with that placement.

/// Cuts the columns of the result: of a `torch::nn::Linear` the rows of the weight and the bias
/// (Shard(0)), of a `torch::nn::Embedding` the features (Shard(1)). The input is replicated.
struct ColwiseParallel {
  std::optional<Placement> input;  ///< of ordinary tensors
  Placement output = Shard{-1};
  bool operator==(const ColwiseParallel&) const = default;
};

/// Cuts what is summed over: of a `torch::nn::Linear` the columns of the weight (Shard(1)), with a
/// replicated bias, and the last dim of the input; of a `torch::nn::Embedding` the vocabulary
/// (Shard(0)), with replicated indices. Results are terms of a sum: `Replicate` reduces it by an
/// all-reduce, a `Shard` by a reduce-scatter; `Partial` leaves them to later operators.
struct RowwiseParallel {
  std::optional<Placement> input;  ///< of ordinary tensors
  Placement output = Replicate{};
  bool operator==(const RowwiseParallel&) const = default;
};

/// Replicates the parameters of a module, such as a norm, and shards its input and output along
/// `dim`, the sequence. With an `output` of `Replicate`, modules that read it share one all-gather.
struct SequenceParallel {
  int64_t dim = 1;
  std::optional<Placement> output = std::nullopt;  ///< none: `Shard{dim}`
  std::optional<Placement> input = std::nullopt;   ///< of ordinary tensors
  bool operator==(const SequenceParallel&) const = default;
};

/// Redistributes the input of a module that has a weight of its own. Its parameters stay as they
/// are placed; ordinary ones are replicated.
struct PrepareModuleInput {
  std::optional<Placement> input;  ///< of ordinary tensors
  Placement desired_input = Replicate{};
  bool operator==(const PrepareModuleInput&) const = default;
};

/// Redistributes the output of a module that has a weight of its own.
struct PrepareModuleOutput {
  Placement desired_output = Replicate{};
  bool operator==(const PrepareModuleOutput&) const = default;
};

using ParallelStyle = std::variant<ColwiseParallel, RowwiseParallel, SequenceParallel,
                                   PrepareModuleInput, PrepareModuleOutput>;

/// Patterns of dotted module names, each with a style for all modules that it matches. Each part
/// between dots matches one part of a name, as a shell matches file names (`*`, `?`, `[ab]`,
/// `[!a]`); `**` matches any number of parts. The empty pattern is the module itself.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

/// Places the parameters of `module` on `mesh` as the plan's styles say, by `distribute_module()`:
/// the rest is replicated. From then on, its inner modules redistribute their inputs and outputs;
/// see `set_module_functions()`. `mesh_dim` may be left out for a mesh of one dim.
///
/// Collective over `mesh`; ranks that are not in it may call it. Values of parameters must be equal
/// on all ranks. Throws `c10::ValueError` on all ranks, and changes nothing: for a mesh of several
/// dims without `mesh_dim`; a pattern that matches no module; a module that two entries match, or
/// that was parallelized before; a module that the style can't place (`ColwiseParallel` and
/// `RowwiseParallel` know `torch::nn::Linear` and `torch::nn::Embedding`; the others need a module
/// with a parameter `weight` of its own); modules that share a parameter and place it differently;
/// plans that differ between ranks. **Memory**: as `distribute_module()`.
TESSERA_API void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh,
                                    const ParallelPlan& plan,
                                    std::optional<int64_t> mesh_dim = std::nullopt);

/// Returns the tensor that takes the place of `tensor`. `mesh` is that of the module's weight.
using ModuleFunction = std::function<at::Tensor(const at::Tensor& tensor, const DeviceMesh& mesh)>;

/// Lets `input` replace the input of `module`, and `output` its output, whenever it is called:
/// also by other modules. Either may be empty. Replaces the functions that a style or an earlier
/// call has set; without any, removes them. Local; all ranks must set equal functions.
///
/// `module` must have a DistTensor `weight` of its own. C++ modules have no hooks: the functions
/// are called around the operator that gets the weight. For `torch::nn::Linear` that is `linear`,
/// `matmul` or `addmm` with the weight or its transpose `t()`; for `torch::nn::Embedding`
/// `embedding`; for other modules these, norms (layer, RMS, group, batch, instance) and
/// convolutions. A module that applies its weight by another operator, such as a norm that
/// multiplies by it, does not call them. As LibTorch's Linear adds its bias in place after
/// `matmul`, `output` gets the product without it, unless the input is a matrix: it should change
/// placements, not values.
///
/// Both are differentiated, called in every mode (also without gradients), and may call other
/// modules. They are kept if the weight is redistributed, sharded by `fully_shard()` or
/// distributed again, and lost if it is unwrapped or cloned. Throws `c10::ValueError` for a module
/// without such a weight.
TESSERA_API void set_module_functions(torch::nn::Module& module, ModuleFunction input,
                                      ModuleFunction output = {});

}  // namespace tessera
