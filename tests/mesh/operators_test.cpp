// Operators on DistTensors, forward and backward, against the same on ordinary tensors: each on all
// combinations of placements of its inputs.

#include <gtest/gtest.h>
#include <tessera/dist_tensor.h>
#include <torch/torch.h>

#include <functional>

#include "support/run_world.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;
namespace F = torch::nn::functional;

struct Case {
  std::string name;
  std::vector<std::vector<int64_t>> sizes;  // of the inputs
  std::function<at::Tensor(const Tensors&)> run;
  bool differentiable = true;
};

at::Tensor indices(const at::Tensor& like) { return (like * 0).to(at::kLong); }

std::vector<Case> elementwise_cases() {
  return {
      {"add", {{5, 4}, {5, 4}}, [](const Tensors& x) { return x[0] + x[1]; }},
      {"add broadcasts", {{5, 4}, {4}}, [](const Tensors& x) { return x[0] + x[1]; }},
      {"add broadcasts ones", {{5, 1, 4}, {3, 1}}, [](const Tensors& x) { return x[0] + x[1]; }},
      {"add a number", {{5, 4}}, [](const Tensors& x) { return x[0] + 3; }},
      {"sub", {{5, 4}, {5, 4}}, [](const Tensors& x) { return x[0] - 2 * x[1]; }},
      {"mul", {{5, 4}, {5, 1}}, [](const Tensors& x) { return x[0] * x[1]; }},
      {"div", {{5, 4}, {4}}, [](const Tensors& x) { return x[0] / (x[1] * x[1] + 1); }},
      {"neg", {{3}}, [](const Tensors& x) { return -x[0]; }},
      {"relu", {{5, 4}}, [](const Tensors& x) { return torch::relu(x[0]); }},
      {"gelu", {{5, 4}}, [](const Tensors& x) { return torch::gelu(x[0]); }},
      {"silu", {{5, 4}}, [](const Tensors& x) { return torch::silu(x[0]); }},
      {"tanh", {{5, 4}}, [](const Tensors& x) { return torch::tanh(x[0]); }},
      {"sigmoid", {{5, 4}}, [](const Tensors& x) { return torch::sigmoid(x[0]); }},
      {"exp, sqrt", {{5, 4}}, [](const Tensors& x) { return torch::exp(x[0]).sqrt(); }},
      {"pow", {{5, 4}}, [](const Tensors& x) { return x[0].pow(3); }},
      {"where", {{5, 4}, {4}}, [](const Tensors& x) { return torch::where(x[0] > 0, x[0], x[1]); }},
      {"maximum", {{5, 4}, {5, 4}}, [](const Tensors& x) { return torch::maximum(x[0], x[1]); }},
      {"clamp", {{5, 4}}, [](const Tensors& x) { return x[0].clamp(-0.5, 0.5); }},
      {"clone, to", {{5, 4}}, [](const Tensors& x) { return x[0].clone().to(at::kDouble); }},
      {"in place", {{5, 4}, {4}}, [](const Tensors& x) { return (x[0] * 1).add_(x[1]).mul_(2); }},
  };
}

std::vector<Case> matrix_cases() {
  return {
      {"mm", {{5, 4}, {4, 3}}, [](const Tensors& x) { return torch::mm(x[0], x[1]); }},
      {"matmul 3-D",
       {{2, 5, 4}, {4, 3}},
       [](const Tensors& x) { return torch::matmul(x[0], x[1]); }},
      {"addmm",
       {{3}, {5, 4}, {4, 3}},
       [](const Tensors& x) { return torch::addmm(x[0], x[1], x[2]); }},
      {"linear",
       {{5, 4}, {3, 4}, {3}},
       [](const Tensors& x) { return F::linear(x[0], x[1], x[2]); }},
      {"linear 3-D",
       {{2, 5, 4}, {3, 4}, {3}},
       [](const Tensors& x) { return F::linear(x[0], x[1], x[2]); }},
      {"bmm", {{2, 5, 4}, {2, 4, 3}}, [](const Tensors& x) { return torch::bmm(x[0], x[1]); }},
      {"baddbmm",
       {{2, 1, 3}, {2, 5, 4}, {2, 4, 3}},
       [](const Tensors& x) { return torch::baddbmm(x[0], x[1], x[2]); }},
  };
}

std::vector<Case> view_cases() {
  return {
      {"t", {{5, 4}}, [](const Tensors& x) { return x[0].t(); }},
      {"transpose", {{2, 5, 3}}, [](const Tensors& x) { return x[0].transpose(0, -1); }},
      {"permute",
       {{2, 5, 3}},
       [](const Tensors& x) {
         return x[0].permute({2, 0, 1});
       }},
      {"view merges",
       {{2, 5, 3}},
       [](const Tensors& x) {
         return x[0].view({10, 3});
       }},
      {"view splits",
       {{12, 5}},
       [](const Tensors& x) {
         return x[0].view({4, 3, 5});
       }},
      {"view splits the last",
       {{5, 12}},
       [](const Tensors& x) {
         return x[0].view({5, 6, 2});
       }},
      {"view flattens", {{4, 3}}, [](const Tensors& x) { return x[0].view(-1); }},
      {"reshape of a transposed",
       {{4, 6}},
       [](const Tensors& x) {
         return x[0].t().reshape({3, 8});
       }},
      {"unsqueeze", {{5, 4}}, [](const Tensors& x) { return x[0].unsqueeze(1); }},
      {"squeeze", {{5, 1, 4}}, [](const Tensors& x) { return x[0].squeeze(1); }},
      {"expand",
       {{5, 1}},
       [](const Tensors& x) {
         return x[0].expand({2, 5, 3});
       }},
      {"slice", {{5, 4}}, [](const Tensors& x) { return x[0].slice(0, 1, 4); }},
      {"select", {{5, 4}}, [](const Tensors& x) { return x[0].select(1, 2); }},
      {"split",
       {{5, 6}},
       [](const Tensors& x) {
         const auto p = x[0].split(2, 1);
         return p[0] * p[2] + p[1];
       }},
      {"chunk", {{6, 5}}, [](const Tensors& x) { return x[0].chunk(3, 0)[1]; }},
      {"unbind", {{3, 5}}, [](const Tensors& x) { return x[0].unbind(0)[1]; }},
      {"cat",
       {{5, 4}, {5, 2}},
       [](const Tensors& x) {
         return torch::cat({x[0], x[1]}, 1);
       }},
      {"stack",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) {
         return torch::stack({x[0], x[1]}, 1);
       }},
      {"contiguous", {{5, 4}}, [](const Tensors& x) { return x[0].t().contiguous(); }},
  };
}

std::vector<Case> reduction_cases() {
  return {
      {"sum", {{5, 4}}, [](const Tensors& x) { return x[0].sum(); }},
      {"sum by dims",
       {{2, 5, 3}},
       [](const Tensors& x) {
         return x[0].sum({0, 2});
       }},
      {"sum keeps dims", {{5, 4}}, [](const Tensors& x) { return x[0].sum(1, true); }},
      {"mean", {{5, 4}}, [](const Tensors& x) { return x[0].mean(); }},
      {"mean by dim", {{6, 4}}, [](const Tensors& x) { return x[0].mean(0); }},
      {"amax", {{6, 5}}, [](const Tensors& x) { return x[0].amax(0); }},
      {"max by dim", {{5, 4}}, [](const Tensors& x) { return std::get<0>(x[0].max(1)); }},
      {"min", {{6, 4}}, [](const Tensors& x) { return x[0].min(); }},
      {"prod", {{5}}, [](const Tensors& x) { return x[0].prod(); }, false},
      {"argmax", {{5, 4}}, [](const Tensors& x) { return x[0].argmax(1); }, false},
      {"any", {{5, 4}}, [](const Tensors& x) { return (x[0] > 0.9).any(1); }, false},
      {"all", {{5, 4}}, [](const Tensors& x) { return (x[0] > -0.5).all(); }, false},
      {"norm", {{5, 4}}, [](const Tensors& x) { return x[0].norm(); }},
      {"softmax", {{5, 4}}, [](const Tensors& x) { return torch::softmax(x[0], 1); }},
      {"log_softmax", {{2, 5, 3}}, [](const Tensors& x) { return torch::log_softmax(x[0], 1); }},
      {"sort", {{5, 4}}, [](const Tensors& x) { return std::get<0>(x[0].sort(1)); }},
      {"topk", {{5, 4}}, [](const Tensors& x) { return std::get<0>(x[0].topk(2, 0)); }},
      {"cumsum", {{5, 4}}, [](const Tensors& x) { return x[0].cumsum(0); }},
  };
}

std::vector<Case> model_cases() {
  return {
      {"layer_norm",
       {{2, 5, 4}, {4}, {4}},
       [](const Tensors& x) { return torch::layer_norm(x[0], {4}, x[1], x[2]); }},
      {"layer_norm without weight",
       {{5, 4}},
       [](const Tensors& x) { return torch::layer_norm(x[0], {4}); }},
      {"embedding",
       {{5, 4}, {2, 3}},
       [](const Tensors& x) { return torch::embedding(x[0], indices(x[1]) + 2); }},
      {"mse_loss",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::mse_loss(x[0], x[1].detach()); }},
      {"cross_entropy",
       {{5, 4}, {5}},
       [](const Tensors& x) { return torch::cross_entropy_loss(x[0], indices(x[1]) + 1); }},
      {"attention",
       {{2, 4, 5, 3}, {2, 4, 5, 3}, {2, 4, 5, 3}},
       [](const Tensors& x) {
         return torch::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true);
       }},
  };
}

std::vector<Placement> choices(int64_t ndim) {
  std::vector<Placement> all = {Replicate{}, Partial{}};
  for (int64_t d = 0; d < ndim; ++d) all.push_back(Shard{d});
  return all;
}

Tensors make_inputs(const Case& test) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  Tensors inputs;
  for (const auto& sizes : test.sizes) inputs.push_back(torch::randn(sizes, generator));
  return inputs;
}

at::Tensor factors(const at::Tensor& output) {
  return torch::linspace(0.5, 2, std::max<int64_t>(output.numel(), 1), at::kDouble)
      .slice(0, 0, output.numel())
      .view(output.sizes())
      .to(output.scalar_type());
}

Tensors gradients_of(const Case& test, const Tensors& inputs, const at::Tensor& output) {
  (output * factors(output)).sum().backward();
  Tensors gradients;
  for (const at::Tensor& input : inputs) gradients.push_back(input.grad());
  return gradients;
}

void expect_close(const at::Tensor& dist, const at::Tensor& plain, const std::string& what) {
  ASSERT_EQ(dist.sizes(), plain.sizes()) << what;
  ASSERT_EQ(dist.scalar_type(), plain.scalar_type()) << what;
  EXPECT_TRUE(torch::allclose(full_tensor(dist).to(at::kDouble), plain.to(at::kDouble), 1e-4, 1e-5))
      << what << "\n"
      << full_tensor(dist) << "\n"
      << plain;
}

// Runs `f` with every combination of placements of the inputs along all mesh dims.
void for_each_combination(const Case& test, int64_t mesh_ndim,
                          const std::function<void(const std::vector<Placements>&)>& f) {
  std::vector<std::vector<Placements>> all = {{}};
  for (const auto& sizes : test.sizes) {
    std::vector<std::vector<Placements>> longer;
    for (const auto& some : all) {
      for (const Placement& first : choices(static_cast<int64_t>(sizes.size()))) {
        for (const Placement& second : choices(static_cast<int64_t>(sizes.size()))) {
          if (mesh_ndim == 1 && !is_replicate(second)) continue;
          longer.push_back(some);
          longer.back().push_back(mesh_ndim == 1 ? Placements{first} : Placements{first, second});
        }
      }
    }
    all = std::move(longer);
  }
  // On a mesh of two dims a sample of the very many, the same in every run.
  const size_t step = all.size() > 600 ? all.size() / 301 : 1;
  for (size_t i = 0; i < all.size(); i += step) f(all[i]);
}

void expect_as_plain(const Case& test, const DeviceMesh& mesh) {
  Tensors plain = make_inputs(test);
  for (at::Tensor& input : plain) input.requires_grad_(test.differentiable);
  const at::Tensor expected = test.run(plain);
  const Tensors expected_gradients =
      test.differentiable ? gradients_of(test, plain, expected) : Tensors();
  for_each_combination(test, mesh.ndim(), [&](const std::vector<Placements>& placements) {
    std::string text = test.name;
    Tensors inputs = make_inputs(test);
    for (size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = distribute(inputs[i].requires_grad_(test.differentiable), mesh, placements[i]);
      text += " " + to_string(placements[i]);
    }
    SCOPED_TRACE(text);
    const at::Tensor output = test.run(inputs);
    ASSERT_TRUE(is_dist(output));
    expect_close(output, expected.detach(), "output");
    if (!test.differentiable) return;
    const Tensors gradients = gradients_of(test, inputs, output);
    for (size_t i = 0; i < gradients.size(); ++i) {
      ASSERT_EQ(gradients[i].defined(), expected_gradients[i].defined());
      if (gradients[i].defined())
        expect_close(gradients[i], expected_gradients[i], "gradient " + std::to_string(i));
    }
  });
}

struct Family {
  std::string name;
  std::vector<Case> (*cases)();
};

class Operators : public testing::TestWithParam<Family> {
 protected:
  static void expect_all_as_plain(int ranks, const std::vector<int64_t>& shape) {
    const auto cases = GetParam().cases();
    run_world(
        ranks,
        [&](World&) {
          const auto mesh = DeviceMesh::over_world(shape);
          for (const Case& test : cases) expect_as_plain(test, mesh);
        },
        std::chrono::seconds(110));
  }
};

TEST_P(Operators, OnTwoRanks) { expect_all_as_plain(2, {2}); }
TEST_P(Operators, OnThreeRanks) { expect_all_as_plain(3, {3}); }
TEST_P(Operators, OnASquare) { expect_all_as_plain(4, {2, 2}); }

INSTANTIATE_TEST_SUITE_P(Mesh, Operators,
                         testing::Values(Family{"Elementwise", elementwise_cases},
                                         Family{"Matrix", matrix_cases}, Family{"View", view_cases},
                                         Family{"Reduction", reduction_cases},
                                         Family{"Model", model_cases}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera
