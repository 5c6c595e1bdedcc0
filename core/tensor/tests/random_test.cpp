// Random numbers of DistTensors: those of one process, to the bit, for all placements.

#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>

#include "support/error_of.h"
#include "support/run_world.h"
#include "support/test_device.h"
#include "tensor/tests/test_generator.h"

namespace tessera::random_test {

using testing::on_test_device;
using testing::seed_test_generator;
using testing::test_generator;

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

struct Draw {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> run;  // may write to its argument
};

std::vector<Draw> in_place() {
  return {
      {"normal_", [](const at::Tensor& x) { return x.normal_(1, 2); }},
      {"uniform_", [](const at::Tensor& x) { return x.uniform_(-1, 3); }},
      {"random_", [](const at::Tensor& x) { return x.random_(); }},
      {"random_ to", [](const at::Tensor& x) { return x.random_(7); }},
      {"random_ from", [](const at::Tensor& x) { return x.random_(-5, 5); }},
      {"exponential_", [](const at::Tensor& x) { return x.exponential_(2); }},
      {"log_normal_", [](const at::Tensor& x) { return x.log_normal_(); }},
      {"cauchy_", [](const at::Tensor& x) { return x.cauchy_(); }},
      {"geometric_", [](const at::Tensor& x) { return x.geometric_(0.3); }},
      {"bernoulli_", [](const at::Tensor& x) { return x.bernoulli_(0.3); }},
      {"bernoulli_ by tensor",
       [](const at::Tensor& x) { return x.bernoulli_(x.detach().clone().sigmoid()); }},
      {"of a view", [](const at::Tensor& x) { return x[1].normal_(), x; }},
      {"of a transposed", [](const at::Tensor& x) { return x.t().normal_(), x; }},
  };
}

std::vector<Draw> others() {
  return {
      {"bernoulli", [](const at::Tensor& x) { return x.sigmoid().bernoulli(); }},
      {"bernoulli p", [](const at::Tensor& x) { return x.bernoulli(0.7); }},
      {"rand_like", [](const at::Tensor& x) { return torch::rand_like(x); }},
      {"rand_like in double", [](const at::Tensor& x) { return torch::rand_like(x, at::kDouble); }},
      {"randn_like", [](const at::Tensor& x) { return torch::randn_like(x); }},
      {"randint_like", [](const at::Tensor& x) { return torch::randint_like(x, 3, 99); }},
      {"native_dropout",
       [](const at::Tensor& x) { return std::get<0>(torch::native_dropout(x, 0.4, true)); }},
      {"its mask",
       [](const at::Tensor& x) { return std::get<1>(torch::native_dropout(x, 0.4, true)); }},
      {"multinomial",
       [](const at::Tensor& x) { return x.sigmoid().multinomial(3, /*replacement=*/true); }},
      {"normal of tensors", [](const at::Tensor& x) { return at::normal(x, x.exp()); }},
      {"dropout", [](const at::Tensor& x) { return torch::dropout(x, 0.3, true); }},
      {"dropout of a transposed",
       [](const at::Tensor& x) { return torch::dropout(x.t(), 0.3, true); }},
      {"feature_dropout",
       [](const at::Tensor& x) { return torch::feature_dropout(x.unsqueeze(-1), 0.5, true); }},
      {"alpha_dropout", [](const at::Tensor& x) { return torch::alpha_dropout(x, 0.3, true); }},
  };
}

std::vector<Draw> all() {
  auto draws = in_place();
  for (Draw& draw : others()) draws.push_back(std::move(draw));
  return draws;
}

// Runs both from one state of the generators; they must end in the same state.
void expect_as_plain(const Draw& draw, const at::Tensor& whole, const DeviceMesh& mesh,
                     const Placements& placements) {
  SCOPED_TRACE(std::string(draw.name) + " " + to_string(placements));
  seed_test_generator(11);
  const at::Tensor expected = draw.run(whole.clone());
  const at::Tensor after = test_generator().get_state();
  seed_test_generator(11);
  const at::Tensor dist = draw.run(distribute(whole.clone(), mesh, placements));
  ASSERT_TRUE(is_dist(dist));
  EXPECT_EQ(dist.scalar_type(), expected.scalar_type());
  ASSERT_EQ(dist.sizes(), expected.sizes());
  // A pending sum of values is rounded; drawn numbers are not.
  const bool is_exact = !is_partial(placements.front()) && !is_partial(placements.back());
  EXPECT_TRUE(is_exact ? torch::equal(full_tensor(dist), expected)
                       : torch::allclose(full_tensor(dist), expected, 1e-5, 1e-6))
      << full_tensor(dist) << "\n"
      << expected;
  EXPECT_TRUE(torch::equal(test_generator().get_state(), after));
}

void expect_all_as_plain(int ranks, const std::vector<int64_t>& shape,
                         const std::vector<Placements>& ways) {
  run_world(ranks, [&](World&) {
    const auto mesh = DeviceMesh::over_world(shape);
    for (const Draw& draw : all()) {
      for (const Placements& placements : ways) {
        expect_as_plain(draw, numbers({5, 6}), mesh, placements);
        expect_as_plain(draw, numbers({2, 41}), mesh, placements);
      }
    }
  });
}

const std::vector<Placements> kLines = {{Shard{0}}, {Shard{1}}, {Replicate{}}, {Partial{}}};

TEST(DistRandom, OnTwoRanks) { expect_all_as_plain(2, {2}, kLines); }
TEST(DistRandom, OnThreeRanks) { expect_all_as_plain(3, {3}, kLines); }
TEST(DistRandom, OnASquare) {
  expect_all_as_plain(4, {2, 2},
                      {{Shard{0}, Shard{1}}, {Shard{0}, Shard{0}}, {Replicate{}, Shard{0}}});
}

TEST(DistRandom, ExplicitGenerators) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor before = test_generator().get_state();
    at::Generator one = test_generator().clone();
    one.set_current_seed(5);
    at::Generator two = one.clone();
    at::Tensor plain = on_test_device(torch::empty({7, 3})).normal_(0, 1, one);
    at::Tensor dist = distribute(on_test_device(torch::zeros({7, 3})), mesh, {Shard{0}});
    dist.normal_(0, 1, two);
    EXPECT_TRUE(torch::equal(full_tensor(dist), plain));
    EXPECT_TRUE(torch::equal(one.get_state(), two.get_state()));
    EXPECT_TRUE(torch::equal(test_generator().get_state(), before));
  });
}

TEST(DistRandom, SendsNothing) {
  run_world(2, [](World& world) {
    auto counting = counting_process_group(world.process_group());
    world.set_process_group(counting);
    at::Tensor x = distribute(numbers({5, 4}), DeviceMesh::over_world(), {Shard{0}});
    x.normal_();  // looks at the generators
    counting->reset_counts();
    x.normal_(), x.uniform_(), x.bernoulli_(0.5);
    torch::rand_like(x), torch::dropout(x, 0.5, true), x.bernoulli(0.5);
    EXPECT_EQ(counting->counts().calls(), 0);
  });
}

TEST(DistRandom, DifferingGeneratorsAreNamedOnAllRanks) {
  run_world(3, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    at::Tensor x = distribute(on_test_device(torch::zeros({4, 2})), mesh, {Shard{0}});
    seed_test_generator(world.rank() == 1 ? 8 : 7);
    torch::rrelu(x, 0.1, 0.3, /*training=*/false);  // draws nothing
    try {
      x.normal_();
      ADD_FAILURE() << "no error";
    } catch (const c10::ValueError& error) {
      const std::string text = error.what_without_backtrace();
      testing::expect_contains(text, {"rank 1 differs from that of rank 0", "manual_seed"});
    }
    EXPECT_EQ(full_tensor(x).count_nonzero().item<int64_t>(), 0);
    seed_test_generator(7);
    x.normal_();
    EXPECT_NE(full_tensor(x).count_nonzero().item<int64_t>(), 0);
  });
}

TEST(DistRandom, RanksOutsideTheMeshStayInStep) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 1});
    seed_test_generator(3);
    at::Tensor plain = on_test_device(torch::empty({5, 4})).normal_();
    plain = torch::dropout(plain, 0.5, true);
    const at::Tensor after = on_test_device(torch::empty({3})).normal_();
    seed_test_generator(3);
    at::Tensor dist = distribute(on_test_device(torch::zeros({5, 4})), mesh, {Shard{0}}).normal_();
    dist = torch::dropout(dist, 0.5, true);
    EXPECT_TRUE(torch::equal(on_test_device(torch::empty({3})).normal_(), after));
    EXPECT_TRUE(!mesh.is_member() || torch::equal(full_tensor(dist), plain));
  });
}

struct NetImpl : torch::nn::Module {
  NetImpl()
      : up(register_module("up", torch::nn::Linear(6, 10))),
        down(register_module("down", torch::nn::Linear(10, 6))),
        dropout(register_module("dropout", torch::nn::Dropout(0.4))) {}
  at::Tensor forward(const at::Tensor& x) { return down(dropout(up(x).relu())); }
  torch::nn::Linear up, down;
  torch::nn::Dropout dropout;
};
TORCH_MODULE(Net);

struct Cut {
  Placements input, up, down;
};

// Cut by batch, and by features: the mask is cut with the activations.
TEST(DistRandom, ModulesWithDropoutTrainAsOneProcess) {
  for (const int ranks : {2, 3})
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      for (const Cut& cut : {Cut{{Shard{0}}, {}, {}}, Cut{{}, {Shard{0}}, {Shard{1}}}}) {
        manual_seed(21);
        Net plain = on_test_device(Net()), dist = on_test_device(Net());
        torch::NoGradGuard no_grad;
        for (size_t i = 0; i < plain->parameters().size(); ++i)
          dist->parameters()[i].copy_(plain->parameters()[i]);
        distribute_(dist->up->weight, mesh, cut.up), distribute_(dist->up->bias, mesh, cut.up);
        distribute_(dist->down->weight, mesh, cut.down), distribute_(dist->down->bias, mesh, {});
        at::AutoGradMode with_grad(true);
        const at::Tensor x = numbers({5, 6});
        seed_test_generator(4);
        plain->forward(x).square().mean().backward();
        seed_test_generator(4);
        dist->forward(distribute(x, mesh, cut.input)).square().mean().backward();
        for (size_t i = 0; i < plain->parameters().size(); ++i)
          EXPECT_TRUE(torch::allclose(full_tensor(dist->parameters()[i].grad()),
                                      plain->parameters()[i].grad(), 1e-5, 1e-6));
      }
    });
}

std::vector<Draw> initializers() {
  namespace init = torch::nn::init;
  return {
      {"uniform_", [](const at::Tensor& x) { return init::uniform_(x, -1, 1); }},
      {"normal_", [](const at::Tensor& x) { return init::normal_(x); }},
      {"constant_", [](const at::Tensor& x) { return init::constant_(x, 3); }},
      {"xavier_uniform_", [](const at::Tensor& x) { return init::xavier_uniform_(x); }},
      {"xavier_normal_", [](const at::Tensor& x) { return init::xavier_normal_(x); }},
      {"kaiming_uniform_", [](const at::Tensor& x) { return init::kaiming_uniform_(x); }},
      {"kaiming_normal_", [](const at::Tensor& x) { return init::kaiming_normal_(x); }},
      {"orthogonal_", [](const at::Tensor& x) { return init::orthogonal_(x); }},
      {"sparse_", [](const at::Tensor& x) { return init::sparse_(x, 0.4); }},
      {"eye_", [](const at::Tensor& x) { return init::eye_(x); }},
      {"dirac_",
       [](const at::Tensor& x) {
         return init::dirac_(x.view({5, 3, 2})), x;
       }},
  };
}

TEST(DistRandom, InitializersAreThoseOfOneProcess) {
  for (const int ranks : {2, 3})
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      for (const Draw& draw : initializers()) {
        for (const Placements& placements : {Placements{Shard{0}}, {Shard{1}}, {Replicate{}}})
          expect_as_plain(draw, numbers({5, 6}), mesh, placements);
      }
    });
}

}  // namespace tessera::random_test
