// Attention of sequences that are cut over the ranks of a mesh dim, against one process.

#include <gtest/gtest.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/engine/activation_checkpoint.h>
#include <tessera/parallel/context_parallel.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "support/counted.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::context_parallel_test {

using testing::on_test_device;

constexpr const char* kForward = "aten::scaled_dot_product_attention";
constexpr const char* kBackward = "aten::scaled_dot_product_attention_backward";

struct AttentionCase {
  int64_t batch = 2, heads = 2, kv_heads = 2, queries = 8, keys = 8, dim = 4, v_dim = 4;
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;
  at::ScalarType dtype = at::kFloat;
  double tolerance = 1e-5;

  std::string describe() const {
    return torch::str("queries ", queries, ", keys ", keys, ", heads ", heads, "/", kv_heads,
                      ", head dim ", dim, "/", v_dim, is_causal ? ", causal" : "");
  }
};

struct Attention {
  at::Tensor output;
  std::vector<at::Tensor> gradients;
};

at::Tensor attend(const AttentionCase& test, const std::vector<at::Tensor>& inputs) {
  return torch::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], {}, 0.0,
                                             test.is_causal, test.scale,
                                             test.heads != test.kv_heads);
}

// q, k, v, and the gradient of the output.
std::vector<at::Tensor> values_for(const AttentionCase& test) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto draw = [&](int64_t heads, int64_t length, int64_t dim) {
    return on_test_device(torch::randn({test.batch, heads, length, dim}, generator).to(test.dtype));
  };
  return {draw(test.heads, test.queries, test.dim), draw(test.kv_heads, test.keys, test.dim),
          draw(test.kv_heads, test.keys, test.v_dim), draw(test.heads, test.queries, test.v_dim)};
}

Attention of_one_process(const AttentionCase& test) {
  const auto values = values_for(test);
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < 3; ++i) inputs.push_back(values[i].to(at::kFloat).requires_grad_(true));
  const at::Tensor output = attend(test, inputs);
  output.backward(values[3].to(at::kFloat));
  return {output.detach(), {inputs[0].grad(), inputs[1].grad(), inputs[2].grad()}};
}

// The forward in a scope, and the backward after it. Values are given back in their own order.
Attention in_scope(const AttentionCase& test, const DeviceMesh& mesh, const Placements& placements,
                   const ContextParallelOptions& options) {
  const auto ordered = [&](const at::Tensor& tensor, auto order) {
    return options.load_balance ? order(tensor, 2, mesh, options.mesh_dim) : tensor;
  };
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& value : values_for(test))
    inputs.push_back(distribute(ordered(value, balance_sequence), mesh, placements));
  for (size_t i = 0; i < 3; ++i) inputs[i].requires_grad_(true);
  at::Tensor output;
  {
    const ContextParallel scope(mesh, options);
    output = attend(test, inputs);
  }
  output.backward(inputs[3]);
  EXPECT_EQ(placements_of(output), normalize(placements, mesh.ndim(), 4));
  Attention result{ordered(full_tensor(output.detach()), unbalance_sequence), {}};
  for (size_t i = 0; i < 3; ++i) {
    const at::Tensor gradient = inputs[i].grad();
    EXPECT_EQ(placements_of(gradient), placements_of(inputs[i]));
    EXPECT_EQ(gradient.scalar_type(), test.dtype);
    result.gradients.push_back(ordered(full_tensor(gradient), unbalance_sequence));
  }
  return result;
}

void expect_close(const at::Tensor& a, const at::Tensor& b, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  EXPECT_TRUE(testing::close_values(a.to(at::kFloat), b, tolerance))
      << what << ": " << (a.to(at::kFloat) - b).abs().max().item<double>();
}

void expect_as_one_process(const AttentionCase& test, const DeviceMesh& mesh,
                           const Placements& placements, const ContextParallelOptions& options) {
  const std::string what =
      test.describe() + (options.load_balance ? ", balanced" : "") + ", " + to_string(placements);
  const Attention expected = of_one_process(test);
  const Attention result = in_scope(test, mesh, placements, options);
  expect_close(result.output, expected.output, test.tolerance, what + ", output");
  for (size_t i = 0; i < 3; ++i)
    expect_close(result.gradients[i], expected.gradients[i], test.tolerance,
                 what + ", gradient " + "qkv"[i]);
}

// Each case, with and without a mask, with both ways to send; balanced where the length allows it.
void expect_on_lines(const std::vector<AttentionCase>& cases) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_world(
        ranks,
        [&](World&) {
          const auto mesh = DeviceMesh::over_world();
          for (AttentionCase test : cases) {
            for (const bool is_causal : {false, true}) {
              if (is_causal && test.queries != test.keys) continue;
              test.is_causal = is_causal;
              for (const auto rotate : {RotateMethod::kRing, RotateMethod::kAllGather}) {
                expect_as_one_process(test, mesh, {Shard{2}}, {.rotate = rotate});
                if (test.queries % (2 * ranks) == 0 && test.keys % (2 * ranks) == 0)
                  expect_as_one_process(test, mesh, {Shard{2}},
                                        {.load_balance = true, .rotate = rotate});
              }
            }
          }
        },
        std::chrono::seconds(60));
  }
}

TEST(ContextParallel, ValuesAndGradientsAreThoseOfOneProcess) {
  expect_on_lines({{.queries = 24, .keys = 24}, {.queries = 48, .keys = 48, .scale = 0.3}});
}

TEST(ContextParallel, SequencesMayBeUnevenOrShorterThanTheRanks) {
  expect_on_lines(
      {{.queries = 7, .keys = 7}, {.queries = 3, .keys = 3}, {.queries = 1, .keys = 1}});
}

TEST(ContextParallel, QueriesAndKeysMayHaveOtherLengths) {
  expect_on_lines({{.queries = 5, .keys = 11}, {.queries = 24, .keys = 3}});
}

TEST(ContextParallel, HeadsMayShareKeysAndValues) {
  expect_on_lines({{.heads = 6, .kv_heads = 2, .queries = 24, .keys = 24},
                   {.heads = 3, .kv_heads = 1, .queries = 9, .keys = 9}});
}

TEST(ContextParallel, HeadDimsMayBeOddAndDifferent) {
  expect_on_lines({{.queries = 24, .keys = 24, .dim = 5, .v_dim = 5},
                   {.queries = 24, .keys = 24, .dim = 3, .v_dim = 7},
                   {.heads = 4, .queries = 24, .keys = 24, .dim = 1, .v_dim = 3}});
}

TEST(ContextParallel, HalfPrecisionIsMergedInFloat) {
  expect_on_lines({{.queries = 24, .keys = 24, .dtype = at::kBFloat16, .tolerance = 3e-2},
                   {.heads = 4, .queries = 24, .keys = 24, .dtype = at::kHalf, .tolerance = 5e-3}});
}

TEST(ContextParallel, HeadsOrBatchMayBeCutOverAnotherMeshDim) {
  run_world(
      4,
      [](World&) {
        const auto mesh = DeviceMesh::over_world({2, 2}, {"tp", "cp"});
        for (const bool is_balanced : {false, true}) {
          const ContextParallelOptions on_second{.mesh_dim = "cp", .load_balance = is_balanced},
              on_first{.mesh_dim = 0, .load_balance = is_balanced};
          AttentionCase test{.heads = 4, .kv_heads = 4, .is_causal = true};
          expect_as_one_process(test, mesh, {Shard{1}, Shard{2}}, on_second);
          expect_as_one_process(test, mesh, {Shard{2}, Shard{0}}, on_first);
          expect_as_one_process(test, mesh, {Replicate{}, Shard{2}}, on_second);
          test.kv_heads = 2;
          expect_as_one_process(test, mesh, {Shard{1}, Shard{2}}, on_second);
        }
        const AttentionCase uneven{.batch = 1, .heads = 3, .kv_heads = 3, .queries = 5, .keys = 5};
        expect_as_one_process(uneven, mesh, {Shard{1}, Shard{2}}, {.mesh_dim = "cp"});
        expect_as_one_process(uneven, mesh, {Shard{0}, Shard{2}}, {.mesh_dim = -1});
      },
      std::chrono::seconds(60));
}

TEST(ContextParallel, OtherPlacementsAlongOtherMeshDimsAreChanged) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2}, {"tp", "cp"});
    // A rank's heads of q would need a head of k that another rank has; a part of each head dim.
    const AttentionCase test{.heads = 6, .kv_heads = 3, .queries = 5, .keys = 5};
    const auto values = values_for(test);
    std::vector<at::Tensor> inputs;
    const std::vector<Placement> others{Shard{1}, Shard{3}, Shard{2}};
    for (size_t i = 0; i < 3; ++i)
      inputs.push_back(distribute(values[i], mesh, {others[i], Shard{2}}).requires_grad_(true));
    const ContextParallel scope(mesh, {.mesh_dim = "cp"});
    const at::Tensor output = attend(test, inputs);
    EXPECT_EQ(placements_of(output), (Placements{Replicate{}, Shard{2}}));
    output.backward(distribute(values[3], mesh, {}));
    const Attention expected = of_one_process(test);
    expect_close(full_tensor(output.detach()), expected.output, 1e-5, "output");
    for (size_t i = 0; i < 3; ++i)
      expect_close(full_tensor(inputs[i].grad()), expected.gradients[i], 1e-5, "gradient");
  });
}

// Runs a forward and a backward of q, k and v whose parts have `bytes` each, and checks the
// messages of the mesh's line.
void expect_messages(World& world, RotateMethod rotate, bool is_balanced, at::ScalarType dtype) {
  const auto mesh = DeviceMesh::over_world();
  const int64_t ranks = mesh.size(), others = ranks - 1;
  const AttentionCase test{
      .heads = 4, .kv_heads = 2, .queries = 24, .keys = 24, .is_causal = true, .dtype = dtype};
  const int64_t numel = 2 * test.batch * test.kv_heads * (test.keys / ranks) * test.dim,
                bytes = numel * static_cast<int64_t>(c10::elementSize(dtype)),
                gradient_bytes = numel * 4;  // summed in float
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& value : values_for(test))
    inputs.push_back(distribute(value, mesh, {Shard{2}}));
  for (size_t i = 0; i < 3; ++i) inputs[i].requires_grad_(true);
  CommDebug debug;
  const auto counts = count(world, [&] {
    const ContextParallel scope(mesh, {.load_balance = is_balanced, .rotate = rotate});
    attend(test, inputs).backward(inputs[3]);
  });
  if (rotate == RotateMethod::kRing) {
    EXPECT_EQ(debug.calls(), ranks == 1 ? 0 : 2 * others + ranks) << debug.describe();
    // Keys and values go around in the forward and again in the backward.
    EXPECT_EQ(debug.calls("all_to_all", kForward), 2 * others);
    EXPECT_EQ(debug.bytes("all_to_all", kForward), 2 * others * bytes);
    EXPECT_EQ(debug.calls("all_to_all", kBackward), ranks == 1 ? 0 : ranks);
    EXPECT_EQ(debug.bytes("all_to_all", kBackward), ranks == 1 ? 0 : ranks * gradient_bytes);
  } else {
    EXPECT_EQ(debug.calls(), ranks == 1 ? 0 : 3) << debug.describe();
    EXPECT_EQ(debug.calls("all_gather", kForward), ranks == 1 ? 0 : 2);
    EXPECT_EQ(debug.bytes("all_gather", kForward), ranks == 1 ? 0 : 2 * ranks * bytes);
    EXPECT_EQ(debug.bytes("reduce_scatter", kBackward), ranks == 1 ? 0 : ranks * gradient_bytes);
  }
  // An exchange with one peer sends that message only.
  if (world.process_group()->backend_name() != "gloo") return;
  const int64_t gradients = rotate == RotateMethod::kRing && ranks > 1 ? ranks : others;
  EXPECT_EQ(counts.bytes_sent(), 2 * others * bytes + gradients * gradient_bytes);
}

TEST(ContextParallel, SendsEachBlockOncePerRank) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_world(ranks, [](World& world) {
      world.set_process_group(counting_process_group(world.process_group()));
      for (const auto rotate : {RotateMethod::kRing, RotateMethod::kAllGather}) {
        for (const auto dtype : {at::kFloat, at::kBFloat16}) {
          expect_messages(world, rotate, false, dtype);
          expect_messages(world, rotate, true, dtype);
        }
      }
    });
  }
}

TEST(ContextParallel, OverTheArena) {
  run_arena(3, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    for (const auto rotate : {RotateMethod::kRing, RotateMethod::kAllGather}) {
      for (const bool is_balanced : {false, true})
        expect_as_one_process({.queries = 24, .keys = 24, .is_causal = true}, mesh, {Shard{2}},
                              {.load_balance = is_balanced, .rotate = rotate});
    }
  });
}

TEST(ContextParallel, BalancedOrderGivesEachRankAChunkFromEitherEnd) {
  run_world(3, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor positions = on_test_device(torch::arange(12).view({1, 12}).repeat({2, 1}));
    const at::Tensor balanced = balance_sequence(positions, 1, mesh);
    const at::Tensor own = to_local(distribute(balanced, mesh, {Shard{1}}))[0].cpu();
    const int64_t front = 2 * world.rank(), back = 10 - 2 * world.rank();
    EXPECT_TRUE(torch::equal(own, torch::tensor({front, front + 1, back, back + 1})));
    EXPECT_TRUE(testing::same_values(unbalance_sequence(balanced, -1, mesh), positions));
    // Also where the sequence is cut, and differentiable.
    const at::Tensor whole =
        distribute(on_test_device(torch::randn({6, 2})), mesh, {Shard{0}}).requires_grad_(true);
    const at::Tensor order = balance_sequence(whole, 0, mesh);
    EXPECT_TRUE(
        testing::same_values(full_tensor(unbalance_sequence(order, 0, mesh)), full_tensor(whole)));
    (order * order.detach()).sum().backward();
    EXPECT_TRUE(testing::same_values(full_tensor(whole.grad()), full_tensor(whole)));
  });
}

TEST(ContextParallel, OtherAttentionsAreComputedAsWithoutTheScope) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const AttentionCase test{.is_causal = true};
    const auto values = values_for(test);
    const Attention expected = of_one_process(test);
    const auto run = [&](const Placements& placements) {
      std::vector<at::Tensor> inputs;
      for (const at::Tensor& value : values) inputs.push_back(distribute(value, mesh, placements));
      CommDebug debug;
      const at::Tensor output = attend(test, inputs);
      EXPECT_EQ(debug.calls("", kForward), 0) << debug.describe();
      expect_close(full_tensor(output), expected.output, 1e-5, to_string(placements));
    };
    run({Shard{2}});
    {
      const ContextParallel scope(mesh);
      run({Shard{1}});
      run({Replicate{}});
      EXPECT_TRUE(testing::close_values(attend(test, values), expected.output, 1e-5));
    }
    run({Shard{2}});
  });
}

TEST(ContextParallel, TheInnermostScopeCounts) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const AttentionCase test{.is_causal = true};
    const ContextParallel outer(mesh, {.load_balance = true});
    expect_as_one_process(test, mesh, {Shard{2}}, {.rotate = RotateMethod::kAllGather});
    expect_as_one_process(test, mesh, {Shard{2}}, {.load_balance = true});
  });
}

TEST(ContextParallel, RanksOutsideOfTheMeshRunTheSameProgram) {
  run_world(3, [](World& world) {
    const DeviceMesh mesh({2}, {2, 0});
    const AttentionCase test{.v_dim = 3, .is_causal = true};
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& value : values_for(test))
      inputs.push_back(distribute(value, mesh, {Shard{2}}));
    for (size_t i = 0; i < 3; ++i) inputs[i].requires_grad_(true);
    const ContextParallel scope(mesh);
    const at::Tensor output = attend(test, inputs);
    output.backward(inputs[3]);
    EXPECT_EQ(output.sizes(), inputs[3].sizes());
    EXPECT_EQ(placements_of(output), Placements{Shard{2}});
    EXPECT_EQ(inputs[1].grad().sizes(), inputs[1].sizes());
    if (world.rank() == 1) return;
    const Attention expected = of_one_process(test);
    expect_close(full_tensor(output.detach()), expected.output, 1e-5, "output");
    expect_close(full_tensor(inputs[1].grad()), expected.gradients[1], 1e-5, "gradient of k");
  });
}

TEST(ContextParallel, ACheckpointRecomputesInTheScope) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const AttentionCase test{.is_causal = true};
    const Attention expected = of_one_process(test);
    std::vector<at::Tensor> inputs;
    for (const at::Tensor& value : values_for(test))
      inputs.push_back(distribute(balance_sequence(value, 2, mesh), mesh, {Shard{2}}));
    for (size_t i = 0; i < 3; ++i) inputs[i].requires_grad_(true);
    const ContextParallel scope(mesh, {.load_balance = true});
    const at::Tensor output = checkpoint(
        [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return attend(test, {q, k, v});
        },
        inputs[0], inputs[1], inputs[2]);
    output.backward(inputs[3]);
    for (size_t i = 0; i < 3; ++i)
      expect_close(unbalance_sequence(full_tensor(inputs[i].grad()), 2, mesh),
                   expected.gradients[i], 1e-5, "gradient");
  });
}

at::Tensor ones(const DeviceMesh& mesh, const std::vector<int64_t>& sizes,
                const Placement& placement = Shard{2}) {
  return distribute(on_test_device(torch::ones(sizes)), mesh, {placement});
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, bool is_causal = false,
                  bool enable_gqa = false) {
  return torch::scaled_dot_product_attention(q, k, k, {}, 0.0, is_causal, std::nullopt, enable_gqa);
}

TEST(ContextParallel, WhatNeedsScoresOfOtherRanksIsRefusedOnAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      const at::Tensor x = ones(mesh, {2, 2, 6, 4}), mask = ones(mesh, {6, 6}, Replicate{});
      const ContextParallel scope(mesh);
      EXPECT_THROW(torch::scaled_dot_product_attention(x, x, x, mask), c10::NotImplementedError);
      EXPECT_THROW(torch::scaled_dot_product_attention(x, x, x, {}, 0.1), c10::NotImplementedError);
      const at::Tensor leaf = x.clone().requires_grad_(true);
      EXPECT_THROW(attend(leaf, leaf).sum().backward({}, true, /*create_graph=*/true),
                   c10::NotImplementedError);
      // No refusal leaves anything behind.
      EXPECT_TRUE(
          testing::close_values(full_tensor(attend(x, x)), torch::ones({2, 2, 6, 4}), 1e-5));
    });
  }
}

TEST(ContextParallel, SizesThatDontFitAreRefusedOnAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      const at::Tensor x = ones(mesh, {2, 2, 6, 4});
      const ContextParallel scope(mesh);
      EXPECT_THROW(attend(x, ones(mesh, {2, 2, 12, 4}), true), c10::ValueError);  // lengths
      EXPECT_THROW(attend(x, ones(mesh, {1, 2, 6, 4})), c10::ValueError);         // batch
      EXPECT_THROW(attend(x, ones(mesh, {2, 2, 6, 5})), c10::ValueError);         // head dim
      EXPECT_THROW(attend(x, ones(mesh, {2, 1, 6, 4})), c10::ValueError);         // heads
      EXPECT_THROW(attend(ones(mesh, {2, 3, 6, 4}), x, false, true), c10::ValueError);
      EXPECT_THROW(attend(x, x.to(at::kHalf)), c10::ValueError);
    });
  }
}

TEST(ContextParallel, MeshesAndOrdersThatDontFitAreRefusedOnAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [ranks](World&) {
      const auto mesh = DeviceMesh::over_world();
      const DeviceMesh square({1, ranks}, mesh.ranks());
      EXPECT_THROW(ContextParallel(mesh, {.mesh_dim = "cp"}), c10::ValueError);
      EXPECT_THROW(ContextParallel(mesh, {.mesh_dim = 1}), c10::ValueError);
      EXPECT_THROW((ContextParallel(square)), c10::ValueError);
      EXPECT_THROW(balance_sequence(torch::ones({2, 7}), 1, mesh), c10::ValueError);
      const ContextParallel scope(mesh, {.load_balance = true});
      const at::Tensor odd = ones(mesh, {2, 2, 7, 4}), x = ones(mesh, {2, 2, 6, 4}),
                       whole = ones(mesh, {2, 2, 6, 4}, Replicate{});
      EXPECT_THROW(attend(odd, odd, true), c10::ValueError);
      EXPECT_THROW(attend(whole, x, true), c10::ValueError);
      const at::Tensor elsewhere =
          distribute(on_test_device(torch::ones({2, 2, 6, 4})), square, {Replicate{}, Shard{2}});
      EXPECT_THROW(attend(elsewhere, elsewhere), c10::ValueError);
    });
  }
}

}  // namespace tessera::context_parallel_test
