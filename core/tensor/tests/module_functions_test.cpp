// Functions around inner modules: called by whatever operator gets the module's weight.

#include "tensor/module_functions.h"

#include <gtest/gtest.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/parallel/parallelize.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "support/autocast.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::module_functions_test {

namespace nn = torch::nn;
using testing::on_test_device;

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

void fill(nn::Module& module) {
  torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  for (at::Tensor& parameter : module.parameters()) parameter.normal_(0, 1, generator);
  module.to(testing::test_device());
}

// An RMS norm of one's own.
struct RmsNormImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return torch::rms_norm(x, {6}, weight, 1e-5); }
  at::Tensor weight = register_parameter("weight", torch::ones({6}));
};
TORCH_MODULE(RmsNorm);

// A linear layer whose weight is not transposed.
struct ProductImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight); }
  at::Tensor weight = register_parameter("weight", torch::ones({6, 3}));
};
TORCH_MODULE(Product);

// By aten::linear; LibTorch's own module does not call that.
struct AffineImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return torch::linear(x, weight, bias); }
  at::Tensor weight = register_parameter("weight", torch::ones({5, 6}));
  at::Tensor bias = register_parameter("bias", torch::ones({5}));
};
TORCH_MODULE(Affine);

// The last linear layer of a language model, with the weight of its embedding.
struct TiedHeadImpl : nn::Module {
  explicit TiedHeadImpl(const at::Tensor& tied) : weight(register_parameter("weight", tied)) {}
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(TiedHead);

// Doubles the input and triples the output. Counts calls.
struct Calls {
  int inputs = 0, outputs = 0;
  void attach(nn::Module& module) {
    set_module_functions(
        module,
        [this](const at::Tensor& x, const DeviceMesh& mesh) {
          EXPECT_TRUE(mesh.is_member());
          ++inputs;
          return x.is_floating_point() ? x * 2 : x;
        },
        [this](const at::Tensor& y, const DeviceMesh&) {
          EXPECT_TRUE(is_dist(y));
          ++outputs;
          return y * 3;
        });
  }
};

// One call of the module, and one of a plain copy between the same functions written out.
template <class Module>
void expect_called(const std::function<Module()>& make, const at::Tensor& x) {
  SCOPED_TRACE(make()->name() + " of " + std::to_string(x.dim()) + " dims");
  Module plain = make(), dist = make();
  fill(*plain), fill(*dist);
  const auto mesh = DeviceMesh::over_world();
  distribute_module(*dist, mesh);
  Calls calls;
  calls.attach(*dist);
  const bool has_gradient = x.is_floating_point();
  const at::Tensor own = x.clone().requires_grad_(has_gradient);
  const at::Tensor whole = distribute(x.clone(), mesh, {}).requires_grad_(has_gradient);
  const at::Tensor expected = plain(has_gradient ? own * 2 : own) * 3, result = dist(whole);
  EXPECT_EQ(calls.inputs, 1);
  EXPECT_EQ(calls.outputs, 1);
  EXPECT_TRUE(torch::allclose(full_tensor(result), expected, 1e-4, 1e-5));
  expected.square().sum().backward();
  result.square().sum().backward();
  EXPECT_EQ(calls.inputs + calls.outputs, 2);  // not in the backward
  for (size_t i = 0; i < plain->parameters().size(); ++i)
    EXPECT_TRUE(torch::allclose(full_tensor(dist->parameters()[i].grad()),
                                plain->parameters()[i].grad(), 1e-3, 1e-4));
  EXPECT_TRUE(!has_gradient || torch::allclose(full_tensor(whole.grad()), own.grad(), 1e-3, 1e-4));
  {
    torch::NoGradGuard no_grad;
    dist(whole);
  }
  {
    c10::InferenceMode inference;
    dist(whole);
  }
  dist(x);  // an ordinary tensor
  EXPECT_EQ(calls.inputs, 4);
  EXPECT_EQ(calls.outputs, 4);
}

TEST(ModuleFunctions, AreCalledByEachKindOfModule) {
  for (const int ranks : {1, 2}) {
    run_world(ranks, [](World&) {
      const auto linear = [](bool bias) {
        return [bias] { return nn::Linear(nn::LinearOptions(6, 5).bias(bias)); };
      };
      expect_called<nn::Linear>(linear(true), numbers({4, 6}));
      expect_called<nn::Linear>(linear(false), numbers({4, 6}));
      expect_called<nn::Linear>(linear(false), numbers({2, 4, 6}));
      expect_called<nn::Linear>(linear(false), numbers({6}));
      expect_called<Affine>([] { return Affine(); }, numbers({2, 4, 6}));
      expect_called<Product>([] { return Product(); }, numbers({2, 4, 6}));
      expect_called<nn::Embedding>([] { return nn::Embedding(7, 4); },
                                   on_test_device(torch::arange(6).view({2, 3})));
      expect_called<nn::LayerNorm>([] { return nn::LayerNorm(nn::LayerNormOptions({6})); },
                                   numbers({2, 4, 6}));
      expect_called<RmsNorm>([] { return RmsNorm(); }, numbers({2, 4, 6}));
      expect_called<nn::GroupNorm>([] { return nn::GroupNorm(nn::GroupNormOptions(2, 6)); },
                                   numbers({2, 6, 4}));
      expect_called<nn::Conv1d>([] { return nn::Conv1d(nn::Conv1dOptions(3, 4, 3)); },
                                numbers({2, 3, 8}));
      expect_called<nn::Conv2d>(
          [] { return nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(torch::kSame)); },
          numbers({2, 3, 8, 8}));
      expect_called<nn::Conv3d>([] { return nn::Conv3d(nn::Conv3dOptions(1, 2, 2)); },
                                numbers({2, 1, 4, 4, 4}));
    });
  }
}

// LibTorch's Linear adds its bias in place, after the product.
TEST(ModuleFunctions, ALinearsBiasIsAddedToTheOutputsOfOtherThanMatrices) {
  run_world(2, [](World&) {
    nn::Linear plain(6, 5), dist(6, 5);
    fill(*plain), fill(*dist);
    distribute_module(*dist, DeviceMesh::over_world());
    Calls calls;
    calls.attach(*dist);
    const at::Tensor x = numbers({2, 4, 6});
    const at::Tensor expected = (x * 2).matmul(plain->weight.t()) * 3 + plain->bias;
    EXPECT_TRUE(torch::allclose(full_tensor(dist(x)), expected, 1e-4, 1e-5));
    EXPECT_EQ(calls.outputs, 1);
  });
}

TEST(ModuleFunctions, OfModulesThatShareAWeightAreDistinct) {
  run_world(2, [](World&) {
    nn::Embedding embedding(7, 6);
    TiedHead head(embedding->weight);
    fill(*embedding);
    distribute_module(*embedding, DeviceMesh::over_world());
    Calls of_embedding, of_head;
    of_embedding.attach(*embedding), of_head.attach(*head);
    head(embedding(on_test_device(torch::arange(4))));
    EXPECT_EQ(of_embedding.inputs, 1);
    EXPECT_EQ(of_head.outputs, 1);
    // Another operator than the modules'.
    embedding->weight.sum();
    torch::mm(embedding->weight, distribute(numbers({6, 2}), DeviceMesh::over_world(), {}));
    EXPECT_EQ(of_embedding.outputs + of_head.outputs, 2);
  });
}

TEST(ModuleFunctions, AreReplacedKeptAndRemoved) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    nn::Linear linear(6, 4);
    fill(*linear);
    distribute_module(*linear, mesh);
    EXPECT_FALSE(linear->weight.key_set().has(kModuleKey));
    Calls first, second;
    first.attach(*linear), second.attach(*linear);
    const at::Tensor x = numbers({3, 6});
    linear(x);
    EXPECT_EQ(first.inputs, 0);
    EXPECT_EQ(second.inputs, 1);
    distribute_(linear->weight, mesh, {Shard{0}});
    distribute_module(*linear, mesh);
    linear(x);
    EXPECT_EQ(second.inputs, 2);
    EXPECT_FALSE(linear->weight.clone().key_set().has(kModuleKey));
    EXPECT_FALSE(linear->weight.detach().key_set().has(kModuleKey));
    EXPECT_FALSE(torch::zeros_like(linear->weight).key_set().has(kModuleKey));
    set_module_functions(*linear, {});
    EXPECT_FALSE(linear->weight.key_set().has(kModuleKey));
    second.attach(*linear);
    unwrap(*linear);
    EXPECT_FALSE(linear->weight.key_set().has(kModuleKey));
    linear(x);
    EXPECT_EQ(second.inputs, 2);
  });
}

// The weight that autocast passes on is a copy.
TEST(ModuleFunctions, AreCalledUnderAutocast) {
  run_world(2, [](World&) {
    nn::Linear linear(6, 4);
    fill(*linear);
    distribute_module(*linear, DeviceMesh::over_world());
    int calls = 0;
    const auto count = [&](const at::Tensor& x, const DeviceMesh&) { return ++calls, x; };
    set_module_functions(*linear, count, count);
    const testing::Autocast autocast(at::kBFloat16);
    EXPECT_EQ(linear(numbers({2, 3, 6})).scalar_type(), at::kBFloat16);
    EXPECT_EQ(calls, 2);
  });
}

// A function may call other modules, and its errors reach the caller.
TEST(ModuleFunctions, MayCallModulesAndThrow) {
  run_world(2, [](World&) {
    nn::Linear inner(6, 6), outer(6, 4);
    fill(*inner), fill(*outer);
    const auto mesh = DeviceMesh::over_world();
    distribute_module(*inner, mesh), distribute_module(*outer, mesh);
    Calls calls;
    calls.attach(*inner);
    set_module_functions(*outer, [&](const at::Tensor& x, const DeviceMesh&) { return inner(x); });
    outer(numbers({3, 6}));
    EXPECT_EQ(calls.inputs, 1);
    set_module_functions(*outer, {}, [](const at::Tensor&, const DeviceMesh&) -> at::Tensor {
      TORCH_CHECK(false, "no output");
    });
    EXPECT_THROW(outer(numbers({3, 6})), c10::Error);
    set_module_functions(*outer, [](const at::Tensor&, const DeviceMesh&) { return at::Tensor(); });
    EXPECT_THROW(outer(numbers({3, 6})), c10::ValueError);
    EXPECT_EQ(inner(numbers({3, 6})).size(1), 6);  // seen again after an error
    EXPECT_EQ(calls.inputs, 2);
  });
}

TEST(ModuleFunctions, NeedADistTensorAsWeight) {
  run_world(2, [](World&) {
    nn::Linear linear(6, 4);
    nn::Sequential outer(nn::Linear(6, 4));
    const auto same = [](const at::Tensor& x, const DeviceMesh&) { return x; };
    EXPECT_THROW(set_module_functions(*linear, same), c10::ValueError);
    distribute_module(*outer, DeviceMesh::over_world());
    EXPECT_THROW(set_module_functions(*outer, same), c10::ValueError);
  });
}

TEST(ModuleFunctions, AreCalledOnRanksOutsideTheMesh) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 2});
    nn::Linear linear(nn::LinearOptions(6, 4).bias(false));
    fill(*linear);
    distribute_module(*linear, mesh);
    int calls = 0;
    set_module_functions(*linear,
                         [&](const at::Tensor& x, const DeviceMesh&) { return ++calls, x; });
    EXPECT_EQ(linear(numbers({2, 3, 6})).size(2), 4);
    EXPECT_EQ(calls, 1);
  });
}

}  // namespace tessera::module_functions_test
