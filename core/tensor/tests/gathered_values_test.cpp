// What ranks gather for an operator are the values that its arguments have then, and views and
// changes of placements show or keep values as in one process.

#include <gtest/gtest.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::testing::gathered_values_test {

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed, at::ScalarType dtype = at::kFloat) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return on_test_device(torch::randn(sizes, generator, at::dtype(dtype)));
}

void expect_close(const at::Tensor& dist, const at::Tensor& plain, const std::string& what) {
  EXPECT_TRUE(torch::allclose(full_tensor(dist), plain, 1e-4, 1e-5)) << what;
}

// Rows. A product with the columns of `weight` needs them whole. `seen_as` makes a view of them.
template <class SeenAs>
void expect_products(at::ScalarType dtype, const std::string& what, SeenAs seen_as) {
  const auto mesh = DeviceMesh::over_world();
  const at::Tensor plain = numbers({4, 4}, 1, dtype);
  const at::Tensor dist = distribute(plain, mesh, {Shard{0}}) * 1;
  for (const auto& view :
       {std::pair{dist, plain}, std::pair{seen_as(dist), seen_as(plain)}, std::pair{dist, plain}}) {
    const at::Tensor weight = numbers({view.second.size(-1), 6}, 2).to(view.second.scalar_type());
    expect_close(torch::mm(view.first, distribute(weight, mesh, {Shard{1}})),
                 torch::mm(view.second, weight), what);
  }
}

TEST(GatheredValues, AreThoseOfConjugatesPartsAndOtherDtypes) {
  run_world(2, [](World&) {
    const auto complex = at::kComplexFloat;
    expect_products(complex, "conj", [](const at::Tensor& x) { return x.conj(); });
    expect_products(complex, "mH", [](const at::Tensor& x) { return x.mH(); });
    expect_products(complex, "imag", [](const at::Tensor& x) { return at::imag(x); });
    expect_products(complex, "real", [](const at::Tensor& x) { return at::real(x); });
    expect_products(complex, "imag of conj",
                    [](const at::Tensor& x) { return at::imag(x.conj()); });
    expect_products(at::kFloat, "int", [](const at::Tensor& x) { return x.view(at::kInt); });
    expect_products(at::kFloat, "t", [](const at::Tensor& x) { return x.t(); });
  });
}

TEST(GatheredValues, AMatrixTimesItsAdjointIsThatOfOneProcess) {
  for (const int ranks : {2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      const at::Tensor plain = numbers({6, 4}, 1, at::kComplexFloat).requires_grad_();
      const at::Tensor dist = distribute(plain.detach(), mesh, {Shard{0}}).requires_grad_();
      const auto loss = [](const at::Tensor& u) {
        const at::Tensor x = u * 1;
        return at::real(torch::mm(x, x.mH()) * (x * x.conj()).sum()).square().sum();
      };
      const at::Tensor expected = loss(plain), found = loss(dist);
      expected.backward();
      found.backward();
      EXPECT_TRUE(torch::allclose(full_tensor(found), expected, 1e-4, 1e-4));
      EXPECT_TRUE(torch::allclose(full_tensor(dist.grad()), plain.grad(), 1e-3, 1e-3));
    });
  }
}

TEST(GatheredValues, FollowWritesThatAutogradDoesNotCount) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor plain = numbers({4, 6}, 1), plain_weight = numbers({6, 8}, 2);
    const at::Tensor dist = distribute(plain, mesh, {Shard{0}}) * 1;
    const at::Tensor weight = distribute(plain_weight, mesh, {Shard{1}});
    const auto expect_product = [&](const std::string& what) {
      expect_close(torch::mm(dist, weight), torch::mm(plain, plain_weight), what);
    };
    expect_product("at first");
    const auto write = [&](const std::string& what, auto change) {
      change(dist), change(plain);
      expect_product(what);
    };
    write("data", [](const at::Tensor& x) { x.variable_data().mul_(2); });
    write("row", [](const at::Tensor& x) { x.select(0, 3).zero_(); });
    write("row of data", [](const at::Tensor& x) { x.variable_data().select(0, 1).add_(1); });
    write("inference", [](const at::Tensor& x) {
      const c10::InferenceMode inference;
      x.variable_data().mul_(0.5);
    });
  });
}

TEST(GatheredValues, ViewsThatAreCopiesFollowWritesThatAutogradDoesNotCount) {
  run_world(2, [](World&) {
    const at::Tensor plain = numbers({4, 6}, 1).clone();
    const at::Tensor dist = distribute(plain.clone(), DeviceMesh::over_world(), {Shard{0}}) * 1;
    const at::Tensor row = dist.select(0, 3), plain_row = plain.select(0, 3);
    const auto write = [&](const std::string& what, auto change) {
      change(dist, row), change(plain, plain_row);
      expect_close(row, plain_row, what);
      expect_close(dist, plain, what);
    };
    using Tensor = at::Tensor;
    write("data", [](const Tensor& x, const Tensor&) { x.variable_data().mul_(2); });
    write("column", [](const Tensor& x, const Tensor&) { x.variable_data().select(1, 2).add_(1); });
    write("view", [](const Tensor&, const Tensor& row) { row.variable_data().mul_(3); });
    const CommDebug debug;
    EXPECT_EQ((row + 1).size(0), 6);  // nothing has changed since
    EXPECT_EQ(debug.calls(), 0);
  });
}

// A rank may look at its part alone, and change it: all ranks then still gather alike.
TEST(GatheredValues, AreGatheredAlikeAfterOneRankHasUsedItsPart) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor plain = numbers({4, 6}, 1), plain_weight = numbers({6, 8}, 2);
    const at::Tensor dist = distribute(plain, mesh, {Shard{0}}) * 1;
    const at::Tensor weight = distribute(plain_weight, mesh, {Shard{1}});
    for (int time = 0; time < 3; ++time) {
      expect_close(torch::mm(dist, weight), torch::mm(plain, plain_weight), "product");
      if (world.rank() == 0) to_local(dist).add_(1);
      plain.narrow(0, 0, 2).add_(1);
    }
  });
}

TEST(GatheredValues, AChangeOfPlacementsDoesNotShareMemory) {
  run_world(2, [](World&) {
    const at::Tensor plain = numbers({4, 6}, 1);
    for (const Placement& to : std::vector<Placement>{Shard{0}, Shard{1}, Partial{}}) {
      const at::Tensor whole = distribute(plain.clone(), DeviceMesh::over_world(), {});
      const at::Tensor placed = redistribute(whole, {to});
      whole.zero_();
      expect_close(placed, plain, to_string({to}));
    }
  });
}

// LibTorch marks conjugates and negatives as such; a copy of one has memory of its own.
TEST(Conjugates, AreViewsAndTheirCopiesAreNot) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 1});
    for (const Placement& cut :
         {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{1})}) {
      const at::Tensor plain = numbers({4, 6}, 1, at::kComplexFloat).clone();
      const at::Tensor dist = distribute(plain.clone(), mesh, {cut});
      const auto write = [&](const std::string& what, auto view) {
        const at::Tensor shown = view(dist), expected = view(plain);
        EXPECT_EQ(shown.is_conj(), expected.is_conj()) << what;
        EXPECT_EQ(shown.is_neg(), expected.is_neg()) << what;
        expected.mul_(2), shown.mul_(2);
        if (mesh.is_member()) expect_close(dist, plain, what + ", of " + to_string({cut}));
      };
      using Tensor = at::Tensor;
      write("conj", [](const Tensor& x) { return x.conj(); });
      write("row of conj", [](const Tensor& x) { return x.conj().select(0, 3); });
      write("reshaped conj", [](const Tensor& x) { return x.conj().view({-1}); });
      write("mH", [](const Tensor& x) { return x.mH(); });
      write("copy of conj", [](const Tensor& x) { return x.conj().resolve_conj(); });
      write("imag of conj", [](const Tensor& x) { return at::imag(x.conj()); });
      write("real of conj", [](const Tensor& x) { return at::real(x.conj()); });
      write("copy of imag", [](const Tensor& x) { return at::imag(x.conj()).resolve_neg(); });
      EXPECT_THROW(torch::view_as_real(dist.conj()), c10::Error);
      EXPECT_FALSE(redistribute(dist.conj(), {Partial{}}).is_conj());
    }
  });
}

}  // namespace tessera::testing::gathered_values_test
