// Shards with a split factor: conversions, errors, and the operators that keep them.

#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>

#include "support/counted.h"
#include "support/models.h"
#include "tensor/chunks.h"
#include "tensor/tests/test_generator.h"

namespace tessera::split_test {

namespace nn = torch::nn;
using testing::expect_error;
using testing::on_test_device;

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

at::Tensor doubles(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(
      torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble));
}

// The indices of a rank's elements along a dim of `size` elements.
at::Tensor own_indices(int64_t size, const Shard& shard, int64_t parts, int64_t index) {
  std::vector<at::Tensor> blocks;
  for (const at::Tensor& block : torch::arange(size).chunk(shard.split_factor)) {
    const Range range = chunk(block.numel(), parts, index);
    blocks.push_back(block.slice(0, range.begin, range.end));
  }
  return torch::cat(blocks);
}

// Only for placements in which no two mesh dims shard the same dim.
void expect_part(const at::Tensor& tensor, const at::Tensor& whole) {
  const DeviceMesh& mesh = mesh_of(tensor);
  const Placements& placements = placements_of(tensor);
  if (std::ranges::any_of(placements, is_partial)) return;
  at::Tensor part = whole;
  for (int64_t i = 0; i < mesh.ndim(); ++i) {
    const auto* const shard = std::get_if<Shard>(&placements[i]);
    if (!shard) continue;
    part = part.index_select(
        shard->dim, on_test_device(own_indices(whole.size(shard->dim), *shard, mesh.size(i),
                                               (*mesh.coordinate())[i])));
  }
  EXPECT_TRUE(torch::equal(to_local(tensor), part)) << describe(tensor);
}

bool is_allowed(const Placement& placement, int64_t ranks, const std::vector<int64_t>& sizes) {
  if (!is_split(placement)) return true;
  const auto& [dim, factor] = std::get<Shard>(placement);
  return sizes[dim] % (factor * ranks) == 0;
}

const std::vector<Placement> kAll = {Replicate{},
                                     Partial{},
                                     Shard{0},
                                     Shard{1},
                                     Shard{0, 3},
                                     Shard{1, 2},
                                     Shard{0, 2},
                                     Partial{PartialOp::kNorm},
                                     Partial{PartialOp::kMax}};

std::vector<Placements> on_a_line(int64_t ranks, const std::vector<int64_t>& sizes) {
  std::vector<Placements> all;
  for (const Placement& placement : kAll) {
    if (is_allowed(placement, ranks, sizes)) all.push_back({placement});
  }
  return all;
}

void expect_all_pairs(const DeviceMesh& mesh, const std::vector<int64_t>& sizes,
                      const std::vector<Placements>& all) {
  const at::Tensor whole = numbers(sizes);
  for (const Placements& from : all) {
    const at::Tensor source = distribute(whole, mesh, from);
    expect_part(source, whole);
    for (const Placements& to : all) {
      SCOPED_TRACE(to_string(from) + " to " + to_string(to));
      const at::Tensor result = redistribute(source, to);
      EXPECT_EQ(placements_of(result), to);
      expect_part(result, whole);
      // For a norm, the root of the square equals the value only up to rounding.
      EXPECT_TRUE(torch::allclose(full_tensor(result), whole, 1e-6, 0));
      expect_part(source, whole);
    }
  }
}

class Split : public ::testing::TestWithParam<std::tuple<int, std::vector<int64_t>>> {};

TEST_P(Split, AllPairsOnALine) {
  const auto& [ranks, sizes] = GetParam();
  run_world(ranks, [&](World&) {
    expect_all_pairs(DeviceMesh::over_world(), sizes, on_a_line(ranks, sizes));
  });
}

INSTANTIATE_TEST_SUITE_P(Mesh, Split,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(std::vector<int64_t>{36, 12},
                                                              std::vector<int64_t>{18, 5},
                                                              std::vector<int64_t>{5, 12, 2},
                                                              std::vector<int64_t>{0, 12})));

TEST(SplitOnASquareSlow, AllPairs) {
  run_world(
      4,
      [](World&) {
        std::vector<Placements> all;
        for (const Placement& a : kAll) {
          for (const Placement& b : kAll) {
            const auto shares = [](const Placement& p, const Placement& q) {
              return is_shard(p) && is_shard(q, std::get<Shard>(p).dim);
            };
            const bool is_other =
                std::max(a.index(), b.index()) == 2 && a != b && is_partial(a) && is_partial(b);
            if (!shares(a, b) && !is_other) all.push_back({a, b});
          }
        }
        all.push_back({Shard{0}, Shard{0}});
        all.push_back({Shard{1}, Shard{1}});
        const at::Tensor whole = numbers({12, 8});
        const DeviceMesh mesh = DeviceMesh::over_world({2, 2});
        for (const Placements& from : all) {
          const at::Tensor source = distribute(whole, mesh, from);
          for (const Placements& to : all) {
            SCOPED_TRACE(to_string(from) + " to " + to_string(to));
            const at::Tensor result = redistribute(source, to);
            if (to[0] != to[1]) expect_part(result, whole);
            EXPECT_TRUE(torch::allclose(full_tensor(result), whole, 1e-6, 0));
          }
        }
      },
      std::chrono::seconds(300));
}

TEST(SplitBetweenMeshes, MovesToEveryOther) {
  run_world(
      4,
      [](World&) {
        const std::vector<int64_t> sizes = {36, 12};
        const at::Tensor whole = numbers(sizes);
        const std::vector<DeviceMesh> meshes = {DeviceMesh({2}, {0, 1}), DeviceMesh({3}, {1, 3, 2}),
                                                DeviceMesh({2, 2}, {3, 1, 0, 2})};
        for (const DeviceMesh& a : meshes) {
          for (const DeviceMesh& b : meshes) {
            if (!a.is_member() && !b.is_member()) continue;
            for (const Placement& from : kAll) {
              for (const Placement& to : kAll) {
                const at::Tensor source = distribute(whole, a, {from});
                const at::Tensor result = redistribute(source, b, {to});
                SCOPED_TRACE(describe(source) + " to " + describe(result));
                if (!b.is_member()) continue;
                expect_part(result, whole);
                EXPECT_TRUE(torch::allclose(full_tensor(result), whole, 1e-6, 0));
              }
            }
          }
        }
      },
      std::chrono::seconds(120));
}

TEST(SplitOnALine, IsDifferentiable) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const auto all = on_a_line(2, {12, 8});
    for (const Placements& from : all) {
      for (const Placements& to : all) {
        at::Tensor whole = numbers({12, 8}).requires_grad_(true);
        const at::Tensor result = redistribute(distribute(whole * 2, mesh, from), to);
        const at::Tensor factors = numbers({12, 8}, 2);
        (full_tensor(result) * factors).sum().backward();
        EXPECT_TRUE(torch::allclose(whole.grad(), factors * 2))
            << to_string(from) << " to " << to_string(to);
      }
    }
  });
}

TEST(SplitOnALine, PartsGoInAndOut) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    // Rows 0 to 11 in blocks of 4: rank 0 has the first half of each, rank 1 the second.
    const std::vector<float> rows = world.rank() == 0 ? std::vector<float>{0, 1, 4, 5, 8, 9}
                                                      : std::vector<float>{2, 3, 6, 7, 10, 11};
    const at::Tensor whole = on_test_device(torch::arange(12.).to(at::kFloat));
    const at::Tensor part = on_test_device(torch::tensor(rows)).requires_grad_(true);
    EXPECT_TRUE(torch::equal(to_local(distribute(whole, mesh, {Shard{0, 3}})), part));
    const at::Tensor made = from_local(part, mesh, {Shard{-1, 3}});
    EXPECT_EQ(placements_of(made), Placements({Shard{0, 3}}));
    EXPECT_TRUE(torch::equal(full_tensor(made), whole));
    (full_tensor(made) * whole).sum().backward();
    EXPECT_TRUE(torch::equal(part.grad(), part.detach()));
  });
}

TEST(SplitOnALine, RefusesWhatCannotBeSplit) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor whole = numbers({18, 4});
    const std::vector<std::string> parts = {"3 * 4", "dim 0 of size 18",
                                            "[Shard(0, split_factor=3)]"};
    const auto with = [&](const std::string& function) {
      auto all = parts;
      all.push_back(function);
      return all;
    };
    const auto split = Placements{Shard{0, 3}};
    EXPECT_THROW(distribute(whole, mesh, split), c10::ValueError);
    expect_error([&] { distribute(whole, mesh, split); }, with("[distribute]"));
    expect_error([&] { redistribute(distribute(whole, mesh, {}), split); }, with("[redistribute]"));
    expect_error(
        [&] {
          from_local(whole.slice(0, 0, 4), mesh, split, std::vector<int64_t>{18, 4});
        },
        with("[from_local]"));
    EXPECT_THROW(distribute(whole, mesh, {Shard{0, 0}}), c10::ValueError);
    const auto square = DeviceMesh::over_world({2, 2});
    for (const Placements& both :
         {Placements{Shard{1, 2}, Shard{1}}, Placements{Shard{1}, Shard{1, 2}}}) {
      EXPECT_THROW(distribute(whole, square, both), c10::ValueError);
      expect_error([&] { distribute(whole, square, both); },
                   {"[distribute]", "only one mesh dim", "dim 1", to_string(both)});
    }
    // The factor alone is too large to divide the dim, though there are not too many ranks.
    EXPECT_THROW(distribute(whole, mesh, {Shard{1, 4}}), c10::ValueError);
  });
}

TEST(SplitOnALine, SendsNothingForAViewOfItsBlocks) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor whole = numbers({2, 3 * 4 * 5});
    const at::Tensor x = distribute(whole, mesh, {Shard{1, 3}});
    at::Tensor blocks, merged, rows, back;
    const auto sent = count(world, [&] {
      blocks = x.view({2, 3, 4, 5});
      merged = (blocks + 1).view({2, 60});
      rows = x.view({2, 3, 1, 20}).view({6, 20});  // (block, elements) of each row
      back = rows.view({2, 60});
    });
    EXPECT_EQ(sent.calls(), 0);
    EXPECT_EQ(placements_of(blocks), Placements({Shard{2}}));
    EXPECT_EQ(placements_of(merged), Placements({Shard{1, 3}}));
    EXPECT_EQ(placements_of(rows), Placements({Shard{1}}));
    EXPECT_EQ(placements_of(back), Placements({Shard{1, 3}}));
    EXPECT_TRUE(torch::equal(full_tensor(blocks), whole.view({2, 3, 4, 5})));
    EXPECT_TRUE(torch::equal(full_tensor(merged), whole + 1));
    EXPECT_TRUE(torch::equal(full_tensor(rows), whole.view({6, 20})));
    blocks.select(1, 1).zero_();  // x is their base
    EXPECT_TRUE(
        torch::equal(full_tensor(x).slice(1, 20, 40), on_test_device(torch::zeros({2, 20}))));
    // Blocks of 5 rows can't be cut in two: the whole tensor is gathered, and right.
    EXPECT_TRUE(torch::equal(full_tensor(x.view({2, 12, 5})), full_tensor(x).view({2, 12, 5})));
    EXPECT_TRUE(torch::equal(full_tensor(x.view({2, 4, 3, 5})), full_tensor(x).view({2, 4, 3, 5})));
  });
}

TEST(SplitOnALine, OperatorsThatNeedPlainPartsAreRight) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const auto split = [&](const at::Tensor& tensor, int64_t dim) {
      return distribute(tensor, mesh, {Shard{dim, 2}});
    };
    const at::Tensor image = numbers({4, 8, 5, 5}), kernel = numbers({8, 4, 3, 3}, 2);
    const auto convolved = [](const at::Tensor& x, const at::Tensor& own_kernel) {
      return at::convolution(x, own_kernel, {}, {1, 1}, {0, 0}, {1, 1}, /*transposed=*/false,
                             {0, 0}, /*groups=*/2);
    };
    EXPECT_TRUE(torch::allclose(full_tensor(convolved(split(image, 1), split(kernel, 0))),
                                convolved(image, kernel), 1e-4, 1e-5));
    const at::Tensor weight = numbers({8, 4}), indices = on_test_device(torch::arange(8).flip(0));
    EXPECT_TRUE(torch::equal(full_tensor(at::embedding(split(weight, 0), split(indices, 0))),
                             at::embedding(weight, indices)));
    const at::Tensor scale = numbers({8}, 3), shift = numbers({8}, 4);
    EXPECT_TRUE(torch::allclose(
        full_tensor(at::group_norm(split(image, 1), 4, split(scale, 0), split(shift, 0))),
        at::group_norm(image, 4, scale, shift), 1e-4, 1e-5));
    for (const int64_t dim : {0, 1}) {
      EXPECT_TRUE(torch::allclose(
          full_tensor(at::batch_norm(split(image, dim), split(scale, 0), split(shift, 0), {}, {},
                                     /*training=*/true, 0.1, 1e-5, false)),
          at::batch_norm(image, scale, shift, {}, {}, true, 0.1, 1e-5, false), 1e-4, 1e-5));
    }
  });
}

TEST(SplitOnALine, RandomNumbersAreThoseOfOneProcess) {
  for (const int64_t dim : {0, 1}) {
    at::manual_seed(5);
    const at::Tensor whole = numbers({12, 8}).cpu();
    const auto draw = [](at::Tensor x) {
      at::Tensor noise = torch::randn_like(x);
      x = torch::dropout(x + noise, 0.5, /*train=*/true);
      return x + noise.uniform_();
    };
    at::Tensor expected;
    run_world(1, [&](World&) {
      testing::seed_test_generator(9);
      expected = draw(on_test_device(whole.clone())).cpu();
    });
    run_world(2, [&](World&) {
      testing::seed_test_generator(9);
      const auto mesh = DeviceMesh::over_world();
      const at::Tensor result = draw(distribute(on_test_device(whole), mesh, {Shard{dim, 2}}));
      EXPECT_EQ(placements_of(result), Placements({Shard{dim, 2}}));
      EXPECT_TRUE(testing::same_values(full_tensor(result), expected));
    });
  }
}

struct AttentionImpl : nn::Module {
  AttentionImpl(int64_t width, int64_t heads)
      : heads(heads),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", nn::Linear(width, 3 * width))),
        proj(register_module("proj", nn::Linear(width, width))) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    torch::NoGradGuard no_grad;
    to(at::kDouble);  // so that rounding does not hide anything
    for (at::Tensor& parameter : parameters()) parameter.normal_(0, 0.5, generator);
    to(testing::test_device());
  }

  // Without the norm.
  at::Tensor attend(const at::Tensor& x) {
    const int64_t rows = x.size(0), length = x.size(1), width = x.size(2);
    const at::Tensor all =
        qkv(x).view({rows, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const at::Tensor mixed = torch::scaled_dot_product_attention(all[0], all[1], all[2], {}, 0.0,
                                                                 /*is_causal=*/true);
    return proj(mixed.transpose(1, 2).reshape({rows, length, width}));
  }
  at::Tensor forward(const at::Tensor& x) { return x + attend(norm(x)); }

  int64_t heads;
  nn::LayerNorm norm;
  nn::Linear qkv, proj;
};
TORCH_MODULE(Attention);

void shard_by_heads(Attention& attention, const DeviceMesh& mesh) {
  distribute_(attention->qkv->weight, mesh, {Shard{0, 3}});
  distribute_(attention->qkv->bias, mesh, {Shard{0, 3}});
  distribute_(attention->proj->weight, mesh, {Shard{1}});
  for (const at::Tensor& whole :
       {attention->proj->bias, attention->norm->weight, attention->norm->bias})
    distribute_(whole, mesh, {});
}

void expect_gradients(Attention& dist, Attention& plain) {
  const auto expected = plain->named_parameters();
  for (const auto& parameter : dist->named_parameters()) {
    if (!expected[parameter.key()].grad().defined()) continue;
    EXPECT_EQ(placements_of(parameter.value().grad()), placements_of(parameter.value()))
        << parameter.key();
    EXPECT_TRUE(torch::allclose(full_tensor(parameter.value().grad()),
                                expected[parameter.key()].grad(), 1e-9, 1e-9))
        << parameter.key();
  }
}

class FusedAttention : public ::testing::TestWithParam<int> {};

TEST_P(FusedAttention, NeedsOneAllReduceEachWay) {
  run_world(GetParam(), [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    const auto mesh = DeviceMesh::over_world();
    const int64_t messages = world.size() > 1 ? 1 : 0;
    Attention plain(24, 4), dist(24, 4);
    shard_by_heads(dist, mesh);
    const at::Tensor own = doubles({2, 5, 24}).requires_grad_(true);
    const at::Tensor x = distribute(doubles({2, 5, 24}).requires_grad_(true), mesh, {});
    const at::Tensor expected = plain->attend(own);
    at::Tensor y;
    const auto forward = count(world, [&] { y = redistribute(dist->attend(x), {Replicate{}}); });
    EXPECT_TRUE(torch::allclose(full_tensor(y), expected, 1e-9, 1e-9));
    EXPECT_EQ(forward.calls(), messages);
    EXPECT_EQ(forward.all_reduce.calls, messages);
    const at::Tensor factors = doubles({2, 5, 24}, 2);
    (expected * factors).sum().backward();
    const at::Tensor loss = (y * factors).sum();
    const auto backward = count(world, [&] { loss.backward(); });
    EXPECT_EQ(backward.calls(), messages);
    EXPECT_EQ(backward.all_reduce.calls, messages);
    expect_gradients(dist, plain);
    EXPECT_TRUE(torch::allclose(full_tensor(x.grad()), own.grad(), 1e-9, 1e-9));
  });
}

TEST_P(FusedAttention, OfABlockIsThatOfOneProcess) {
  run_world(GetParam(), [](World& world) {
    const int size = world.size();
    std::vector<DeviceMesh> meshes = {DeviceMesh::over_world()};
    if (size == 4) meshes.push_back(DeviceMesh::over_world({2, 2}));
    for (const DeviceMesh& mesh : meshes) {
      for (const Placement& last :
           {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
        SCOPED_TRACE(to_string(last));
        Attention plain(24, 4), dist(24, 4);
        // On a square, the second mesh dim shards the heads, and the first the data.
        Placements at(mesh.ndim(), Replicate{});
        const auto place = [&](const at::Tensor& tensor, const Placement& placement) {
          at.back() = placement;
          distribute_(tensor, mesh, at);
        };
        place(dist->qkv->weight, Shard{0, 3});
        place(dist->qkv->bias, Shard{0, 3});
        place(dist->proj->weight, Shard{1});
        for (const at::Tensor& whole : {dist->proj->bias, dist->norm->weight, dist->norm->bias})
          place(whole, Replicate{});
        Placements data(mesh.ndim(), Replicate{});
        data[0] = last;
        const at::Tensor x = distribute(doubles({4, 8, 24}), mesh, data);
        const at::Tensor expected = plain->forward(doubles({4, 8, 24})), y = dist->forward(x);
        EXPECT_TRUE(torch::allclose(full_tensor(y), expected, 1e-9, 1e-9));
        expected.square().sum().backward();
        y.square().sum().backward();
        expect_gradients(dist, plain);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Mesh, FusedAttention, ::testing::Values(1, 2, 4));

TEST(SplitOnALine, TrainsAsOneProcess) {
  run_world(2, [](World&) {
    Attention plain(24, 4), dist(24, 4);
    shard_by_heads(dist, DeviceMesh::over_world());
    // An optimizer that does not divide by gradients: the gradient of k's bias is only rounding.
    const auto options = torch::optim::SGDOptions(0.05).momentum(0.9);
    torch::optim::SGD plain_optimizer(plain->parameters(), options),
        optimizer(dist->parameters(), options);
    for (int step = 0; step < 3; ++step) {
      for (const auto& [model, its] :
           {std::pair(&plain, &plain_optimizer), std::pair(&dist, &optimizer)}) {
        its->zero_grad();
        (*model)->forward(doubles({2, 5, 24}, step)).square().mean().backward();
        nn::utils::clip_grad_norm_((*model)->parameters(), 0.5);
        its->step();
      }
    }
    const auto expected = plain->named_parameters();
    for (const auto& parameter : dist->named_parameters())
      EXPECT_TRUE(
          torch::allclose(full_tensor(parameter.value()), expected[parameter.key()], 1e-9, 1e-9))
          << parameter.key();
  });
}

}  // namespace tessera::split_test
