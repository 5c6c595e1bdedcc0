#pragma once

#include <tessera/placement.h>
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
};

/// Whole numbers from 0 to `count - 1` that depend on the values of `like` and lie as it does.
at::Tensor whole_numbers(const at::Tensor& like, int64_t count);

/// Which combinations of placements are tried: all, or a sample of a few hundred where there are
/// more, the same in every run.
enum class Combinations { kSample, kAll };

/// Runs each case, forward and backward, on DistTensors over a mesh of this shape, with the
/// combinations of `Replicate`, `Partial(sum)` and every `Shard` for the inputs, and expects what
/// it gives on ordinary tensors.
void expect_as_plain(const std::vector<OperatorCase>& cases, const std::vector<int64_t>& mesh_shape,
                     Combinations combinations = Combinations::kSample);

/// What a case sends on two ranks if its inputs have the placements: all-reduces and nothing else.
struct QuietCase {
  OperatorCase test;
  Placements placements;  ///< one for each input
  int64_t forward = 0;    ///< all-reduces until the output is whole
  int64_t backward = 0;   ///< those of the gradients, with that of the output whole
  int64_t bytes = 1024;   ///< at most, in both together
};

/// Expects that, and that values and gradients are those of ordinary tensors.
void expect_quiet(const std::vector<QuietCase>& cases);

}  // namespace tessera::testing
