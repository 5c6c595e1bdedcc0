// Backward in two parts: the bits of a whole one, and no operator twice.

#include "parallel/stage_graph.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/engine/activation_checkpoint.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera::stage_graph_test {

namespace nn = torch::nn;
using Tensors = std::vector<at::Tensor>;

// Tensors that a stage may use: parameters, and inputs.
struct Stage {
  std::string name;
  std::function<Tensors(const Tensors& w, const Tensors& in)> run;
};

// w * x, whose backward computes both gradients at once.
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x.mm(w);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0])};
  }
};

std::vector<Stage> some_stages() {
  const auto linear = [](const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
    return torch::nn::functional::linear(x, w, b);
  };
  return {
      {"layers",
       [=](const Tensors& w, const Tensors& in) -> Tensors {
         return {linear(torch::gelu(linear(in[0], w[0], w[3])), w[1], w[4]).tanh()};
       }},
      {"a weight of two layers",
       [=](const Tensors& w, const Tensors& in) -> Tensors {
         return {linear(linear(in[0], w[0], w[3]).tanh(), w[0], w[3])};
       }},
      {"a weight of four layers",
       [=](const Tensors& w, const Tensors& in) -> Tensors {
         at::Tensor x = in[0];
         for (int i = 0; i < 4; ++i) x = linear(x, w[0], w[3]).sin();
         return {x};
       }},
      {"residuals and a norm",
       [=](const Tensors& w, const Tensors& in) -> Tensors {
         const at::Tensor x = in[0] + linear(torch::layer_norm(in[0], {7}, w[3], w[4]), w[0], w[5]);
         return {x + x * w[4]};
       }},
      {"outputs off the path",
       [](const Tensors& w, const Tensors& in) -> Tensors {
         return {in[0].mm(w[0]), (w[1] * w[1]).mm(w[2]), in[1]};
       }},
      {"an unused input and parameter",
       [](const Tensors& w, const Tensors& in) -> Tensors {
         return {in[1].mm(w[1].t().contiguous())};
       }},
      {"a derived weight",
       [](const Tensors& w, const Tensors& in) -> Tensors {
         return {in[0].mm(w[0] / w[0].norm()) + in[1].mm(w[0])};
       }},
      {"a function of a user",
       [](const Tensors& w, const Tensors& in) -> Tensors {
         return {Product::apply(Product::apply(in[0], w[0]), w[1] * 2).mm(w[0])};
       }},
      {"a checkpoint",
       [](const Tensors& w, const Tensors& in) -> Tensors {
         return {checkpoint([w](const at::Tensor& x) { return x.mm(w[0]).tanh().mm(w[1]); }, in[0])
                     .mm(w[2])};
       }},
      {"no input that requires a gradient",
       [](const Tensors& w, const Tensors& in) -> Tensors { return {in[2].mm(w[0])}; }},
      {"no parameters",
       [](const Tensors&, const Tensors& in) -> Tensors {
         return {in[0].sin(), in[1] * in[0]};
       }},
      {"no graph", [](const Tensors&, const Tensors& in) -> Tensors { return {in[2].sin()}; }},
  };
}

struct Result {
  Tensors inputs, parameters;
  std::map<std::string, int> operators;
};

Result differentiate(const Stage& stage, bool in_parts) {
  manual_seed(5);
  Tensors w, in;
  for (int i = 0; i < 6; ++i)
    w.push_back(torch::randn(i < 3 ? std::vector<int64_t>{7, 7} : std::vector<int64_t>{7})
                    .set_requires_grad(true));
  for (int i = 0; i < 3; ++i) in.push_back(torch::randn({5, 7}).set_requires_grad(i < 2));
  Tensors gradients;
  const Tensors out = stage.run(w, in);
  for (const at::Tensor& each : out) gradients.push_back(torch::randn_like(each));
  StageGraph graph(in, out);
  Result result;
  static std::map<std::string, int>* counted;
  counted = &result.operators;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call)
                                     -> std::unique_ptr<at::ObserverContext> {
        ++(*counted)[call.name()];
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  result.inputs = in_parts ? graph.input_gradients(gradients) : graph.backward(gradients);
  if (in_parts) graph.weight_gradients();
  at::removeCallback(handle);
  for (const at::Tensor& each : w) result.parameters.push_back(each.grad());
  return result;
}

void expect_same(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].defined(), b[i].defined()) << i;
    EXPECT_TRUE(!a[i].defined() || !b[i].defined() || torch::equal(a[i], b[i])) << i;
  }
}

TEST(StageGraph, TwoPartsGiveTheBitsOfAWholeBackward) {
  for (const Stage& stage : some_stages()) {
    SCOPED_TRACE(stage.name);
    const Result whole = differentiate(stage, false), parts = differentiate(stage, true);
    expect_same(parts.inputs, whole.inputs);
    expect_same(parts.parameters, whole.parameters);
  }
}

TEST(StageGraph, TwoPartsMultiplyNoMatricesTwice) {
  for (const Stage& stage : some_stages()) {
    SCOPED_TRACE(stage.name);
    Result whole = differentiate(stage, false), parts = differentiate(stage, true);
    // A checkpoint runs its function for each part.
    const int again = stage.name == "a checkpoint" ? 2 : 0;
    EXPECT_EQ(parts.operators["aten::mm"], whole.operators["aten::mm"] + again);
    EXPECT_EQ(parts.operators["aten::native_layer_norm_backward"] > 0,
              whole.operators["aten::native_layer_norm_backward"] > 0);
    EXPECT_EQ(parts.operators["aten::tanh_backward"], whole.operators["aten::tanh_backward"]);
  }
}

TEST(StageGraph, HooksOfTensorsRunOnce) {
  for (const bool in_parts : {false, true}) {
    const at::Tensor w = torch::ones({2, 2}).set_requires_grad(true),
                     x = torch::ones({3, 2}).set_requires_grad(true);
    at::Tensor y = x.mm(w);
    int calls = 0;
    y.register_hook([&calls](const at::Tensor& gradient) {
      ++calls;
      return gradient * 2;
    });
    y.retain_grad();
    StageGraph graph({x}, {y});
    if (in_parts) {
      graph.input_gradients({torch::ones({3, 2})});
      graph.weight_gradients();
    } else {
      graph.backward({torch::ones({3, 2})});
    }
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(torch::equal(w.grad(), torch::full({2, 2}, 6.0)));
    EXPECT_TRUE(torch::equal(y.grad(), torch::full({3, 2}, 2.0)));
  }
}

TEST(StageGraph, TheFirstPartFreesWhatOnlyTheInputsNeed) {
  const at::Tensor w = torch::ones({2, 2}).set_requires_grad(true),
                   x = torch::ones({3, 2}).set_requires_grad(true);
  at::Tensor a = x.mm(w), b = a.tanh();  // b is saved by tanh, a by nothing, x by mm
  const c10::weak_intrusive_ptr<c10::StorageImpl> weak(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(b.storage().unsafeGetStorageImpl()));
  StageGraph graph({x}, {b});
  a.reset();
  b.reset();
  EXPECT_FALSE(weak.expired());
  graph.input_gradients({torch::ones({3, 2})});
  EXPECT_TRUE(weak.expired());
  graph.weight_gradients();
  EXPECT_TRUE(w.grad().defined());
}

}  // namespace tessera::stage_graph_test
