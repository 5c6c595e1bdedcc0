#pragma once

#include <tessera/tensor/placement.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

/// An operator, or a short sequence of some, on inputs of `sizes`.
struct OperatorCase {
  std::string name;
  std::vector<std::vector<int64_t>> sizes;
  std::function<at::Tensor(const Tensors&)> run;
  bool differentiable = true;
  bool takes_strided = true;  ///< inputs that are not contiguous
};

/// Whole numbers from 0 to `count - 1` that depend on the values of `like` and have its placements.
at::Tensor whole_numbers(const at::Tensor& like, int64_t count);

/// How many combinations of placements of the inputs are tried on a mesh of several dims: about 25
/// of each case, the same in every run, or all of them, which takes minutes. On a line it is always
/// all. Gradients of the result take turns; or with `kEvery`, each combination is tried with each
/// placement of the gradient, and every second time with parts that are strided.
enum class Combinations { kSample, kAll, kEvery };

/// Runs each case, forward and backward, on DistTensors over a mesh of this shape, with the
/// combinations of `Replicate`, `Partial(sum)` and every `Shard` for the inputs, and expects the
/// results of ordinary tensors. On a line also of `Replicate` and every `Shard` split by 2.
void expect_as_plain(const std::vector<OperatorCase>& cases, const std::vector<int64_t>& mesh_shape,
                     Combinations combinations = Combinations::kSample);

/// Expects of an operator, an expression of the tensors `x`, the results and gradients of ordinary
/// tensors: for inputs of each list of sizes, with every placement of the inputs and of the
/// gradient, on lines of 2 and of 3 ranks, with a rank outside of the mesh. Inputs are real
/// numbers; an operator that is not differentiable is run forward alone.
///
///     EXPECT_RULE(torch::mm(x[0], x[1]), {{5, 4}, {4, 3}}, {{1, 2}, {2, 0}});
#define EXPECT_RULE(op, ...)       \
  ::tessera::testing::expect_rule( \
      #op, {__VA_ARGS__},          \
      [&]([[maybe_unused]] const ::tessera::testing::Tensors& x) -> at::Tensor { return op; })
void expect_rule(const std::string& name,
                 const std::vector<std::vector<std::vector<int64_t>>>& samples,
                 const std::function<at::Tensor(const Tensors&)>& run);

/// The most that a case may send on two ranks, if its inputs have these placements.
struct QuietCase {
  OperatorCase test;
  Placements placements;  ///< one for each input
  int64_t forward = 0;    ///< collectives until the output is no pending reduction
  int64_t backward = 0;   ///< those until the gradients are placed as their inputs
  int64_t bytes = 0;      ///< by each rank, in both together
};

/// Expects no more than that, and the values and gradients of ordinary tensors.
void expect_quiet(const std::vector<QuietCase>& cases);

}  // namespace tessera::testing
