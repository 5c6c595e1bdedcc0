// Properties of all operators on DistTensors: views, `out=` forms, errors, ranks outside the mesh.

#include <ATen/ScalarOps.h>
#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>

#include "support/error_of.h"
#include "support/run_world.h"
#include "support/test_device.h"
#include "tensor/plan_key.h"

namespace tessera::dispatch_test {

using testing::on_test_device;

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

void expect_equal(const at::Tensor& dist, const at::Tensor& plain, const std::string& what) {
  ASSERT_TRUE(is_dist(dist)) << what;
  EXPECT_EQ(dist.scalar_type(), plain.scalar_type()) << what;
  ASSERT_EQ(dist.sizes(), plain.sizes()) << what;
  EXPECT_TRUE(torch::equal(full_tensor(dist), plain)) << what << "\n"
                                                      << full_tensor(dist) << "\n"
                                                      << plain;
}

template <class Error>
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "no error";
  return "";
}

const std::vector<Placements> kPlacements = {
    {Shard{0}}, {Shard{1}}, {Replicate{}}, {Partial{}}, {Partial{PartialOp::kMax}}};

// Runs `f` on 2 and on 3 ranks, for each placement of a tensor of two dims.
void for_each_placement(const std::function<void(const DeviceMesh&, const Placements&)>& f) {
  for (const int ranks : {2, 3})
    run_world(ranks, [&](World&) {
      const auto mesh = DeviceMesh::over_world();
      for (const Placements& placements : kPlacements) {
        SCOPED_TRACE(to_string(placements));
        f(mesh, placements);
      }
    });
}

struct Write {
  const char* name;
  std::function<void(at::Tensor&)> run;
};

// Writes through views of which a rank's local part can't be a view.
const std::vector<Write>& writes_to_views() {
  static const auto* const all = new std::vector<Write>{
      {"narrow", [](at::Tensor& x) { x.narrow(0, 0, 3).zero_(); }},
      {"select", [](at::Tensor& x) { x[0].fill_(1.5); }},
      {"select of a column", [](at::Tensor& x) { x.select(1, 2).fill_(1.5); }},
      {"view of a view", [](at::Tensor& x) { x.narrow(0, 1, 3)[1].slice(0, 1, 3).mul_(2); }},
      {"transposed", [](at::Tensor& x) { x.t().narrow(0, 1, 2).add_(1); }},
      {"flat", [](at::Tensor& x) { x.view(-1).narrow(0, 3, 9).mul_(-1); }},
      {"as_strided",
       [](at::Tensor& x) {
         x.as_strided({2, 2}, {4, 2}, 5).fill_(7);
       }},
      {"diagonal", [](at::Tensor& x) { x.diagonal().fill_(3); }},
      {"copy", [](at::Tensor& x) { x[2].copy_(x[0]); }},
      {"split",
       [](at::Tensor& x) {
         const auto parts = x.split(2, 0);
         parts[0].add_(1);
         parts[1].mul_(parts[0]);
       }},
      {"unbind", [](at::Tensor& x) { x.unbind(0)[1].zero_(); }},
      {"index_put",
       [](at::Tensor& x) {
         x.index_put_({on_test_device(torch::tensor({1, 3}))}, numbers({2, 4}));
       }},
      {"masked_fill", [](at::Tensor& x) { x[1].masked_fill_(x[1] > 0, 0.25); }},
  };
  return *all;
}

TEST(DistViews, WritesReachTheBase) {
  for_each_placement([](const DeviceMesh& mesh, const Placements& placements) {
    for (const Write& write : writes_to_views()) {
      at::Tensor plain = numbers({5, 4}), dist = distribute(numbers({5, 4}), mesh, placements);
      write.run(plain), write.run(dist);
      expect_equal(dist, plain, write.name);
      EXPECT_EQ(placements_of(dist), placements) << write.name;
    }
  });
}

// On a square mesh, a view of a copy may need a copy of its own.
TEST(DistViews, WritesReachTheBaseOnASquare) {
  run_world(4, [](World&) {
    const auto mesh = DeviceMesh::over_world({2, 2});
    for (const Write& write : writes_to_views()) {
      for (const Placements& placements :
           {Placements{Shard{0}, Shard{1}}, {Shard{0}, Shard{0}}, {Shard{1}, Partial{}}}) {
        at::Tensor plain = numbers({5, 4}), dist = distribute(numbers({5, 4}), mesh, placements);
        write.run(plain), write.run(dist);
        expect_equal(dist, plain, std::string(write.name) + " " + to_string(placements));
      }
    }
  });
}

// Where one rank has all, a view of what is placed anew shows the base's own memory.
TEST(DistViews, WritesReachTheBaseOnOneRank) {
  run_world(1, [](World&) {
    const at::Tensor plain = numbers({1, 4, 5}).mT();
    const at::Tensor dist = distribute(plain.clone(), DeviceMesh::over_world(), {Shard{0}});
    for (const at::Tensor& x : {plain, dist}) {
      const at::Tensor same = x.narrow(0, 0, 1);
      same.add_(1);
      x.mul_(2);
      same.add_(same);
    }
    expect_equal(dist, plain, "narrow");
  });
}

// All views of one base must show writes to the base and to each of them.
TEST(DistViews, ReadsSeeWritesToTheBase) {
  for_each_placement([](const DeviceMesh& mesh, const Placements& placements) {
    const auto run = [](at::Tensor x) {
      const at::Tensor row = x[0], rows = x.narrow(0, 0, 2), entry = rows[0][1];
      std::vector<at::Tensor> seen{row * 1};
      x.add_(1);
      seen.push_back(row * 1), seen.push_back(entry * 1);
      entry.fill_(-3);
      seen.push_back(row * 1), seen.push_back(rows * 1);
      row.mul_(2);
      seen.push_back(rows * 1), seen.push_back(entry * 1), seen.push_back(x * 1);
      return seen;
    };
    const auto plain = run(numbers({5, 4})),
               dist = run(distribute(numbers({5, 4}), mesh, placements));
    for (size_t i = 0; i < plain.size(); ++i) expect_equal(dist[i], plain[i], std::to_string(i));
  });
}

TEST(DistViews, LocalPartsOfViewsAreUpToDate) {
  run_world(2, [](World&) {
    at::Tensor x = distribute(numbers({4, 4}), DeviceMesh::over_world(), {Shard{0}});
    const at::Tensor row = x[0];
    x.zero_();
    EXPECT_TRUE(torch::equal(to_local(row), torch::zeros_like(to_local(row))));
    EXPECT_TRUE(torch::equal(full_tensor(row), on_test_device(torch::zeros({4}))));
  });
}

TEST(DistViews, GradientsOfWritesToViews) {
  for_each_placement([](const DeviceMesh& mesh, const Placements& placements) {
    const auto run = [](const at::Tensor& x) {
      at::Tensor y = x * 3;
      y[1].mul_(2);
      y.narrow(1, 2, 2).add_(y.narrow(1, 0, 2).detach());
      y.view(-1).narrow(0, 12, 5).zero_();
      (y * y.detach()).sum().backward();
    };
    at::Tensor plain = numbers({5, 4}).requires_grad_(true);
    at::Tensor dist = distribute(numbers({5, 4}).requires_grad_(true), mesh, placements);
    run(plain), run(dist);
    EXPECT_TRUE(torch::allclose(full_tensor(dist.grad()), plain.grad()))
        << full_tensor(dist.grad()) << "\n"
        << plain.grad();
  });
}

TEST(DistViews, ShapesChangeInPlace) {
  for_each_placement([](const DeviceMesh& mesh, const Placements& placements) {
    const auto run = [](at::Tensor x) {
      x.t_();
      x.unsqueeze_(1);
      return x + 1;
    };
    expect_equal(run(distribute(numbers({5, 4}), mesh, placements)), run(numbers({5, 4})), "t_");
    at::Tensor x = distribute(numbers({5, 4}), mesh, placements);
    EXPECT_THROW(x.resize_({3, 3}), c10::NotImplementedError);
  });
}

TEST(DistOut, WritesWhatTheOperatorGives) {
  for_each_placement([](const DeviceMesh& mesh, const Placements& placements) {
    const at::Tensor a = numbers({5, 4}), b = numbers({5, 4}, 2), m = numbers({4, 3}, 3);
    const at::Tensor x = distribute(a, mesh, placements), y = distribute(b, mesh, placements);
    const at::Tensor n = distribute(m, mesh, {Shard{0}});
    for (const Placements& into : kPlacements) {
      SCOPED_TRACE(to_string(into));
      at::Tensor out = distribute(on_test_device(torch::zeros({5, 4})), mesh, into);
      torch::add_out(out, x, y);
      EXPECT_EQ(placements_of(out), into);
      EXPECT_TRUE(torch::allclose(full_tensor(out), a + b));
      out = distribute(on_test_device(torch::zeros({5, 3})), mesh, into);
      torch::mm_out(out, x, n);
      EXPECT_TRUE(torch::allclose(full_tensor(out), torch::mm(a, m), 1e-5, 1e-6));
      out = distribute(on_test_device(torch::zeros({5, 8}, at::kDouble)), mesh, into);
      torch::cat_out(out, {x, y}, 1);
      EXPECT_TRUE(torch::allclose(full_tensor(out), torch::cat({a, b}, 1).to(at::kDouble)));
    }
    at::Tensor out =
        distribute(on_test_device(torch::zeros({4}, at::kDouble)), mesh, {Replicate{}});
    torch::sum_out(out, x, 0);
    EXPECT_TRUE(torch::allclose(full_tensor(out), a.sum(0, false, at::kDouble), 1e-12, 1e-12));
    // The `out` tensor may be one of the inputs.
    at::Tensor z = distribute(a.clone(), mesh, placements);
    torch::sub_out(z, z, y);
    EXPECT_TRUE(torch::allclose(full_tensor(z), a - b));
  });
}

TEST(DistOut, EmptyOnesTakeTheResultsSizes) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor a = numbers({5, 4}), x = distribute(a, mesh, {Shard{0}});
    at::Tensor out = distribute(on_test_device(torch::empty({0})), mesh, {});
    torch::mul_out(out, x, x);
    expect_equal(out, a * a, "mul");
    EXPECT_EQ(placements_of(out), Placements{Shard{0}});
    at::Tensor values = distribute(on_test_device(torch::empty({0})), mesh, {});
    at::Tensor places = distribute(on_test_device(torch::empty({0}, at::kLong)), mesh, {});
    torch::sort_out(values, places, x, 1);
    expect_equal(values, std::get<0>(a.sort(1)), "values");
    expect_equal(places, std::get<1>(a.sort(1)), "indices");
    at::Tensor ordinary = on_test_device(torch::empty({0}));
    torch::mul_out(ordinary, x, x);
    EXPECT_TRUE(torch::equal(ordinary, a * a));
    at::Tensor eye = distribute(on_test_device(torch::ones({3, 3})), mesh, {Shard{0}});
    torch::eye_out(eye, 3);
    expect_equal(eye, on_test_device(torch::eye(3)), "eye");
  });
}

TEST(DistOut, OthersAreRefusedOnAllRanks) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = distribute(numbers({5, 4}), mesh, {Shard{0}});
    at::Tensor out = distribute(on_test_device(torch::zeros({4, 4})), mesh, {Shard{0}});
    const auto text = error_of<c10::ValueError>([&] { torch::add_out(out, x, x); });
    testing::expect_contains(text, {"expected [5, 4], got [4, 4]"});
    at::Tensor whole_numbers =
        distribute(on_test_device(torch::zeros({5, 4}, at::kLong)), mesh, {});
    error_of<c10::Error>([&] { torch::add_out(whole_numbers, x, x); });
    EXPECT_EQ(full_tensor(out).count_nonzero().item<int64_t>(), 0);
  });
}

// Local parts may fit together where the tensors don't.
TEST(DistErrors, WrongShapesAreErrorsOnAllRanks) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = distribute(numbers({5, 4}), mesh, {Shard{0}});
    const at::Tensor y = distribute(numbers({3, 4}), mesh, {});
    error_of<c10::Error>([&] { x + y; });
    error_of<c10::Error>([&] { y.clone().add_(x); });
    error_of<c10::Error>([&] { torch::mm(x, y); });
    error_of<c10::Error>([&] { torch::where(x > 0, x, y); });
    if (testing::tests_on_host())  // a kernel of the simulated device fails later
      error_of<c10::Error>([&] { distribute(numbers({4}), mesh, {}).masked_fill_(x > 0, 1); });
    error_of<c10::Error>([&] { x.view({3, 7}); });
    expect_equal(x, numbers({5, 4}), "after the errors");
    expect_equal(x + x, numbers({5, 4}) * 2, "add");
  });
}

PlanKey key_of(const char* name, const char* overload, const std::vector<c10::IValue>& arguments) {
  PlanKey key;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  EXPECT_TRUE(write_plan_key(key, op, arguments)) << name;
  return key;
}

// Rules may depend on numbers, so calls that differ in one have separate plans; calls of
// elementwise operators do not, as an optimizer changes their factors with each step.
TEST(DistPlans, DependOnRealNumbers) {
  const at::Tensor x = numbers({2, 2, 8, 4});
  const auto attention = [&](double dropout) {
    return key_of("aten::_scaled_dot_product_flash_attention_for_cpu", "",
                  {x, x, x, dropout, false, c10::IValue(), c10::IValue()});
  };
  EXPECT_NE(attention(0), attention(0.5));
  EXPECT_NE(attention(0.5), attention(-0.5));
  EXPECT_EQ(attention(0.5), attention(0.5));
  const auto norm = [&](const c10::Scalar& order) {
    return key_of("aten::linalg_vector_norm", "", {x, order, c10::IValue(), false, c10::IValue()});
  };
  EXPECT_NE(norm(1.0), norm(2.0));
  EXPECT_NE(norm(2.0), norm(c10::complex<double>(2, 1)));
  EXPECT_EQ(key_of("aten::addcdiv_", "", {x, x, x, 0.1}),
            key_of("aten::addcdiv_", "", {x, x, x, 0.2}));
}

TEST(DistPlans, DependOnText) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor a = numbers({5, 4}) * 5, x = distribute(a, mesh, {Shard{0}});
    expect_equal(torch::div(x, 2, "floor"), torch::div(a, 2, "floor"), "floor");
    expect_equal(torch::div(x, 2, "trunc"), torch::div(a, 2, "trunc"), "trunc");
  });
}

// Ranks outside the mesh run the same program.
TEST(DistOutsideTheMesh, ResultsHaveShapesAndTypes) {
  run_world(3, [](World& world) {
    const DeviceMesh mesh({2}, {0, 1});
    const at::Tensor a = numbers({6, 4});
    const at::Tensor x = distribute(a, mesh, {Shard{0}});
    const at::Tensor ids =
        distribute(on_test_device(torch::arange(6).remainder(3)), mesh, {Shard{0}});
    const auto check = [&](const at::Tensor& dist, const at::Tensor& plain) {
      EXPECT_EQ(dist.scalar_type(), plain.scalar_type());
      ASSERT_EQ(dist.sizes(), plain.sizes());
      EXPECT_EQ(to_local(dist).scalar_type(), plain.scalar_type());
      EXPECT_TRUE(mesh.is_member() || to_local(dist).numel() == 0);
      EXPECT_TRUE(!mesh.is_member() || torch::allclose(full_tensor(dist), plain));
    };
    check(x > 0, a > 0);
    check(x.argmax(1), a.argmax(1));
    const at::Tensor rows = on_test_device(torch::arange(6)), bags = rows.slice(0, 0, 6, 2).clone();
    check(std::get<0>(torch::embedding_bag(distribute(a, mesh, {}), rows, bags)),
          std::get<0>(torch::embedding_bag(a, rows, bags)));
    check(x.to(at::kDouble), a.to(at::kDouble));
    const at::Tensor s = x.sum(), b = a.sum();
    const at::Tensor tensor = on_test_device(torch::scalar_tensor(0.5, at::kDouble));
    const at::Tensor number = at::native::wrapped_scalar_tensor(0.5);  // does not decide the dtype
    check(torch::mul(s, number), torch::mul(b, number));
    check(torch::mul(s, tensor), torch::mul(b, tensor));
    const auto parts = x.split(3, 1), expected = a.split(3, 1);
    ASSERT_EQ(parts.size(), expected.size());
    for (size_t i = 0; i < parts.size(); ++i) check(parts[i], expected[i]);
    check(std::get<1>(x.topk(2, 1)), std::get<1>(a.topk(2, 1)));
    check(torch::layer_norm(x, {4}), torch::layer_norm(a, {4}));
    check(torch::embedding(x, ids),
          torch::embedding(a, on_test_device(torch::arange(6).remainder(3))));
    check(torch::tril(x), torch::tril(a));  // without a rule
    at::Tensor y = distribute(a, mesh, {Shard{0}}), z = a.clone();
    y.add_(1)[0].fill_(3), z.add_(1)[0].fill_(3);
    check(y, z);
    at::Tensor out = distribute(on_test_device(torch::zeros({6, 4})), mesh, {});
    check(torch::add_out(out, x, x), a + a);
    if (world.rank() == 2) error_of<c10::NotImplementedError>([&] { x.sum().item(); });
    if (world.rank() != 2) x.sum().item();
  });
}

// Whose part goes where is decided by placements: ranks of both meshes must know the same ones.
template <class Loss>
void expect_backward_across(const std::string& name, Loss loss) {
  for (const Placement& there : std::vector<Placement>{Replicate{}, Shard{0}, Shard{1}}) {
    run_world(3, [&](World&) {
      const DeviceMesh a({2}, {0, 1}), b({2}, {1, 2});
      const at::Tensor plain = numbers({6, 4}).requires_grad_();
      const at::Tensor dist = distribute(plain.detach(), a, {Shard{0}}).requires_grad_();
      const auto on_b = [&](const at::Tensor& x) { return distribute(x, b, {}); };
      loss(plain.sigmoid(), [](const at::Tensor& x) { return x; }).backward();
      loss(redistribute(dist.sigmoid(), b, {there}), on_b).backward();
      if (!a.is_member()) return;
      EXPECT_TRUE(torch::allclose(full_tensor(dist.grad()), plain.grad(), 1e-4, 1e-6))
          << name << " " << to_string({there});
    });
  }
}

TEST(DistOutsideTheMesh, BackwardsCrossMeshesFromDecomposedOperators) {
  const auto target = [] { return on_test_device(torch::linspace(0, 1, 24).view({6, 4})); };
  expect_backward_across("mse_loss", [&](const at::Tensor& x, auto place) {
    return torch::mse_loss(x, place(target()));
  });
  expect_backward_across("binary_cross_entropy", [&](const at::Tensor& x, auto place) {
    return torch::binary_cross_entropy(x, place(target()));
  });
  expect_backward_across("cross_entropy_loss", [&](const at::Tensor& x, auto place) {
    return torch::cross_entropy_loss(x, place(on_test_device(torch::arange(6).remainder(4))));
  });
  expect_backward_across("var and norm", [&](const at::Tensor& x, auto) {
    return x.var(0).sum() + x.norm(3) + x.mean(1).square().sum();
  });
  expect_backward_across("selected elements", [&](const at::Tensor& x, auto) {
    return std::get<0>(x.max(1)).square().sum() + std::get<0>(x.cummax(0)).pow(3).sum() +
           x.trace().square();
  });
  expect_backward_across("batch_norm", [&](const at::Tensor& x, auto) {
    return torch::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false).pow(3).sum();
  });
  expect_backward_across("a linear layer cut by columns", [&](const at::Tensor& x, auto place) {
    at::Tensor weight = place(target());
    if (is_dist(weight)) weight = redistribute(weight, {Shard{0}});
    return torch::mse_loss(torch::linear(x * 2, weight),
                           place(on_test_device(torch::zeros({6, 6}))));
  });
}

// Also on ranks that have no elements of the result, or are not in the mesh.
TEST(DistOutsideTheMesh, ChoicesOfNothingAreErrorsOnAllRanks) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 2});
    for (const Placement& placement : {Placement{Shard{0}}, Placement{Shard{1}}}) {
      const at::Tensor nothing = distribute(numbers({0, 1}), mesh, {placement});
      const at::Tensor index =
          distribute(on_test_device(torch::zeros({1}, torch::kLong)), mesh, {Shard{0}});
      EXPECT_THROW(nothing.index_select(0, index), c10::IndexError);
      EXPECT_THROW(nothing.gather(0, index.view({1, 1})), c10::IndexError);
      EXPECT_EQ(nothing.index_select(0, index.slice(0, 1)).sizes(), c10::IntArrayRef({0, 1}));
      EXPECT_EQ(nothing.t().index_select(0, index).sizes(), c10::IntArrayRef({1, 0}));
    }
  });
}

// What values tell is not made up.
TEST(DistOutsideTheMesh, ResultsThatDependOnValuesAreErrors) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 2});
    const at::Tensor x = distribute(numbers({6, 4}), mesh, {Shard{0}});
    const at::Tensor two = distribute(on_test_device(torch::tensor(2)), mesh, {});
    const auto expect = [&](const std::function<void()>& call, const std::string& text) {
      const std::string error = testing::error_of<c10::NotImplementedError>(call);
      testing::expect_contains(error, {mesh.is_member() ? "no error" : text});
    };
    const std::string sizes = "the sizes of its result depend on";
    expect([&] { x.masked_select(x > 2); }, "[aten::masked_select] only ranks of the mesh");
    expect([&] { x.index({x > 2}); }, sizes);
    expect([&] { x.nonzero(); }, sizes);
    expect([&] { x.tensor_split(two.cpu()); }, "[tensor_split] only ranks of the mesh");
    expect([&] { x.sum().item(); }, "it returns a value that is not a tensor");
  });
}

// A rank has no memory between the elements, and would show what happens to lie in its own.
TEST(DistViews, DoNotShowMemoryBetweenElements) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 2});
    for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0})}) {
      const at::Tensor plain = numbers({4, 6}).slice(1, 0, 6, 2);
      const at::Tensor dist = distribute(numbers({4, 6}), mesh, {placement}).slice(1, 0, 6, 2);
      for (const auto& call : std::vector<std::function<at::Tensor(const at::Tensor&)>>{
               [](const at::Tensor& x) {
                 return x.as_strided({2, 2}, {6, 4}, 2);
               },
               [](const at::Tensor& x) {
                 return torch::as_strided_copy(x, {3, 2}, {6, 2});
               },
               [](const at::Tensor& x) {
                 return torch::as_strided_scatter(x, x.slice(0, 0, 2), {2, 3}, {12, 2});
               }})
        if (mesh.is_member()) expect_equal(call(dist), call(plain), to_string({placement}));
      const auto error = [&](int64_t stride, int64_t offset) {
        return testing::error_of<c10::NotImplementedError>([&] {
          torch::as_strided_copy(dist, {2, 2}, {6, stride}, offset);
        });
      };
      testing::expect_contains(error(1, 0), {"can show its own elements alone", "strides [6, 2]"});
      testing::expect_contains(error(2, 1), {"1 elements behind the start"});
    }
  });
}

TEST(DistTensors, AreDense) {
  TESSERA_ON_HOST_ONLY("the simulated device has no sparse tensors");
  run_world(3, [](World&) {
    const at::Tensor x = distribute(numbers({4, 6}), DeviceMesh({2}, {0, 2}), {Shard{0}});
    testing::expect_contains(testing::error_of<c10::NotImplementedError>([&] { x.to_sparse(); }),
                             {"must be dense", "got Sparse", "full_tensor()"});
  });
}

TEST(DistOutsideTheMesh, ModulesTrain) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 2});
    auto linear = on_test_device(torch::nn::Linear(4, 4));
    torch::NoGradGuard no_grad;
    linear->weight.copy_(numbers({4, 4})), linear->bias.zero_();
    const at::Tensor before = linear->weight.detach().clone();
    distribute_(linear->weight, mesh, {Shard{0}});
    distribute_(linear->bias, mesh, {Shard{0}});
    torch::optim::AdamW optimizer(linear->parameters(), 0.1);
    {
      at::AutoGradMode with_grad(true);
      linear->forward(distribute(numbers({6, 4}), mesh, {})).relu().square().mean().backward();
    }
    EXPECT_EQ(linear->weight.grad().sizes(), (std::vector<int64_t>{4, 4}));
    optimizer.step();
    EXPECT_FALSE(mesh.is_member() && torch::equal(full_tensor(linear->weight), before));
  });
}

}  // namespace tessera::dispatch_test
