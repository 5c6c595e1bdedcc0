// Operators on lists of DistTensors against the same on ordinary tensors: foreach operators, fused
// steps of optimizers, the check of scaled gradients.

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>
#include <limits>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::list_test {

using Tensors = std::vector<at::Tensor>;
using testing::on_test_device;

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(torch::rand(sizes, at::make_generator<at::CPUGeneratorImpl>(seed))) + 0.25;
}

// Uneven, fewer rows than ranks, empty, and a number.
const std::vector<std::vector<int64_t>> kSizes = {{5, 4}, {1, 6}, {7}, {0, 3}, {}, {4, 4}};

Tensors make_list(uint64_t seed) {
  Tensors list;
  for (const auto& sizes : kSizes) list.push_back(numbers(sizes, seed++));
  return list;
}

constexpr int kWays = 5;

// The placements of the tensor at place `i`, different for each.
Placements placements_at(size_t i, int64_t ndim, int64_t mesh_ndim, int way) {
  Placements placements;
  for (int64_t d = 0; d < mesh_ndim; ++d) {
    const auto choice = (i + way + d) % (ndim + 1);
    placements.push_back(choice < static_cast<size_t>(ndim)
                             ? Placement(Shard{static_cast<int64_t>(choice)})
                             : Placement(Replicate{}));
  }
  return placements;
}

// Way 3: all tensors are pending; way 4: some tensors stay ordinary.
Tensors distribute_list(const Tensors& list, const DeviceMesh& mesh, int way) {
  Tensors result;
  for (size_t i = 0; i < list.size(); ++i) {
    auto placements = placements_at(i, list[i].dim(), mesh.ndim(), way);
    if (way == 3) placements.assign(mesh.ndim(), Partial{});
    const bool stays = way == 4 && i % 2 == 1;
    result.push_back(stays ? list[i].clone() : distribute(list[i].clone(), mesh, placements));
  }
  return result;
}

at::Tensor whole(const at::Tensor& tensor) {
  return is_dist(tensor) ? full_tensor(tensor) : tensor;
}

void expect_lists(const Tensors& dist, const Tensors& plain, bool exact) {
  ASSERT_EQ(dist.size(), plain.size());
  for (size_t i = 0; i < dist.size(); ++i) {
    const at::Tensor got = whole(dist[i]);
    EXPECT_EQ(got.scalar_type(), plain[i].scalar_type()) << i;
    ASSERT_EQ(got.sizes(), plain[i].sizes()) << i;
    EXPECT_TRUE(exact ? torch::equal(got, plain[i]) : torch::allclose(got, plain[i], 1e-5, 1e-6))
        << i << "\n"
        << got << "\n"
        << plain[i];
  }
}

// Gets three lists, may write to the first, and returns one.
struct Case {
  const char* name;
  std::function<Tensors(const Tensors&, const Tensors&, const Tensors&)> run;
};

std::vector<at::Scalar> scalars() { return {1.5, 2, -0.5, 3, 0.25, 4}; }

#define IN_PLACE(call) [](const Tensors& a, const Tensors& b, const Tensors& c) { return call, a; }
#define RETURNS(call) [](const Tensors& a, const Tensors& b, const Tensors& c) { return call; }

std::vector<Case> in_place() {
  return {
      {"add_ scalar", IN_PLACE(at::_foreach_add_(a, 2))},
      {"add_ scalars", IN_PLACE(at::_foreach_add_(a, scalars()))},
      {"add_ list", IN_PLACE(at::_foreach_add_(a, b, 0.5))},
      {"add_ tensor", IN_PLACE(at::_foreach_add_(a, c[4]))},
      {"sub_ list", IN_PLACE(at::_foreach_sub_(a, b))},
      {"mul_ scalar", IN_PLACE(at::_foreach_mul_(a, 0.3))},
      {"mul_ scalars", IN_PLACE(at::_foreach_mul_(a, scalars()))},
      {"mul_ list", IN_PLACE(at::_foreach_mul_(a, b))},
      {"mul_ tensor", IN_PLACE(at::_foreach_mul_(a, c[4]))},
      {"div_ list", IN_PLACE(at::_foreach_div_(a, b))},
      {"addcdiv_", IN_PLACE(at::_foreach_addcdiv_(a, b, c, -0.1))},
      {"addcmul_ scalars", IN_PLACE(at::_foreach_addcmul_(a, b, c, scalars()))},
      {"lerp_", IN_PLACE(at::_foreach_lerp_(a, b, 0.3))},
      {"maximum_", IN_PLACE(at::_foreach_maximum_(a, b))},
      {"clamp_min_", IN_PLACE(at::_foreach_clamp_min_(a, 0.6))},
      {"sqrt_", IN_PLACE(at::_foreach_sqrt_(a))},
      {"neg_", IN_PLACE(at::_foreach_neg_(a))},
      {"zero_", IN_PLACE(at::_foreach_zero_(a))},
      {"copy_", IN_PLACE(at::_foreach_copy_(a, b))},
      {"pow_", IN_PLACE(at::_foreach_pow_(a, 3))},
  };
}

// LibTorch has this operator from 2.13 on.
std::optional<c10::OperatorHandle> foreach_mm() {
  return c10::Dispatcher::singleton().findSchema({"aten::_foreach_mm", ""});
}

std::vector<Case> others() {
  std::vector<Case> cases{
      {"add", RETURNS(at::_foreach_add(a, 2))},
      {"add list", RETURNS(at::_foreach_add(a, b, 2))},
      {"sub scalars", RETURNS(at::_foreach_sub(a, scalars()))},
      {"mul list", RETURNS(at::_foreach_mul(a, b))},
      {"div scalar", RETURNS(at::_foreach_div(a, 2))},
      {"div tensor", RETURNS(at::_foreach_div(a, c[4]))},
      {"exp", RETURNS(at::_foreach_exp(a))},
      {"abs", RETURNS(at::_foreach_abs(a))},
      {"sigmoid", RETURNS(at::_foreach_sigmoid(a))},
      {"reciprocal", RETURNS(at::_foreach_reciprocal(a))},
      {"lerp list", RETURNS(at::_foreach_lerp(a, b, c))},
      {"addcdiv tensor",  // whose scalars are in host memory, as on CUDA
       RETURNS(at::_foreach_addcdiv(a, b, c, torch::tensor({1.F, 2.F, 3.F, 4.F, 5.F, 6.F})))},
      {"pow of a scalar", RETURNS(at::_foreach_pow(2, a))},
      {"broadcasts", RETURNS(at::_foreach_add(a, Tensors(a.size(), c[4])))},
      {"max", RETURNS(at::_foreach_max({a[0], a[1], a[2]}))},
  };
  if (foreach_mm()) {
    using Mm = std::vector<at::Tensor>(at::TensorList, at::TensorList);
    cases.push_back({"mm", RETURNS(foreach_mm()->typed<Mm>().call({a[5]}, {b[5]}))});
  }
  return cases;
}

void expect_as_plain(const Case& test, const DeviceMesh& mesh, int way) {
  SCOPED_TRACE(std::string(test.name) + ", way " + std::to_string(way));
  const Tensors a = make_list(1), b = make_list(20), c = make_list(40);
  const Tensors x = distribute_list(a, mesh, way), y = distribute_list(b, mesh, way),
                z = distribute_list(c, mesh, way == 1 ? 2 : way);
  const Tensors expected = test.run(a, b, c), got = test.run(x, y, z);
  const bool exact = way != 3 && std::string(test.name) != "mm";
  expect_lists(got, expected, exact);
  expect_lists(x, a, exact);
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_EQ(is_dist(x[i]), way != 4 || i % 2 == 0) << "what a list holds stays what it is";
}

void for_each_mesh(const std::function<void(const DeviceMesh&)>& f) {
  run_world(2, [&](World&) { f(DeviceMesh::over_world()); });
  run_world(3, [&](World&) { f(DeviceMesh::over_world()); });
  run_world(4, [&](World&) { f(DeviceMesh::over_world({2, 2})); });
}

TEST(DistLists, ForeachInPlace) {
  for_each_mesh([](const DeviceMesh& mesh) {
    for (const Case& test : in_place()) {
      for (int way = 0; way < kWays; ++way) expect_as_plain(test, mesh, way);
    }
  });
}

TEST(DistLists, Foreach) {
  for_each_mesh([](const DeviceMesh& mesh) {
    for (const Case& test : others()) {
      for (int way = 0; way < kWays; ++way) expect_as_plain(test, mesh, way);
    }
  });
}

TEST(DistLists, Norms) {
  for_each_mesh([](const DeviceMesh& mesh) {
    for (const at::Scalar& order :
         std::vector<at::Scalar>{2, 1, 3.5, 0, std::numeric_limits<double>::infinity()}) {
      for (int way = 0; way < kWays; ++way) {
        SCOPED_TRACE(std::to_string(order.toDouble()) + ", way " + std::to_string(way));
        Tensors a = make_list(1);
        a.erase(a.begin() + 3);  // has no largest element
        const Tensors x = distribute_list(a, mesh, way);
        expect_lists(at::_foreach_norm(x, order), at::_foreach_norm(a, order), false);
        expect_lists(at::_foreach_norm(x, order, at::kDouble),
                     at::_foreach_norm(a, order, at::kDouble), false);
      }
    }
    const Tensors a = {numbers({4, 4}), numbers({6, 3})};
    const double smallest = -std::numeric_limits<double>::infinity();
    expect_lists(at::_foreach_norm(distribute_list(a, mesh, 0), smallest),
                 at::_foreach_norm(a, smallest), false);
  });
}

struct States {
  Tensors params, grads, first, second, largest, steps;
};

States make_states() {
  States states{make_list(1), make_list(20), make_list(40), make_list(60), make_list(80), {}};
  for (size_t i = 0; i < kSizes.size(); ++i)
    states.steps.push_back(on_test_device(torch::full({}, 3.0)));
  return states;
}

States distribute_states(const States& plain, const DeviceMesh& mesh, int way) {
  return {distribute_list(plain.params, mesh, way),  distribute_list(plain.grads, mesh, way),
          distribute_list(plain.first, mesh, way),   distribute_list(plain.second, mesh, way),
          distribute_list(plain.largest, mesh, way), plain.steps};
}

struct Step {
  const char* name;
  std::function<void(const States&)> run;
};

std::vector<Step> steps() {
  const auto scale = on_test_device(torch::full({}, 4.F)),
             not_found = on_test_device(torch::zeros({}));
  return {
      {"adam",
       [](const States& s) {
         at::_fused_adam_(s.params, s.grads, s.first, s.second, {}, s.steps, 0.1, 0.9, 0.99, 0.01,
                          1e-8, false, false);
       }},
      {"adamw with amsgrad",
       [](const States& s) {
         at::_fused_adamw_(s.params, s.grads, s.first, s.second, s.largest, s.steps, 0.1, 0.9, 0.99,
                           0.01, 1e-8, true, false);
       }},
      {"adamw of scaled gradients",
       [scale, not_found](const States& s) {
         at::_fused_adamw_(s.params, s.grads, s.first, s.second, {}, s.steps, 0.1, 0.9, 0.99, 0.01,
                           1e-8, false, false, scale, not_found);
       }},
      {"adam with lr in a tensor",
       [](const States& s) {
         at::_fused_adam_(s.params, s.grads, s.first, s.second, {}, s.steps,
                          on_test_device(torch::full({}, 0.1)), 0.9, 0.99, 0.01, 1e-8, false,
                          false);
       }},
      {"sgd",
       [](const States& s) {
         at::_fused_sgd_(s.params, s.grads, {}, 0.01, 0, 0.1, 0, false, false, false);
       }},
      {"sgd with momentum",
       [](const States& s) {
         at::_fused_sgd_(s.params, s.grads, s.first, 0.01, 0.9, 0.1, 0, true, false, false);
       }},
      {"adagrad",
       [](const States& s) {
         at::_fused_adagrad_(s.params, s.grads, s.first, s.steps, 0.1, 0.01, 0.01, 1e-8, false);
       }},
  };
}

// Kernels may use other instructions for the elements at a list's end.
void expect_states(const States& dist, const States& plain) {
  expect_lists(dist.params, plain.params, false);
  expect_lists(dist.grads, plain.grads, false);
  expect_lists(dist.first, plain.first, false);
  expect_lists(dist.second, plain.second, false);
  expect_lists(dist.largest, plain.largest, false);
}

TEST(DistLists, FusedSteps) {
  for_each_mesh([](const DeviceMesh& mesh) {
    for (const Step& step : steps()) {
      for (int way = 0; way < kWays; ++way) {
        SCOPED_TRACE(std::string(step.name) + ", way " + std::to_string(way));
        const States plain = make_states(), dist = distribute_states(plain, mesh, way);
        step.run(plain), step.run(dist);
        expect_states(dist, plain);
      }
    }
  });
}

// Gradients and state with other placements than the parameters are redistributed to theirs.
TEST(DistLists, FusedStepsOnMixedPlacements) {
  for_each_mesh([](const DeviceMesh& mesh) {
    for (const Step& step : steps()) {
      SCOPED_TRACE(step.name);
      const States plain = make_states();
      States dist = distribute_states(plain, mesh, 0);
      dist.grads = distribute_list(plain.grads, mesh, 3);
      dist.first = distribute_list(plain.first, mesh, 1);
      dist.second = distribute_list(plain.second, mesh, 4);
      for (at::Tensor& count : dist.steps) count = distribute(count.clone(), mesh, {});
      step.run(plain), step.run(dist);
      expect_states(dist, plain);
    }
  });
}

TEST(DistLists, EquallyPlacedTensorsSendNothing) {
  run_world(2, [](World& world) {
    auto counting = counting_process_group(world.process_group());
    world.set_process_group(counting);
    const auto mesh = DeviceMesh::over_world();
    const auto prepare = [&] { return distribute_states(make_states(), mesh, 0); };
    const States states = prepare();
    at::_foreach_add_(states.params, states.grads);
    counting->reset_counts();
    for (const Step& step : steps()) step.run(states);
    for (const Case& test : in_place()) {
      if (std::string(test.name).find("tensor") == std::string::npos)
        test.run(states.params, states.grads, states.first);
    }
    // Ranks take their parts of replicated gradients; the unscaled gradients are not sent back.
    States replicated = prepare();
    for (size_t i = 0; i < replicated.grads.size(); ++i)
      replicated.grads[i] = distribute(make_list(20)[i], mesh, {});
    steps()[0].run(replicated);
    EXPECT_EQ(counting->counts().calls(), 0);
    // All norms together are one message.
    at::_foreach_norm({states.params[0], states.params[2], states.params[4]}, 2);
    EXPECT_EQ(counting->counts().calls(), 1);
    EXPECT_EQ(counting->counts().all_reduce.calls, 1);
  });
}

TEST(DistLists, GradientsAreCheckedOnAllRanks) {
  for_each_mesh([](const DeviceMesh& mesh) {
    for (const bool is_bad : {false, true}) {
      for (int way = 0; way < kWays; ++way) {
        SCOPED_TRACE(way);
        Tensors a = make_list(1);
        if (is_bad) a[0][4][3] = std::numeric_limits<float>::infinity();
        const Tensors x = distribute_list(a, mesh, way);
        const at::Tensor inverse = on_test_device(torch::full({1}, 0.5F));
        at::Tensor expected = on_test_device(torch::zeros({1})),
                   found = on_test_device(torch::zeros({1}));
        at::_amp_foreach_non_finite_check_and_unscale_(a, expected, inverse);
        at::_amp_foreach_non_finite_check_and_unscale_(x, found, inverse);
        EXPECT_EQ(found.item<float>(), expected.item<float>());
        if (!is_bad) expect_lists(x, a, way != 3);
        found = distribute(on_test_device(torch::zeros({1})), mesh, {});
        at::_amp_foreach_non_finite_check_and_unscale_(x, found, distribute(inverse, mesh, {}));
        EXPECT_EQ(found.item<float>(), expected.item<float>());
      }
    }
  });
}

TEST(DistLists, ScalesAreUpdated) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    for (const float found : {0.F, 1.F}) {
      at::Tensor scale = on_test_device(torch::full({}, 8.F)),
                 count = on_test_device(torch::zeros({}, at::kInt));
      at::Tensor dist_scale = distribute(scale.clone(), mesh, {});
      at::Tensor dist_count = distribute(count.clone(), mesh, {});
      const at::Tensor found_inf = on_test_device(torch::full({}, found));
      at::_amp_update_scale_(scale, count, found_inf, 2, 0.5, 1);
      at::_amp_update_scale_(dist_scale, dist_count, found_inf, 2, 0.5, 1);
      expect_lists({dist_scale, dist_count}, {scale, count}, true);
    }
  });
}

TEST(DistLists, OfSeveralMeshes) {
  run_world(3, [](World&) {
    const DeviceMesh all = DeviceMesh::over_world(), some({2}, {0, 2});
    const Tensors a = {numbers({5, 4}), numbers({7}, 2), numbers({6}, 3)};
    const auto place = [&](const Tensors& list) {
      return Tensors{distribute(list[0].clone(), all, {Shard{0}}), list[1].clone(),
                     distribute(list[2].clone(), some, {Shard{0}})};
    };
    const auto check = [&](const Tensors& dist, const Tensors& plain) {
      const size_t count = some.is_member() ? 3 : 2;
      expect_lists(Tensors(dist.begin(), dist.begin() + count),
                   Tensors(plain.begin(), plain.begin() + count), false);
    };
    Tensors plain = {a[0].clone(), a[1].clone(), a[2].clone()}, dist = place(a);
    at::_foreach_mul_(plain, {2, 3, 4}), at::_foreach_mul_(dist, {2, 3, 4});
    check(dist, plain);
    check(at::_foreach_add(dist, dist), at::_foreach_add(plain, plain));
    at::_fused_sgd_(plain, a, {}, 0.01, 0, 0.1, 0, false, false, false);
    at::_fused_sgd_(dist, place(a), {}, 0.01, 0, 0.1, 0, false, false, false);
    check(dist, plain);
  });
}

TEST(DistLists, RanksOutsideTheMeshKnowThePlacements) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 2});
    const auto place = [&](const Placement& placement) {
      return Tensors{distribute(numbers({5, 4}), mesh, {placement})};
    };
    const Tensors rows = place(Shard{0}), columns = place(Shard{1}), terms = place(Partial{});
    const auto expect = [](const Tensors& list, const Placement& placement) {
      EXPECT_EQ(placements_of(list[0]), Placements{placement}) << describe(list[0]);
    };
    expect(at::_foreach_add(rows, columns), Shard{0});
    expect(at::_foreach_mul(columns, terms), Shard{1});
    expect(at::_foreach_mul(terms, 2), Partial{});
    expect(at::_foreach_exp(terms), Replicate{});
    for (const Tensors& list : {rows, columns, terms})
      expect(at::_foreach_norm(list, 2), Replicate{});
  });
}

TEST(DistLists, TwoMeshesAtOnePlaceAreRefused) {
  run_world(2, [](World&) {
    const Tensors x = {distribute(numbers({4}), DeviceMesh({2}, {0, 1}), {Shard{0}})};
    const Tensors y = {distribute(numbers({4}), DeviceMesh({2}, {1, 0}), {Shard{0}})};
    EXPECT_THROW(at::_foreach_add_(x, y), c10::ValueError);
    EXPECT_THROW(at::_foreach_add(x, Tensors{numbers({4}).requires_grad_(true)}), c10::ValueError);
  });
}

TEST(DistLists, ForeachHasGradients) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const auto run = [](const Tensors& a) {
      const auto products = at::_foreach_mul(a, at::_foreach_exp(a));
      const auto norms = at::_foreach_norm(products, 2);
      (products[0].sum() + norms[0] + norms[1]).backward();
    };
    const Tensors plain = {numbers({5, 4}).requires_grad_(true), numbers({3}).requires_grad_(true)};
    const Tensors dist = {distribute(numbers({5, 4}).requires_grad_(true), mesh, {Shard{0}}),
                          distribute(numbers({3}).requires_grad_(true), mesh, {})};
    run(plain), run(dist);
    expect_lists({dist[0].grad(), dist[1].grad()}, {plain[0].grad(), plain[1].grad()}, false);
  });
}

// Each place sees what was written at those before.
TEST(DistLists, AListMayHaveATensorTwice) {
  run_world(2, [](World&) {
    for (const Placement& placement : {Placement{Shard{0}}, Placement{Partial{PartialOp::kMin}}}) {
      const at::Tensor plain = numbers({5, 4});
      const at::Tensor dist = distribute(plain.clone(), DeviceMesh::over_world(), {placement});
      for (const at::Tensor& x : {plain, dist}) at::_foreach_mul_({x, x}, 0.5);
      expect_lists({dist}, {plain}, true);
      for (const at::Tensor& x : {plain, dist}) at::_foreach_add_({x, x.t()}, {x.clone(), x.t()});
      expect_lists({dist}, {plain}, true);
    }
  });
}

// Autograd finds writes by a tensor's version.
TEST(DistLists, ForeachCountsItsWrites) {
  run_world(2, [](World&) {
    const at::Tensor plain = numbers({5, 4}).requires_grad_(true);
    const at::Tensor dist =
        distribute(plain.detach(), DeviceMesh::over_world(), {Shard{0}}).requires_grad_(true);
    for (const at::Tensor& x : {plain, dist}) {
      const at::Tensor view = (x * 1).unsqueeze(0), saved = x.exp();
      at::_foreach_mul_({view}, 0.5);
      view.sum().backward();
      const at::NoGradGuard no_grad;
      at::_foreach_mul_({saved}, 2);
      const at::AutoGradMode with_grad(true);
      EXPECT_THROW(saved.sum().backward(), c10::Error);
    }
    expect_lists({dist.grad()}, {plain.grad()}, false);
  });
}

}  // namespace tessera::list_test
