// Strict operators, counts of collectives, printing.

#include <gtest/gtest.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/tensor/dist_debug.h>
#include <torch/torch.h>

#include <atomic>
#include <functional>
#include <sstream>
#include <vector>

#include "support/error_of.h"
#include "support/run_world.h"
#include "support/test_device.h"
#include "support/warnings.h"

namespace tessera::debug_test {

namespace nn = torch::nn;
using testing::on_test_device;

at::Tensor numbers(std::vector<int64_t> sizes) {
  return on_test_device(torch::arange(torch::zeros(sizes).numel(), torch::kFloat).view(sizes));
}

std::string refusal_of(const std::function<void()>& f) {
  return testing::error_of<c10::NotImplementedError>(f);
}

struct OddImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return torch::renorm(fc(x), 2, 0, 1); }
  nn::Linear fc = register_module("fc", nn::Linear(4, 3));
};

using Program = std::function<void(const at::Tensor&, int rank)>;

// What each of 3 ranks has called; the mesh has ranks 0 and 2.
std::vector<uint64_t> digests(const Program& program, const Placement& placement) {
  std::vector<uint64_t> found(3);
  run_world(3, [&](World& world) {
    const at::Tensor x = distribute(numbers({5, 4}), DeviceMesh({2}, {2, 0}), {placement});
    operator_digest();
    program(x.requires_grad_(), world.rank());
    found[world.rank()] = operator_digest();
    EXPECT_EQ(operator_digest(), 0U);
  });
  return found;
}

TEST(OperatorDigest, IsEqualOnRanksThatRunTheSameProgram) {
  const auto program = [](const at::Tensor& x, int) {
    const at::Tensor y = torch::softmax(x.t().matmul(x), 0);
    torch::mse_loss(y.exp(), y.var(0)).backward();
    const torch::NoGradGuard no_grad;
    x.select(0, 1).mul_(2);
    torch::_foreach_add({x}, 1.0);
  };
  const auto rows = digests(program, Shard{0}), columns = digests(program, Shard{1});
  EXPECT_EQ(rows, std::vector<uint64_t>(3, rows[0]));
  EXPECT_EQ(columns, std::vector<uint64_t>(3, columns[0]));
  EXPECT_NE(rows[0], columns[0]);
}

// A rank that is not in the mesh has no memory from which it could tell.
TEST(OperatorDigest, DoesNotDependOnTheMemoryOfParts) {
  const auto gradients = [](const at::Tensor& x, int) {
    x.sum({0, 1}).backward(on_test_device(torch::ones({})));
  };
  const auto lists = [](const at::Tensor& x, int) {
    const torch::NoGradGuard no_grad;
    const at::Tensor y = x.exp();
    torch::_foreach_mul_({y.unsqueeze(0), y.narrow(1, 0, 1)}, 0.5);
  };
  const auto marks = [](const at::Tensor& x, int) {
    const at::Tensor part = torch::complex(to_local(x.detach()), to_local(x.detach())).conj();
    const DeviceMesh mesh({2}, {2, 0});
    (from_local(part, mesh, placements_of(x), x.sizes().vec()) * 2).add(1);
  };
  for (const Program& program : {Program(gradients), Program(lists), Program(marks)}) {
    for (const Placement& placement : {Placement{Replicate{}}, Placement{Shard{1}}}) {
      const auto found = digests(program, placement);
      EXPECT_EQ(found, std::vector<uint64_t>(3, found[0])) << to_string({placement});
    }
  }
}

TEST(OperatorDigest, DiffersWhereARankCallsAnotherOperator) {
  const auto found =
      digests([](const at::Tensor& x, int rank) { rank == 1 ? x.sin() : x.cos(); }, Shard{0});
  EXPECT_EQ(found[0], found[2]);
  EXPECT_NE(found[0], found[1]);
}

TEST(StrictOperators, AnOperatorWithoutARuleNamesItselfAndItsModule) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    auto odd = on_test_device(std::make_shared<OddImpl>());
    auto model = distribute_module(odd, mesh);
    const at::Tensor x = distribute(numbers({6, 4}), mesh, {Shard{0}});
    EXPECT_NO_THROW(model(x));  // computed on whole tensors
    const StrictOperators strict;
    const std::string after = refusal_of([&] { model(x); });
    testing::expect_contains(
        after, {"aten::renorm has no rule", "after module 'fc'", "[6, 3] [Shard(0)]"});
    const std::string in = refusal_of([&] { torch::renorm(odd->fc->weight, 2, 0, 1); });
    testing::expect_contains(in, {"in module 'fc', with parameter 'fc.weight'"});
    EXPECT_NO_THROW(odd->fc(x));
    {
      const StrictOperators lenient(false);
      EXPECT_NO_THROW(model(x));
    }
    EXPECT_NE(refusal_of([&] { model(x); }), "no error");
  });
}

// Each gathers shards that the program did not ask for.
TEST(StrictOperators, GathersThatNobodyAskedForAreErrors) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = distribute(numbers({4, 6}), mesh, {Shard{1}});
    const at::Tensor heads = distribute(numbers({1, 6, 2, 2}), mesh, {Shard{1}});
    const at::Tensor few = distribute(numbers({1, 3, 2, 2}), mesh, {Shard{1}});
    const std::vector<std::pair<std::string, std::function<void()>>> calls = {
        {"aten::cat",
         [&] {
           torch::cat({x, x}, 1);
         }},
        {"aten::flip", [&] { x.flip({1}); }},
        {"aten::cumsum", [&] { x.cumsum(1); }},
        {"aten::sort", [&] { x.sort(1); }},
        {"aten::topk", [&] { x.topk(2, 1); }},
        {"aten::kthvalue", [&] { x.kthvalue(2, 1); }},
        {"aten::_scaled_dot_product_flash_attention_for_cpu",
         [&] { torch::scaled_dot_product_attention(heads, few, few, {}, 0, false, {}, true); }},
        {"aten::renorm", [&] { torch::renorm(x, 2, 0, 1); }},
        {"aten::masked_select", [&] { torch::masked_select(x, x > 3); }},
    };
    for (const auto& [name, call] : calls) {
      if (!x.is_cpu() && name.ends_with("_for_cpu")) continue;  // composed of others there
      EXPECT_NO_THROW(call()) << name;
      const StrictOperators strict;
      const CommDebug debug;
      const std::string refusal = refusal_of(call);
      testing::expect_contains(refusal, {"[strict] " + name});
      EXPECT_EQ(debug.calls(), 0) << name << ": nothing is sent before the error";
    }
    const StrictOperators strict;
    const std::string refusal = refusal_of([&] { x.cumsum(1); });
    testing::expect_contains(refusal,
                             {"a tensor of sizes [4, 6] from [Shard(1)] to [Shard(0)], 96 bytes"});
    EXPECT_NO_THROW(redistribute(x, {}).cumsum(1));
    EXPECT_NO_THROW(x.softmax(1));  // sends maxima and sums
    EXPECT_NO_THROW(torch::cross_entropy_loss(x, on_test_device(torch::zeros({4}, torch::kLong))));
    EXPECT_NO_THROW(full_tensor(x));
  });
}

TEST(StrictOperators, OtherwiseGathersAreToldOnce) {
  std::atomic<int> told = 0;
  run_world(2, [&](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = distribute(numbers({4, 10}), mesh, {Shard{1}});
    const auto warnings = testing::warnings_of([&] {
      for (int again = 0; again < 3; ++again) x.cumsum(1);
    });
    for (const std::string& text : warnings)
      told += text.find("aten::cumsum needs shards of other ranks") != std::string::npos;
  });
  EXPECT_EQ(told, 1);
}

TEST(CommDebug, CountsByModule) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    nn::Sequential net(nn::Linear(4, 6), nn::ReLU(), nn::Linear(6, 4));
    net->to(testing::test_device());
    distribute_module(*net, mesh,
                      [](const std::string& name, nn::Module& module, const DeviceMesh& m) {
                        if (auto* const linear = module.as<nn::LinearImpl>()) {
                          distribute_(linear->weight, m, {Shard{name == "0" ? 0 : 1}});
                          if (name == "0") distribute_(linear->bias, m, {Shard{0}});
                        }
                      });
    CommDebug debug;
    const at::Tensor x = distribute(numbers({3, 4}), mesh, {}).requires_grad_(true);
    net->forward(x).square().sum().backward();
    int64_t of_first = 0, of_last = 0;
    for (const CommDebug::Entry& entry : debug.entries()) {
      of_first += entry.module == "0" ? entry.calls : 0;
      of_last += entry.module == "2" ? entry.calls : 0;
    }
    EXPECT_EQ(of_last, 1) << debug.describe();   // the sum of the output
    EXPECT_EQ(of_first, 1) << debug.describe();  // the gradient of the input
    testing::expect_contains(debug.describe(), {"\n2\n  all_reduce"});
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
    testing::expect_contains(all.describe(), {"redistributed tensor", "aten::relu"});
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
    testing::expect_contains(text.str(), {describe(tensor), local.str()});
    print_tensor(ordinary, numbers({2}));
    EXPECT_EQ(ordinary.str().find("DistTensor"), std::string::npos);
    EXPECT_THROW(std::ostringstream() << tensor, c10::Error);
    const at::Tensor elsewhere = distribute(numbers({2}), DeviceMesh({1}, {0}), {});
    if (world.rank() == 1) {
      testing::expect_contains(describe(elsewhere), {"this rank has no part"});
    }
  });
}

}  // namespace tessera::debug_test
