#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/models.h"

namespace tessera::testing {

/// Equal layers without biases: forward keeps the inputs of each layer and of its activation.
struct EvenStack : Net {
  EvenStack(int64_t width, int64_t layers) {
    for (int64_t i = 0; i < layers; ++i) {
      fcs.push_back(
          register_module("fc" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false))));
    }
  }
  torch::Tensor forward(torch::Tensor x) override {
    for (auto& fc : fcs) x = torch::gelu(fc->forward(x));
    return x;
  }
  std::vector<torch::nn::Linear> fcs;
};

}  // namespace tessera::testing
