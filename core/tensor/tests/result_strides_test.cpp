// Results of operators on DistTensors have the strides that one process would give them.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::result_strides_test {

using Tensors = std::vector<at::Tensor>;

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

at::Tensor by_columns(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return numbers(std::move(sizes), seed).mT().contiguous().mT();
}

at::Tensor channels_last(std::vector<int64_t> sizes) {
  return numbers(std::move(sizes)).contiguous(at::MemoryFormat::ChannelsLast);
}

struct Case {
  std::string name;
  Tensors inputs;
  std::function<Tensors(const Tensors&)> run;
};

Tensors convolve(const Tensors& x) {
  const std::vector<int64_t> ones(x[0].dim() - 2, 1), zeros(x[0].dim() - 2, 0);
  const at::Tensor y = torch::convolution(x[0], x[1], {}, ones, ones, ones, false, zeros, 1);
  const auto [input, weight, bias] = torch::convolution_backward(
      y, x[0], x[1], std::nullopt, ones, ones, ones, false, zeros, 1, {true, true, false});
  return {y, input, weight};
}

std::vector<Case> cases() {
  const auto mse = [](const Tensors& x) {
    return Tensors{torch::mse_loss_backward(x[0], x[0], x[1], 0),
                   torch::smooth_l1_loss_backward(x[0], x[0], x[1], 0, 1),
                   torch::huber_loss_backward(x[0], x[0], x[1], 0, 1)};
  };
  return {
      {"lines", {numbers({2, 3, 7}), numbers({4, 3, 3})}, convolve},
      {"lines by columns", {by_columns({2, 3, 7}), by_columns({4, 3, 3})}, convolve},
      {"images", {numbers({2, 3, 6, 5}), numbers({4, 3, 3, 3})}, convolve},
      {"images of channels", {channels_last({2, 3, 6, 5}), numbers({4, 3, 3, 3})}, convolve},
      {"filters of channels", {numbers({2, 3, 6, 5}), channels_last({4, 3, 3, 3})}, convolve},
      {"solids", {numbers({2, 3, 4, 6, 5}), numbers({4, 3, 3, 3, 3})}, convolve},
      {"losses", {by_columns({4, 5}), by_columns({4, 5}, 2)}, mse},
      {"padded channels",
       {channels_last({2, 4, 6, 5})},
       [](const Tensors& x) {
         return Tensors{torch::reflection_pad2d(x[0], {1, 1, 1, 1}), torch::pixel_shuffle(x[0], 2),
                        torch::replication_pad2d(x[0], {1, 1, 1, 1})};
       }},
      {"norms",
       {by_columns({4, 3, 5})},
       [](const Tensors& x) {
         return Tensors{torch::batch_norm(x[0], {}, {}, {}, {}, true, 0.1, 1e-5, false),
                        x[0].masked_fill(x[0] > 0, 1), x[0].mvlgamma(1), torch::pow(2, x[0])};
       }},
      {"softmax along the cut",
       {by_columns({4, 5})},
       [](const Tensors& x) {
         const at::Tensor y = x[0].softmax(0), z = x[0].log_softmax(0);
         return Tensors{y, z, torch::_softmax_backward_data(x[0], y, 0, at::kFloat),
                        torch::_log_softmax_backward_data(x[0], z, 0, at::kFloat)};
       }},
      {"angles",
       {torch::complex(by_columns({4, 5}), by_columns({4, 5}, 2)), by_columns({4, 5})},
       [](const Tensors& x) {
         return Tensors{x[0].angle(), x[1].angle()};
       }},
      {"filled diagonals",
       {numbers({3, 4, 2})},
       [](const Tensors& x) {
         return Tensors{x[0].diagonal().index_fill(0, torch::tensor({1}), 3)};
       }},
      {"pooled lines",
       {by_columns({2, 3, 6})},
       [](const Tensors& x) { return Tensors{torch::max_pool1d(x[0], 2)}; }},
      {"log_sigmoid",
       {by_columns({4, 5})},
       [](const Tensors& x) { return Tensors{torch::log_sigmoid(x[0])}; }},
      {"conditions",
       {by_columns({4, 5}), by_columns({4, 5}, 2)},
       [](const Tensors& x) {
         return Tensors{x[0].logical_and(x[1]), torch::where(x[0] > 0, x[0], x[1]),
                        torch::logaddexp(x[0], x[1]), x[0].div(x[1], "floor")};
       }},
      {"broadcast",
       {numbers({3, 1, 5}), by_columns({4, 5})},
       [](const Tensors& x) {
         return Tensors{x[0].logical_or(x[1]),    x[0] + x[1],
                        torch::rsub(x[0], x[1]),  torch::heaviside(x[0], x[1]),
                        torch::ldexp(x[0], x[1]), torch::where(x[0] > 0, x[0], x[1])};
       }},
  };
}

TEST(ResultStrides, AreThoseOfOneProcess) {
  TESSERA_ON_HOST_ONLY("kernels of other devices lay results out as they like");
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 1}, {"d"});
    for (const Case& test : cases()) {
      SCOPED_TRACE(test.name);
      for (const Placement& placement : {Placement{Replicate{}}, Placement{Shard{0}}}) {
        Tensors inputs;
        for (const at::Tensor& input : test.inputs)
          inputs.push_back(distribute(input, mesh, {placement}));
        const Tensors plain = test.run(test.inputs), dist = test.run(inputs);
        for (size_t i = 0; i < plain.size(); ++i)
          EXPECT_EQ(dist[i].strides(), plain[i].strides()) << i;
      }
    }
  });
}

// Numbers are drawn in the order of memory.
TEST(ResultStrides, NumbersLikeAResultAreThoseOfOneProcess) {
  TESSERA_ON_HOST_ONLY("kernels of other devices lay results out as they like");
  run_world(2, [](World&) {
    for (const Case& test : cases()) {
      SCOPED_TRACE(test.name);
      const auto run = [&](const Tensors& inputs) {
        const auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
        return test.run(inputs)[0].to(at::kFloat).normal_(0, 1, generator);
      };
      Tensors inputs;
      for (const at::Tensor& input : test.inputs)
        inputs.push_back(distribute(input, DeviceMesh::over_world(), {Shard{0}}));
      EXPECT_TRUE(torch::equal(full_tensor(run(inputs)), run(test.inputs)));
    }
  });
}

}  // namespace tessera::result_strides_test
