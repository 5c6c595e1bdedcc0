#pragma once

#include <torch/torch.h>

#include <set>
#include <vector>

namespace tessera::testing {

/// The parameters of a module, tied ones once, as optimizers want them: LibTorch's SGD steps a
/// parameter twice if it is listed twice.
inline std::vector<torch::Tensor> distinct_parameters(const torch::nn::Module& module) {
  std::vector<torch::Tensor> parameters;
  std::set<const void*> seen;
  for (const torch::Tensor& parameter : module.parameters())
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters.push_back(parameter);
  return parameters;
}

}  // namespace tessera::testing
