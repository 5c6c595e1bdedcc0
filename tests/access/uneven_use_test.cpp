// Ranks that use different parts of a model from step to step.
#include <gtest/gtest.h>

#include "model/sharded_state.h"
#include "support/models.h"
#include "support/run_world.h"

namespace tessera {
namespace uneven_use_test {

using namespace testing;

// A layer that is used by one rank in one step and by another in the next. The layer that is
// registered second is used first, so the order of use is not that of registration.
struct Alternating : Net {
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::gelu(second(torch::gelu(first(x))));
    if (rank == step % 2) x = x + sometimes(x);
    return last(x);
  }
  torch::nn::Linear second = register_module("second", torch::nn::Linear(37, 37));
  torch::nn::Linear first = register_module("first", torch::nn::Linear(37, 37));
  torch::nn::Linear sometimes = register_module("sometimes", torch::nn::Linear(37, 37));
  torch::nn::Linear unused = register_module("unused", torch::nn::Linear(37, 37));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(37, 5));
};

TEST(UnevenUse, ALayerMayBeUsedByAnotherRankInEachStep) {
  for (const int ranks : {2, 3}) {
    for (const int64_t unit_bytes : {int64_t{0}, int64_t{6000}}) {
      for (const int prefetch : {0, 1, 2}) {
        expect_parity(sgd_run<Alternating>(), ranks,
                      {.unit_bytes = unit_bytes, .prefetch = prefetch}, "alternating");
      }
    }
  }
}

}  // namespace uneven_use_test
}  // namespace tessera
