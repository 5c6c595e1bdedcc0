// Pending reductions are done once, and do not show in the values.

#include <ATen/ScalarOps.h>
#include <gtest/gtest.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/comm/process_group.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::pending_test {

using testing::on_test_device;

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

// A product whose sum over ranks is pending, and the same in one process.
struct Product {
  explicit Product(const DeviceMesh& mesh, bool requires_grad = false)
      : plain_a(numbers({4, 12}, 1).requires_grad_(requires_grad)),
        plain_b(numbers({12, 6}, 2).requires_grad_(requires_grad)),
        a(distribute(plain_a.detach().clone().requires_grad_(requires_grad), mesh, {Shard{1}})),
        b(distribute(plain_b.detach().clone().requires_grad_(requires_grad), mesh, {Shard{0}})),
        plain(torch::mm(plain_a, plain_b)),
        dist(torch::mm(a, b)) {
    EXPECT_EQ(placements_of(dist), Placements{Partial{}});
  }
  at::Tensor plain_a, plain_b, a, b, plain, dist;
};

void expect_close(const at::Tensor& dist, const at::Tensor& plain, const std::string& what = "") {
  EXPECT_TRUE(torch::allclose(full_tensor(dist), plain, 1e-4, 1e-5)) << what << describe(dist);
}

TEST(PendingReductions, TheFirstOperatorThatNeedsTheValuesReducesForAll) {
  for (const int ranks : {2, 3}) {
    run_world(ranks, [](World&) {
      const Product product(DeviceMesh::over_world());
      const CommDebug debug;
      const at::Tensor terms = product.dist + product.dist, half = product.dist * 0.5;
      EXPECT_EQ(debug.calls(), 0);
      EXPECT_EQ(placements_of(terms), Placements{Partial{}});
      expect_close(torch::relu(product.dist), torch::relu(product.plain));
      expect_close(torch::sigmoid(product.dist), torch::sigmoid(product.plain));
      expect_close(product.dist.softmax(-1), product.plain.softmax(-1));
      EXPECT_EQ(debug.calls(), 1);
      EXPECT_EQ(debug.calls("all_reduce", "aten::relu"), 1);
      EXPECT_EQ(placements_of(product.dist), Placements{Replicate{}});
      EXPECT_TRUE(torch::allclose(to_local(product.dist), product.plain, 1e-4, 1e-5));
      expect_close(half, product.plain * 0.5);
      expect_close(terms, product.plain * 2);
    });
  }
}

TEST(PendingReductions, ANumberAddedToOneHasItsDtypeOnAllRanks) {
  run_world(2, [](World&) {
    const at::Tensor whole = on_test_device(torch::full({}, 2, torch::kBFloat16));
    const at::Tensor terms = from_local(whole, DeviceMesh::over_world(), {Partial{}}, {});
    const at::Tensor sum = terms.add(at::native::wrapped_scalar_tensor(0.5));
    EXPECT_EQ(to_local(sum).scalar_type(), torch::kBFloat16);
    EXPECT_EQ(full_tensor(sum).item<double>(), 4.5);
  });
}

// Complex numbers have no least one.
TEST(PendingReductions, OfRealNumbersBesideComplexOnesAreDoneFirst) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = on_test_device(torch::arange(3.0));
    const at::Tensor least = distribute(x, mesh, {Partial{PartialOp::kMin}});
    const at::Tensor complex = on_test_device(torch::complex(torch::ones({2}), torch::ones({2})));
    const at::Tensor both = torch::cat({least, distribute(complex, mesh, {Shard{0}})});
    EXPECT_TRUE(full_tensor(both.exp()).allclose(torch::cat({x, complex}).exp()));
  });
}

TEST(PendingReductions, WhatAutogradSavedIsReducedToo) {
  run_world(2, [](World&) {
    const Product product(DeviceMesh::over_world(), true);
    const auto loss_of = [](const at::Tensor& y) { return (y.pow(2) * y.sigmoid()).sum(); };
    loss_of(product.plain).backward();
    const CommDebug debug;
    const at::Tensor loss = loss_of(product.dist);
    EXPECT_EQ(debug.calls(), 1);
    loss.backward();
    EXPECT_EQ(debug.calls(), 1) << debug.describe();
    expect_close(product.a.grad(), product.plain_a.grad());
    expect_close(product.b.grad(), product.plain_b.grad());
  });
}

TEST(PendingReductions, OfOneMeshDimLeaveTheOthers) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2});
    const at::Tensor a = numbers({4, 12}, 1), b = numbers({12, 6}, 2);
    const at::Tensor y = torch::mm(distribute(a, mesh, {Shard{0}, Shard{1}}),
                                   distribute(b, mesh, {Replicate{}, Shard{0}}));
    EXPECT_EQ(placements_of(y), (Placements{Shard{0}, Partial{}}));
    expect_close(torch::relu(y), torch::relu(torch::mm(a, b)));
    EXPECT_EQ(placements_of(y), (Placements{Shard{0}, Replicate{}}));
    expect_close(y, torch::mm(a, b));
  });
}

TEST(PendingReductions, ViewsAndWritesKeepShowingOneTensor) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    // The tensor that is read first, and the one that is written to.
    for (const bool reads_base : {false, true}) {
      for (const bool writes_base : {false, true}) {
        SCOPED_TRACE(::testing::Message() << reads_base << writes_base);
        const Product product(mesh);
        const at::Tensor view = product.dist.view({2, 2, 6}),
                         plain_view = product.plain.view({2, 2, 6});
        const CommDebug debug;
        for (int again = 0; again < 2; ++again) torch::relu(reads_base ? product.dist : view);
        EXPECT_EQ(debug.calls(), 1);
        (writes_base ? product.dist : view).mul_(2);
        (writes_base ? product.plain : plain_view).mul_(2);
        expect_close(torch::relu(product.dist), torch::relu(product.plain), "base");
        expect_close(torch::relu(view), torch::relu(plain_view), "view");
        (writes_base ? view : product.dist).add_(numbers({6}, 3));
        (writes_base ? plain_view : product.plain).add_(numbers({6}, 3));
        expect_close(torch::sigmoid(product.dist), torch::sigmoid(product.plain), "base again");
        expect_close(torch::sigmoid(view), torch::sigmoid(plain_view), "view again");
      }
    }
  });
}

TEST(PendingReductions, WritesAfterAReductionAreSeen) {
  run_world(3, [](World&) {
    Product product(DeviceMesh::over_world());
    torch::relu(product.dist);
    product.dist.add_(1);
    product.plain.add_(1);
    expect_close(torch::relu(product.dist), torch::relu(product.plain));
    const at::Tensor more = numbers({4, 6}, 3);
    product.dist.mul_(more);
    product.plain.mul_(more);
    expect_close(product.dist, product.plain);
  });
}

TEST(PendingReductions, AnOperatorMayHaveATensorTwice) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    {
      const Product product(mesh);
      expect_close(product.dist * product.dist, product.plain * product.plain);
      expect_close(product.dist, product.plain);
    }
    {
      Product product(mesh);
      product.dist.mul_(product.dist);
      product.plain.mul_(product.plain);
      expect_close(product.dist, product.plain);
    }
    {
      Product product(mesh);
      product.dist.addcmul_(product.dist, product.dist.sigmoid());
      product.plain.addcmul_(product.plain, product.plain.sigmoid());
      expect_close(product.dist, product.plain);
    }
  });
}

TEST(PendingReductions, WhatAUserMadePartialStaysSo) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor memory = on_test_device(torch::ones({4}));
    const at::Tensor given = from_local(memory, mesh, {Partial{}});
    const at::Tensor made = distribute(numbers({4}), mesh, {Partial{}}), view = given.view({2, 2});
    for (int step = 1; step < 4; ++step) {
      expect_close(torch::relu(given), on_test_device(torch::full({4}, 2. * step)));
      expect_close(torch::relu(view), on_test_device(torch::full({2, 2}, 2. * step)));
      torch::relu(made);
      memory.add_(1);
    }
    EXPECT_EQ(placements_of(given), Placements{Partial{}});
    EXPECT_EQ(placements_of(made), Placements{Partial{}});
  });
}

TEST(PendingReductions, ReferencesToPlacementsStayValid) {
  run_world(2, [](World&) {
    const Product product(DeviceMesh::over_world());
    const Placements& before = placements_of(product.dist);
    torch::relu(product.dist);
    EXPECT_EQ(before, Placements{Partial{}});
  });
}

// Pending reductions follow the program: all ranks must agree on a tensor that moves to another
// mesh.
TEST(PendingReductions, RanksThatAreNotInTheMeshKnowOfThem) {
  run_world(3, [](World& world) {
    const DeviceMesh mesh({2}, {0, 1}), other({1}, {2});
    const Product product(mesh);
    const at::Tensor view = product.dist.view({24}), mean = product.dist.var(0);
    torch::relu(product.dist);
    torch::relu(view);
    const at::Tensor next = torch::mm(product.dist, distribute(numbers({6, 8}), mesh, {Shard{1}}));
    for (const at::Tensor& tensor : {product.dist, view, mean, next}) {
      const auto all =
          all_gather_bytes(*world.process_group(), to_string(placements_of(tensor)), {"places"});
      EXPECT_EQ(all[0], all[2]) << describe(tensor);
    }
    const at::Tensor moved = redistribute(next, other, {Replicate{}});
    if (world.rank() == 2) {
      EXPECT_TRUE(torch::allclose(full_tensor(moved), torch::mm(product.plain, numbers({6, 8})),
                                  1e-4, 1e-5));
    }
  });
}

TEST(PendingReductions, WorkInInferenceMode) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const c10::InferenceMode inference;
    const Product product(mesh);
    const at::Tensor view = product.dist.view({24});
    for (int again = 0; again < 2; ++again) {
      expect_close(torch::relu(view), torch::relu(product.plain.view({24})));
      expect_close(torch::relu(product.dist), torch::relu(product.plain));
    }
    expect_close(product.b.t(), product.plain_b.t());
  });
}

TEST(PendingReductions, ViewsOfOrdinaryTensorsInInferenceMode) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor weight = distribute(numbers({4, 6}).requires_grad_(true), mesh, {Shard{0}});
    const c10::InferenceMode inference;
    expect_close(weight.t(), numbers({4, 6}).t());
    expect_close(torch::linear(distribute(numbers({3, 6}, 2), mesh, {}), weight),
                 torch::linear(numbers({3, 6}, 2), numbers({4, 6})));
  });
}

}  // namespace tessera::pending_test
