// Every change of placements gives the same global tensor, and the parts that the placements say.

#include <gtest/gtest.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/run_world.h"
#include "support/test_device.h"
#include "tensor/chunks.h"

namespace tessera::redistribute_test {

using testing::on_test_device;

const std::vector<PartialOp> kOps = {PartialOp::kSum, PartialOp::kAvg,  PartialOp::kMax,
                                     PartialOp::kMin, PartialOp::kProd, PartialOp::kNorm};

// Equal on all ranks: each computes it alone.
at::Tensor numbers(std::vector<int64_t> sizes, at::ScalarType dtype = at::kFloat) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return on_test_device((torch::arange(numel, at::kDouble) * 0.5 - 3).to(dtype).view(sizes));
}

std::vector<Placement> placements_of_dims(int64_t ndim) {
  std::vector<Placement> all = {Replicate{}};
  for (int64_t d = 0; d < ndim; ++d) all.push_back(Shard{d});
  for (const PartialOp op : kOps) all.push_back(Partial{op});
  return all;
}

std::vector<Placements> all_placements(int64_t mesh_ndim, int64_t ndim) {
  std::vector<Placements> all = {{}};
  for (int64_t i = 0; i < mesh_ndim; ++i) {
    std::vector<Placements> longer;
    for (const Placements& some : all) {
      for (const Placement& next : placements_of_dims(ndim)) {
        longer.push_back(some);
        longer.back().push_back(next);
      }
    }
    all = std::move(longer);
  }
  return all;
}

void expect_part(const at::Tensor& tensor, const at::Tensor& whole, const DeviceMesh& mesh) {
  const auto& placements = placements_of(tensor);
  const bool has_terms = std::any_of(placements.begin(), placements.end(), is_partial);
  if (has_terms) return;
  at::Tensor part = whole;
  const auto box = local_box(whole.sizes(), placements, mesh.shape(), *mesh.coordinate());
  for (size_t d = 0; d < box.size(); ++d)
    part = part.narrow(static_cast<int64_t>(d), box[d].begin, box[d].size());
  EXPECT_TRUE(torch::allclose(to_local(tensor), part)) << describe(tensor);
  EXPECT_EQ(to_local(tensor).sizes(), part.sizes());
}

void expect_all_pairs(const DeviceMesh& mesh, const std::vector<int64_t>& sizes) {
  const at::Tensor whole = numbers(sizes);
  const auto all = all_placements(mesh.ndim(), static_cast<int64_t>(sizes.size()));
  for (const Placements& from : all) {
    const at::Tensor source = distribute(whole, mesh, from);
    const at::Tensor before = to_local(source).clone();
    for (const Placements& to : all) {
      SCOPED_TRACE(to_string(from) + " to " + to_string(to));
      const at::Tensor result = redistribute(source, to);
      EXPECT_EQ(placements_of(result), to);
      EXPECT_EQ(result.sizes(), whole.sizes());
      expect_part(result, whole, mesh);
      EXPECT_TRUE(torch::allclose(full_tensor(result), whole));
      EXPECT_TRUE(torch::equal(to_local(source), before)) << "the source changed";
    }
  }
}

class Redistribute : public ::testing::TestWithParam<std::tuple<int, std::vector<int64_t>>> {};

TEST_P(Redistribute, AllPairsOnALine) {
  const auto& [ranks, sizes] = GetParam();
  run_world(ranks, [&sizes](World&) { expect_all_pairs(DeviceMesh::over_world(), sizes); });
}

INSTANTIATE_TEST_SUITE_P(
    Mesh, Redistribute,
    ::testing::Combine(::testing::Values(1, 2, 3),
                       ::testing::Values(std::vector<int64_t>{5, 4}, std::vector<int64_t>{1, 3, 2},
                                         std::vector<int64_t>{0, 2}, std::vector<int64_t>{})));

TEST(RedistributeOnASquareSlow, AllPairs) {
  run_world(
      4,
      [](World&) {
        expect_all_pairs(DeviceMesh::over_world({2, 2}), {5, 3});
      },
      std::chrono::seconds(300));
}

TEST(RedistributeBetweenMeshes, MovesEveryPlacementToEveryOther) {
  run_world(
      4,
      [](World& world) {
        const std::vector<DeviceMesh> meshes = {DeviceMesh({2}, {0, 1}), DeviceMesh({2}, {1, 0}),
                                                DeviceMesh({3}, {1, 3, 2}),
                                                DeviceMesh({2, 2}, {3, 1, 0, 2})};
        for (const std::vector<int64_t>& sizes :
             {std::vector<int64_t>{5, 3}, std::vector<int64_t>{}}) {
          const at::Tensor whole = numbers(sizes);
          for (const DeviceMesh& a : meshes) {
            for (const DeviceMesh& b : meshes) {
              if (!a.is_member() && !b.is_member()) continue;
              const auto ndim = static_cast<int64_t>(sizes.size());
              for (const Placement& from : placements_of_dims(ndim)) {
                for (const Placement& to : placements_of_dims(ndim)) {
                  const at::Tensor source = distribute(whole, a, {from});
                  const at::Tensor result = redistribute(source, b, {to});
                  EXPECT_EQ(mesh_of(result), b);
                  SCOPED_TRACE(describe(source) + " to " + describe(result));
                  ASSERT_EQ(result.scalar_type(), whole.scalar_type());
                  if (b.is_member()) {
                    expect_part(result, whole, b);
                    EXPECT_TRUE(torch::allclose(full_tensor(result), whole));
                  }
                }
              }
            }
          }
        }
      },
      std::chrono::seconds(120));
}

TEST(RedistributeOnALine, IsDifferentiable) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    for (const Placement& from : placements_of_dims(2)) {
      for (const Placement& to : placements_of_dims(2)) {
        at::Tensor whole = numbers({5, 4}).requires_grad_(true);
        const at::Tensor result = redistribute(distribute(whole * 2, mesh, {from}), {to});
        const at::Tensor factors = numbers({5, 4}) + 1;
        (full_tensor(result) * factors).sum().backward();
        EXPECT_TRUE(torch::allclose(whole.grad(), factors * 2))
            << to_string(from) << " to " << to_string(to);
      }
    }
  });
}

TEST(RedistributeOnALine, TakesTheRootOfTheSumOfSquares) {
  run_world(3, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const Placements norm = {Partial{PartialOp::kNorm}};
    for (const double scale : {1.0, 1e30}) {  // whose square no float holds
      const at::Tensor terms = on_test_device(torch::full({4, 2}, scale * (world.rank() + 1)));
      const at::Tensor whole = on_test_device(torch::full({4, 2}, scale * std::sqrt(14.)));
      const at::Tensor source = from_local(terms, mesh, norm);
      EXPECT_TRUE(torch::allclose(full_tensor(source), whole));
      const at::Tensor cut = redistribute(source, {Shard{0}});
      EXPECT_TRUE(torch::allclose(full_tensor(cut), whole));
      EXPECT_TRUE(torch::allclose(full_tensor(redistribute(cut, norm)), whole));
      EXPECT_TRUE(torch::allclose(full_tensor(redistribute(source, {Partial{}})), whole));
    }
    const at::Tensor half = distribute(numbers({3, 2}, at::kHalf), mesh, norm);
    EXPECT_TRUE(torch::equal(full_tensor(half), numbers({3, 2}, at::kHalf)));
    const at::Tensor counts = from_local(on_test_device(torch::ones({2}, at::kLong)), mesh, norm);
    EXPECT_THROW(full_tensor(counts), c10::ValueError);
  });
}

TEST(RedistributeOnALine, KeepsDtypesThatAreOnlyMoved) {
  run_world(3, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    for (const auto dtype :
         {at::kBFloat16, at::kHalf, at::kLong, at::kByte, at::kBool, at::kDouble}) {
      const at::Tensor whole = numbers({5, 4}, at::kDouble).ge(0).to(dtype);
      const at::Tensor moved = redistribute(distribute(whole, mesh, {Shard{0}}), {Shard{1}});
      EXPECT_TRUE(torch::equal(full_tensor(moved), whole)) << dtype;
    }
  });
}

// LibTorch only marks conjugated or negated tensors, and leaves their memory as it is.
at::Tensor conjugated(const at::Tensor& dist) {
  return from_local(to_local(dist).conj(), mesh_of(dist), placements_of(dist), dist.sizes().vec());
}
at::Tensor negated(const at::Tensor& dist) {
  return from_local(at::_neg_view(to_local(dist)), mesh_of(dist), placements_of(dist),
                    dist.sizes().vec());
}

void expect_whole(const at::Tensor& tensor, const at::Tensor& whole) {
  EXPECT_TRUE(torch::equal(full_tensor(tensor).resolve_conj().resolve_neg(), whole))
      << describe(tensor);
}

TEST(RedistributeMarked, ConjugatesAndNegativesKeepTheirValues) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World& world) {
      const auto mesh = DeviceMesh::over_world();
      std::vector<int> turned;
      for (int r = world.size() - 1; r >= 0; --r) turned.push_back(r);
      const DeviceMesh other({world.size()}, turned);
      const at::Tensor z = torch::complex(numbers({5, 4}), numbers({5, 4}) + 1);
      const std::vector<Placement> cuts = {Replicate{}, Shard{0}, Shard{1}};
      for (const Placement& from : cuts) {
        const at::Tensor conjugate = conjugated(distribute(z, mesh, {from}));
        for (const Placement& to : cuts) {
          SCOPED_TRACE(to_string(from) + " to " + to_string(to));
          expect_whole(redistribute(conjugate, {to}), z.conj().resolve_conj());
          expect_whole(redistribute(redistribute(conjugate, {to}), {from}),
                       z.conj().resolve_conj());
          expect_whole(redistribute(conjugate, other, {to}), z.conj().resolve_conj());
        }
      }
    });
  }
}

TEST(RedistributeMarked, NegatedTermsAreReducedWithTheirSign) {
  run_world(3, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor whole = numbers({5, 4});
    for (const Placement& from : {Placement(Shard{0}), Placement(Shard{1}), Placement(Partial{}),
                                  Placement(Partial{PartialOp::kMax})}) {
      const at::Tensor negative = negated(distribute(whole, mesh, {from}));
      for (const Placement& to : placements_of_dims(2)) {
        if (is_partial(to)) continue;
        SCOPED_TRACE(to_string(from) + " to " + to_string(to));
        expect_whole(redistribute(negative, {to}), -whole);
      }
    }
  });
}

TEST(RedistributeMarked, OperatorsSeeTheValues) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor z = torch::complex(numbers({4, 6}), numbers({4, 6}) + 1);
    for (const Placement& cut : {Placement(Shard{0}), Placement(Shard{1})}) {
      const at::Tensor dist = distribute(z, mesh, {cut});
      expect_whole(redistribute(dist.conj(), {cut}), z.conj().resolve_conj());
      expect_whole(redistribute(torch::imag(conjugated(dist)), {cut}), -torch::imag(z));
      expect_whole(conjugated(dist).sum(1), z.conj().sum(1));
    }
  });
}

// Ranks gather two tensors with the same number of elements, rank 0 in the other order.
void expect_told_apart(World& world, const at::Tensor& one, const at::Tensor& other) {
  const bool swaps = world.rank() == 0;
  EXPECT_THROW(
      {
        full_tensor(swaps ? other : one);
        full_tensor(swaps ? one : other);
      },
      c10::DistBackendError);
}

TEST(RedistributeOrder, TensorsOfOtherShapesOrPlacementsAreToldApart) {
  TESSERA_ON_HOST_ONLY("a device's backend sees the number of elements alone");
  for (const Transport transport : kTransports) {
    const auto run = [&](const std::function<void(World&, const DeviceMesh&)>& fn) {
      run_over(
          transport, 2, [&](World& world) { fn(world, DeviceMesh::over_world()); },
          std::chrono::milliseconds(500));
    };
    run([](World& world, const DeviceMesh& mesh) {
      expect_told_apart(world, distribute(numbers({4, 8}), mesh, {Shard{0}}),
                        distribute(numbers({8, 4}), mesh, {Shard{0}}));
    });
    run([](World& world, const DeviceMesh& mesh) {
      expect_told_apart(world, distribute(numbers({4, 8}), mesh, {Shard{0}}),
                        distribute(numbers({4, 8}), mesh, {Shard{1}}));
    });
    run([](World& world, const DeviceMesh& mesh) {
      torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
      distribute_module(*model, mesh, [](const auto&, torch::nn::Module& module, const auto& on) {
        for (at::Tensor& parameter : module.parameters(/*recurse=*/false))
          distribute_(parameter, on, {Shard{0}});
      });
      expect_told_apart(world, model->parameters()[0], model->parameters()[2]);
    });
  }
}

}  // namespace tessera::redistribute_test
