// Strict operators, counts of collectives, printing.

#include <gtest/gtest.h>
#include <tessera/dist_debug.h>
#include <tessera/distribute_module.h>
#include <torch/torch.h>

#include <sstream>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera {
namespace debug_test {

namespace nn = torch::nn;
using testing::on_test_device;

at::Tensor numbers(std::vector<int64_t> sizes) {
  return on_test_device(torch::arange(torch::zeros(sizes).numel(), torch::kFloat).view(sizes));
}

std::string refusal_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::NotImplementedError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

struct OddImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return std::get<0>(torch::kthvalue(fc(x), 1, 0)); }
  nn::Linear fc = register_module("fc", nn::Linear(4, 3));
};

TEST(StrictOperators, AnOperatorWithoutARuleNamesItselfAndItsModule) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    auto odd = on_test_device(std::make_shared<OddImpl>());
    auto model = distribute_module(odd, mesh);
    const at::Tensor x = distribute(numbers({6, 4}), mesh, {Shard{0}});
    EXPECT_NO_THROW(model(x));  // computed on whole tensors
    const StrictOperators strict;
    const std::string after = refusal_of([&] { model(x); });
    EXPECT_NE(after.find("aten::kthvalue has no rule"), std::string::npos) << after;
    EXPECT_NE(after.find("after module 'fc'"), std::string::npos) << after;
    EXPECT_NE(after.find("[6, 3] [Shard(0)]"), std::string::npos) << after;
    const std::string in = refusal_of([&] { torch::kthvalue(odd->fc->weight, 1, 0); });
    EXPECT_NE(in.find("in module 'fc', with parameter 'fc.weight'"), std::string::npos) << in;
    EXPECT_NO_THROW(odd->fc(x));
    {
      const StrictOperators lenient(false);
      EXPECT_NO_THROW(model(x));
    }
    EXPECT_NE(refusal_of([&] { model(x); }), "no error");
  });
}

TEST(CommDebug, CountsByKindAndOperator) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor a = distribute(numbers({4, 6}), mesh, {Shard{1}});
    const at::Tensor b = distribute(numbers({6, 3}), mesh, {Shard{0}});
    CommDebug all;
    const at::Tensor product = torch::mm(a, b);
    EXPECT_EQ(all.calls(), 0);
    {
      const CommDebug inner;
      torch::relu(product);
      EXPECT_EQ(
          inner.calls("all_reduce", "aten::relu") + inner.calls("reduce_scatter", "aten::relu"), 1);
      EXPECT_EQ(inner.calls(), 1);
    }
    full_tensor(product);
    EXPECT_EQ(all.calls(), 1);  // it was reduced for relu
    full_tensor(torch::mm(a, b));
    EXPECT_EQ(all.calls(), 2);
    EXPECT_EQ(all.calls("all_reduce", "redistributed tensor"), 1);
    EXPECT_EQ(all.bytes("all_reduce", "redistributed tensor"), 4 * 3 * 4);
    EXPECT_NE(all.describe().find("redistributed tensor"), std::string::npos);
    EXPECT_NE(all.describe().find("aten::relu"), std::string::npos);
    all.reset();
    redistribute(a, {Shard{0}});
    EXPECT_EQ(all.calls("all_to_all"), 1);
    EXPECT_EQ(all.calls(), 1);
    redistribute(a, {Shard{1}});
    distribute(numbers({4}), mesh, {Shard{0}});
    EXPECT_EQ(all.calls(), 1);
  });
}

TEST(CommDebug, CountsWhatFullyShardSends) {
  run_world(2, [](World&) {
    nn::Linear linear = on_test_device(nn::Linear(4, 4));
    auto model = fully_shard(linear);
    const CommDebug debug;
    model(numbers({2, 4})).sum().backward();
    EXPECT_GE(debug.calls("all_gather"), 1);
    EXPECT_EQ(debug.calls("reduce_scatter"), 1);
  });
}

TEST(Printing, ShowsGlobalSizesMeshPlacementsAndLocalValues) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world({2}, {"tp"});
    const at::Tensor tensor = distribute(numbers({3, 2}).requires_grad_(true), mesh, {Shard{0}});
    const std::string part = world.rank() == 0 ? "[2, 2]" : "[1, 2]";
    EXPECT_EQ(
        describe(tensor),
        "DistTensor(sizes [3, 2], Float, DeviceMesh([2], ranks [0, 1], dims [tp]), [Shard(0)], "
        "this rank has " +
            part + ")");
    std::ostringstream text, local, ordinary;
    print_tensor(text, tensor);
    local << to_local(tensor).detach();
    EXPECT_NE(text.str().find(describe(tensor)), std::string::npos);
    EXPECT_NE(text.str().find(local.str()), std::string::npos) << text.str();
    print_tensor(ordinary, numbers({2}));
    EXPECT_EQ(ordinary.str().find("DistTensor"), std::string::npos);
    EXPECT_THROW(std::ostringstream() << tensor, c10::Error);
    const at::Tensor elsewhere = distribute(numbers({2}), DeviceMesh({1}, {0}), {});
    if (world.rank() == 1) {
      EXPECT_NE(describe(elsewhere).find("this rank has no part"), std::string::npos);
    }
  });
}

}  // namespace debug_test
}  // namespace tessera
