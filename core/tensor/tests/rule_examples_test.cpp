// The rules of docs/design/rules.md.

#include <gtest/gtest.h>
#include <tessera/tensor/operator_rules.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "support/operator_parity.h"

namespace tessera::rule_examples_test {

at::Tensor distance(const at::Tensor& x, const at::Tensor& y) { return (x - y).abs(); }
at::Tensor energy(const at::Tensor& x, int64_t dim) { return x.square().sum(dim); }
at::Tensor rotate(const at::Tensor& x) { return x.movedim(0, -1).clone(); }
at::Tensor product(const at::Tensor& x, const at::Tensor& y) { return x.mm(y); }
at::Tensor chosen(const at::Tensor& x, const at::Tensor& target, bool adds) {
  const at::Tensor each = x.gather(1, target.unsqueeze(1)).squeeze(1);
  return adds ? each.sum() : each;
}

TORCH_LIBRARY(tessera_examples, library) {
  library.def("distance(Tensor x, Tensor y) -> Tensor");
  library.def("energy(Tensor x, int dim) -> Tensor");
  library.def("rotate(Tensor x) -> Tensor");
  library.def("product(Tensor x, Tensor y) -> Tensor");
  library.def("chosen(Tensor x, Tensor target, bool adds) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera_examples, CompositeExplicitAutograd, library) {
  library.impl("distance", distance);
  library.impl("energy", energy);
  library.impl("rotate", rotate);
  library.impl("product", product);
  library.impl("chosen", chosen);
}

at::Tensor call(const std::string& name, std::vector<c10::IValue> arguments) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(("tessera_examples::" + name).c_str(), "");
  op.callBoxed(arguments);
  return arguments[0].toTensor();
}

void register_rules() {
  register_rule("tessera_examples::distance", [](const OpCall& call) -> Strategies {
    const TensorInfo &x = call.inputs[0], &y = call.inputs[1];
    Strategies ways;
    for (int64_t d = 0; d < x.ndim(); ++d) {
      const int64_t own = d - (x.ndim() - y.ndim());
      const bool has_it = own >= 0 && y.sizes[own] == x.sizes[d];
      const auto of_y = has_it ? Placement(Shard{own}) : Replicate{};
      ways.push_back({{Shard{d}, of_y}, {Shard{d}}});
    }
    return ways;
  });
  register_rule("tessera_examples::energy", [](const OpCall& call) -> Strategies {
    const int64_t ndim = call.inputs[0].ndim(), dim = call.dim("dim", ndim);
    Strategies ways = {{{Shard{dim}}, {Partial{}}}};
    for (int64_t d = 0; d < ndim; ++d)
      if (d != dim) ways.push_back({{Shard{d}}, {Shard{d - (d > dim)}}});
    return ways;
  });
  register_rule("tessera_examples::rotate", [](const OpCall& call) -> Strategies {
    const int64_t ndim = call.inputs[0].ndim();
    Strategies ways = {{{Partial{}}, {Partial{}}}};
    for (int64_t d = 0; d < ndim; ++d) ways.push_back({{Shard{d}}, {Shard{(d + ndim - 1) % ndim}}});
    return ways;
  });
  register_rule("tessera_examples::product", [](const OpCall&) -> Strategies {
    const Shard rows{0}, columns{1};
    const Partial terms;
    const Replicate whole;
    return {{{rows, whole}, {rows}},
            {{whole, columns}, {columns}},
            {{columns, rows}, {terms}},
            {{terms, whole}, {terms}},
            {{whole, terms}, {terms}}};
  });
  register_rule("tessera_examples::chosen", [](const OpCall& call) -> Strategies {
    const bool adds = call.argument("adds").toBool();
    const auto output = adds ? Placement(Partial{}) : Shard{0};
    return {{{Shard{0}, Shard{0}}, {output}}};
  });
}

TEST(RuleExamples, AreRight) {
  const torch::NoGradGuard no_grad;
  register_rules();
  EXPECT_RULE(call("distance", {x[0], x[1]}), {{5, 4}, {4}}, {{5, 4}, {5, 1}}, {{1, 0}, {}});
  EXPECT_RULE(call("energy", {x[0], 1}), {{5, 4, 2}}, {{2, 0}});
  EXPECT_RULE(call("rotate", {x[0]}), {{5, 4, 2}}, {{0, 3}});
  EXPECT_RULE(call("product", {x[0], x[1]}), {{5, 4}, {4, 3}}, {{1, 2}, {2, 0}});
  for (const bool adds : {false, true})
    EXPECT_RULE(call("chosen", {x[0], testing::whole_numbers(x[1], 4), adds}), {{5, 4}, {5}});
}

}  // namespace tessera::rule_examples_test
