// Ranks that use different parts of a model from step to step.
#include <gtest/gtest.h>

#include "access/sharded_state.h"
#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace {

using namespace testing;

struct Holder : torch::nn::Module {
  Holder(const torch::Tensor& value, bool requires_grad)
      : value(register_parameter("value", value, requires_grad)) {}
  torch::Tensor value;
};

// A layer that is used by one rank in one step and by another in the next, among units whose order
// of use is not that of registration.
struct Alternating : Net {
  Alternating() {
    const auto linear = [&](const std::string& name, int64_t in, int64_t out) {
      return register_module(name, torch::nn::Linear(in, out));
    };
    const auto parameter = [&](const std::string& name, const torch::Tensor& value,
                               bool requires_grad = true) {
      return register_module(name, std::make_shared<Holder>(value, requires_grad))->value;
    };
    first = linear("first", 37, 37);
    tied = parameter("tied", first->weight);
    frozen = parameter("frozen", torch::randn({37}), false);
    empty = parameter("empty", torch::empty({0}));
    sometimes = linear("sometimes", 37, 37);
    unused = linear("unused", 37, 37);
    wide = linear("wide", 37, 2000);
    half = parameter("half", torch::randn({2000, 37}).mul(0.002).to(torch::kBFloat16));
    last = linear("last", 37, 5);
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::gelu(first(x)).matmul(tied) + frozen + empty.sum();
    if (rank == step % 2) x = x + sometimes(x);
    x = torch::gelu(wide(x)).to(torch::kBFloat16).matmul(half).to(torch::kFloat);
    return last(x);
  }
  torch::nn::Linear first{nullptr}, sometimes{nullptr}, unused{nullptr}, wide{nullptr},
      last{nullptr};
  torch::Tensor tied, empty, half, frozen;
};

TEST(UnevenUse, ALayerMayBeUsedByAnotherRankInEachStep) {
  for (const int ranks : {2, 3}) {
    for (const int64_t unit_bytes : {int64_t{0}, int64_t{6000}}) {
      for (const int prefetch : {0, 1, 2}) {
        auto run = sgd_run<Alternating>();
        run.make_optimizer = [](Net& net) {
          auto params = net.parameters();
          params.erase(params.begin() + 2);  // "tied" again
          return std::make_unique<torch::optim::SGD>(
              params, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
        };
        run.steps = 3;
        // Sums go through bfloat16.
        expect_parity(run, ranks, {.unit_bytes = unit_bytes, .prefetch = prefetch}, "alternating",
                      {.fused = false}, 0.02);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
