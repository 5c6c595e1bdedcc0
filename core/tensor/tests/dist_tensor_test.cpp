// Making DistTensors from tensors, and operations refused to tensors without memory.

#include <gtest/gtest.h>
#include <tessera/base/generator.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "support/error_of.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::dist_tensor_test {

namespace nn = torch::nn;
using testing::on_test_device;

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed = 1) {
  return on_test_device(torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)));
}

// Uses a weight on rows of a batch, so that each rank has one term of its gradient.
void expect_placed_gradient(nn::Linear& linear, const DeviceMesh& mesh, const Placements& expected,
                            const std::string& what) {
  const at::Tensor x = distribute(numbers({4, 6}), mesh, {Shard{0}});
  linear->zero_grad();
  linear(x).square().sum().backward();
  linear(x).square().sum().backward();
  ASSERT_TRUE(is_dist(linear->weight.grad())) << what;
  EXPECT_EQ(placements_of(linear->weight.grad()), expected) << what;
  const at::Tensor weight = full_tensor(linear->weight).detach().requires_grad_(true),
                   bias = full_tensor(linear->bias).detach();
  for (int pass = 0; pass < 2; ++pass)
    nn::functional::linear(numbers({4, 6}), weight, bias).square().sum().backward();
  EXPECT_TRUE(torch::allclose(full_tensor(linear->weight.grad()), weight.grad(), 1e-4, 1e-5))
      << what;
}

nn::Linear make_linear(const DeviceMesh& mesh, const Placements& placements, bool is_frozen) {
  nn::Linear linear = on_test_device(nn::Linear(6, 4));
  {
    torch::NoGradGuard no_grad;
    linear->weight.copy_(numbers({4, 6}, 2));
    linear->bias.copy_(numbers({4}, 3));
  }
  linear->weight.requires_grad_(!is_frozen);
  distribute_(linear->weight, mesh, placements);
  distribute_(linear->bias, mesh, {});
  return linear;
}

TEST(DistGradients, OfAParameterLieAsItDoes) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      for (const Placements& own : {Placements{Replicate{}}, {Shard{0}}, {Shard{1}}}) {
        nn::Linear linear = make_linear(mesh, own, false);
        expect_placed_gradient(linear, mesh, own, to_string(own));
      }
    });
  }
}

TEST(DistGradients, OfAParameterThatThawsLieAsItDoes) {
  for (const int ranks : {2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      for (const Placements& own : {Placements{Replicate{}}, {Shard{0}}, {Shard{1}}}) {
        nn::Linear linear = make_linear(mesh, own, true);
        linear->weight.requires_grad_(true);
        expect_placed_gradient(linear, mesh, own, to_string(own));
        // Once more: frozen, placed otherwise, thawed.
        linear->weight.requires_grad_(false);
        distribute_(linear->weight, mesh, {Replicate{}});
        linear->weight.requires_grad_(true);
        expect_placed_gradient(linear, mesh, {Replicate{}}, "placed again");
      }
    });
  }
}

TEST(DistGradients, OfACloneLieAsItsParametersDo) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    for (const Placements& own : {Placements{Replicate{}}, {Shard{0}}, {Shard{1}}}) {
      nn::Linear linear = make_linear(mesh, own, false);
      nn::Linear copy(std::dynamic_pointer_cast<nn::LinearImpl>(linear->clone()));
      ASSERT_EQ(placements_of(copy->weight), own);
      expect_placed_gradient(copy, mesh, own, to_string(own));
    }
  });
}

TEST(DistGradients, OfALeafThatTookTheDataOfAnotherLieAsItDoes) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    nn::Linear linear = make_linear(mesh, {}, false), other = on_test_device(nn::Linear(6, 4));
    other->weight.set_data(linear->weight.detach());
    other->bias.set_data(linear->bias.detach());
    expect_placed_gradient(other, mesh, {Replicate{}}, "set_data");
    const at::Tensor leaf = distribute(numbers({4, 6}), mesh, {}).requires_grad_(true);
    nn::functional::linear(distribute(numbers({4, 6}), mesh, {Shard{0}}), leaf).sum().backward();
    EXPECT_EQ(placements_of(leaf.grad()), Placements{Replicate{}});
  });
}

// Operators that use a leaf through other kernels than the planned one.
TEST(DistGradients, LieAsTheLeafWhateverOperatorUsesIt) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const std::vector<std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>> uses = {
        [](const at::Tensor& w, const at::Tensor& x) { return w * x; },
        [](const at::Tensor& w, const at::Tensor& x) { return torch::dropout(w, 0.5, true) * x; },
        [](const at::Tensor& w, const at::Tensor& x) {
          return torch::batch_norm(x, w, {}, {}, {}, true, 0.1, 1e-5, false);
        },
        [](const at::Tensor& w, const at::Tensor& x) {
          return torch::layer_norm(x, {4}, w, w, 1e-5, false);
        },
        [](const at::Tensor& w, const at::Tensor& x) { return x * torch::_foreach_mul({w}, 2)[0]; },
    };
    for (size_t i = 0; i < uses.size(); ++i) {
      const at::Tensor x = distribute(numbers({6, 4}), mesh, {Shard{0}});
      at::Tensor leaf = distribute(numbers({4}), mesh, {});
      leaf.requires_grad_(true);
      uses[i](leaf, x).square().sum().backward();
      EXPECT_EQ(placements_of(leaf.grad()), Placements{Replicate{}}) << i;
    }
  });
}

void expect_says(const std::function<void()>& f, const std::vector<std::string>& words) {
  testing::expect_contains(testing::error_of<c10::Error>(f), words);
}

// Kernels are chosen by strides: attention takes one that reads the last dim as contiguous.
TEST(DistMemory, LiesInTheOrderOfTheSource) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      const at::Tensor q = numbers({2, 2, 4, 3});
      const at::Tensor v = numbers({2, 2, 4, 3}, 2).mT().contiguous().mT();
      const at::Tensor expected =
          at::scaled_dot_product_attention(q, q, v, {}, 0, /*is_causal=*/true);
      const std::vector<Placement> all{Replicate{}, Shard{0}, Shard{1}, Shard{2}, Shard{3}};
      for (const Placement& first : all) {
        const at::Tensor cut = distribute(v, mesh, {first});
        for (const Placement& second : all) {
          const at::Tensor placed = redistribute(cut, {second});
          const std::string what = to_string({first, second});
          EXPECT_EQ(placed.strides(), v.strides()) << what;
          const at::Tensor part = to_local(placed);
          EXPECT_TRUE(part.numel() == 0 || part.mT().is_contiguous()) << what;
          const at::Tensor whole = distribute(q, mesh, {});
          const at::Tensor found =
              at::scaled_dot_product_attention(whole, whole, placed, {}, 0, /*is_causal=*/true);
          EXPECT_TRUE(torch::allclose(full_tensor(found), expected, 1e-5, 1e-6)) << what;
        }
        // Also where a part has one column or no elements, as others may have more.
        const at::Tensor again = from_local(to_local(cut), mesh, {first}, v.sizes().vec());
        EXPECT_TRUE(again.is_contiguous() && to_local(again).is_contiguous()) << to_string({first});
      }
    });
  }
}

TEST(DistMemory, OfPartsIsTheirOwnUnlessTheTensorIsReplicated) {
  for (const int ranks : {1, 3}) {
    run_world(ranks, [](World& world) {
      const at::Tensor x = numbers({1, 4});  // the first rank's part has all of it
      for (const Placement& placement : {Placement{Shard{0}}, Placement{Replicate{}}}) {
        const at::Tensor placed = distribute(x, DeviceMesh::over_world(), {placement});
        EXPECT_EQ(to_local(placed).is_alias_of(x), is_replicate(placement)) << world.rank();
        const at::Tensor shown = x.select(1, 0).unsqueeze(1).expand({1, 2});
        const at::Tensor repeated = distribute(shown, DeviceMesh::over_world(), {placement});
        EXPECT_EQ(repeated.strides(),
                  is_replicate(placement) ? shown.strides() : c10::IntArrayRef({2, 1}));
      }
    });
  }
}

// A sum's gradient is one element that is shown everywhere.
TEST(DistGradients, OfRepeatedElementsAddUp) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    for (const Placements& own : {Placements{Replicate{}}, {Shard{0}}, {Shard{1}}}) {
      const at::Tensor x = distribute(numbers({2, 3}), mesh, own).requires_grad_(true);
      const at::Tensor y = distribute(numbers({2, 3}), mesh, own).requires_grad_(true);
      for (int pass = 0; pass < 3; ++pass) {
        x.sum().backward();
        to_local(y).sum().backward();
      }
      for (const at::Tensor& leaf : {x, y})
        EXPECT_TRUE(torch::equal(full_tensor(leaf.grad()), on_test_device(torch::full({2, 3}, 3.))))
            << to_string(own);
    }
  });
}

TEST(DistMemory, SavingByLibTorchIsRefusedAndNamesTheCallToUse) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const std::vector<std::string> words = {"DistTensor", "no memory", "save_checkpoint()",
                                            "full_tensor()"};
    nn::Linear linear = make_linear(mesh, {Shard{0}}, false);
    const at::Tensor made = distribute(numbers({4, 6}), mesh, {Shard{0}});
    for (const at::Tensor& tensor :
         {made, made * 2, made.view({2, 2, 6}), made.detach(), linear->weight,
          linear->weight.detach(), linear->weight.tensor_data(), full_tensor(made) + made}) {
      expect_says([&] { tensor.storage(); }, words);
      expect_says([&] { tensor.data_ptr(); }, words);
      expect_says([&] { tensor.const_data_ptr<float>(); }, words);
      std::ostringstream stream;
      expect_says([&] { torch::save(tensor, stream); }, words);
      expect_says([&] { torch::pickle_save(tensor); }, words);
    }
    std::ostringstream stream;
    expect_says([&] { torch::save(linear, stream); }, words);
    torch::optim::AdamW adamw(linear->parameters());
    expect_placed_gradient(linear, mesh, {Shard{0}}, "before a step");
    adamw.step();
    expect_says([&] { torch::save(adamw, stream); }, words);
    // A tensor that is ordinary again can be saved.
    torch::save(full_tensor(made), stream);
  });
}

TEST(DistMemory, ATensorThatBecomesOrdinaryAgainHasMemory) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    nn::Linear linear = make_linear(mesh, {Shard{0}}, false);
    linear->weight.set_data(full_tensor(linear->weight).detach().clone());
    EXPECT_FALSE(is_dist(linear->weight));
    EXPECT_NE(linear->weight.data_ptr(), nullptr);
    EXPECT_EQ(linear->weight.storage().nbytes(), 4u * 6 * 4);
  });
}

TEST(DistMemory, PartsThatAreZerosWithoutMemoryGetMemory) {
  run_world(2, [](World&) {
    const at::Tensor zeros =
        at::_efficientzerotensor({2, 3}, on_test_device(at::ones(1)).options());
    EXPECT_FALSE(
        to_local(from_local(zeros, DeviceMesh::over_world(), {Shard{0}}))._is_zerotensor());
  });
}

// Each operator below gives a DistTensor of meta parts, with the sizes and placements that it would
// have with memory.
TEST(DistMeta, TensorsGoThroughOperatorsAndRedistributionsWithoutMessages) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      const auto placed = [&](const at::Tensor& tensor) {
        return distribute(tensor, mesh, {Shard{0}}).requires_grad_();
      };
      const at::Tensor meta = placed(torch::empty({5, 3}, at::kMeta));
      const at::Tensor real = placed(on_test_device(torch::randn({5, 3})));
      const auto uses = [&](const at::Tensor& x) {
        const at::Tensor sum = (x * 2).sum();
        sum.backward();
        return std::vector<at::Tensor>{x + 1,
                                       x.matmul(x.t()),
                                       x.softmax(1).view({15}),
                                       torch::empty_like(x),
                                       x.new_zeros({5, 3}),
                                       redistribute(x, {Shard{1}}),
                                       redistribute(x.sum(0), {Replicate{}}),
                                       redistribute(x, DeviceMesh::over_world(), {Replicate{}}),
                                       x.grad()};
      };
      const auto made = uses(meta), expected = uses(real);
      for (size_t i = 0; i < made.size(); ++i) {
        ASSERT_TRUE(is_dist(made[i])) << i;
        EXPECT_TRUE(made[i].is_meta() && to_local(made[i]).is_meta()) << i;
        EXPECT_EQ(made[i].sizes(), expected[i].sizes()) << i;
        EXPECT_EQ(placements_of(made[i]), placements_of(expected[i])) << i;
        EXPECT_EQ(to_local(made[i]).sizes(), to_local(expected[i]).sizes()) << i;
      }
      EXPECT_TRUE(full_tensor(meta).is_meta());
      EXPECT_EQ(full_tensor(meta).sizes(), at::IntArrayRef({5, 3}));
    });
  }
}

TEST(DistMeta, ParametersGetMemoryAndTheValuesOfOneProcess) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const at::Tensor weight = torch::empty({4, 6}, at::kMeta).requires_grad_();
      distribute_(weight, DeviceMesh::over_world(), {Shard{0}});
      ASSERT_TRUE(is_dist(weight) && weight.is_meta());
      const at::NoGradGuard no_grad;
      weight.set_data(torch::empty_like(weight, at::kCPU));
      ASSERT_TRUE(is_dist(weight));
      EXPECT_EQ(placements_of(weight), Placements({Shard{0}}));
      manual_seed(3);
      weight.uniform_();
      manual_seed(3);
      EXPECT_TRUE(
          full_tensor(weight).equal(torch::empty({4, 6}).uniform_(0, 1, default_generator())));
    });
  }
}

// An ordinary meta tensor does not take the data of one with memory.
TEST(DistMeta, LeavesOrdinaryMetaTensorsAlone) {
  run_world(1, [](World&) {
    distribute(on_test_device(torch::ones(2)), DeviceMesh::over_world(), {Shard{0}});
    at::Tensor meta = torch::empty({2}, at::kMeta);
    EXPECT_THROW(meta.set_data(torch::ones(2)), c10::Error);
    EXPECT_FALSE(torch::_has_compatible_shallow_copy_type(meta, torch::ones(2)));
    EXPECT_TRUE(torch::_has_compatible_shallow_copy_type(meta, meta + 1));
  });
}

}  // namespace tessera::dist_tensor_test
