// Operators of the family "view" on DistTensors, forward and backward, against ordinary tensors.

#include <gtest/gtest.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "support/error_of.h"
#include "support/expect_contains.h"
#include "support/operator_parity.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::testing::view_operators_test {

std::vector<OperatorCase> cases() {
  return {
      {"t", {{5, 4}}, [](const Tensors& x) { return x[0].t(); }},
      {"transpose", {{2, 5, 3}}, [](const Tensors& x) { return x[0].transpose(0, -1); }},
      {"permute",
       {{2, 5, 3}},
       [](const Tensors& x) {
         return x[0].permute({2, 0, 1});
       }},
      {"view merges",
       {{2, 5, 3}},
       [](const Tensors& x) {
         return x[0].view({10, 3});
       }},
      {"view splits",
       {{12, 5}},
       [](const Tensors& x) {
         return x[0].view({4, 3, 5});
       }},
      {"view splits the last",
       {{5, 12}},
       [](const Tensors& x) {
         return x[0].view({5, 6, 2});
       }},
      {"view_as_complex of a part without elements",
       {{2, 3, 3}, {1, 3}},
       [](const Tensors& x) {
         const auto squeezed = [](const at::Tensor& t) {
           return torch::view_as_real(torch::view_as_complex(torch::constant_pad_nd(t, {0, -1})));
         };
         return squeezed(x[0]).sum() + squeezed(x[1]).sum();
       }},
      {"tensor_split at indices of a tensor",
       {{6, 3}, {2}},
       [](const Tensors& x) {
         const auto parts = torch::tensor_split(x[0], (whole_numbers(x[1], 3) + 1).cpu(), 0);
         return parts[0].sum() + parts[1].sum() * 2 + parts[2].sum() * 3;
       }},
      {"view flattens", {{4, 3}}, [](const Tensors& x) { return x[0].view(-1); }},
      {"reshape of a transposed",
       {{4, 6}},
       [](const Tensors& x) {
         return x[0].t().reshape({3, 8});
       }},
      {"unsqueeze", {{5, 4}}, [](const Tensors& x) { return x[0].unsqueeze(1); }},
      {"squeeze", {{5, 1, 4}}, [](const Tensors& x) { return x[0].squeeze(1); }},
      {"squeeze of the last of two",
       {{1, 8, 1}},
       [](const Tensors& x) { return x[0].squeeze(-1); }},
      {"squeeze of the first of two",
       {{1, 8, 1}},
       [](const Tensors& x) { return x[0].squeeze(0); }},
      {"squeeze of a dim that stays", {{1, 8}}, [](const Tensors& x) { return x[0].squeeze(1); }},
      {"squeeze of some dims",
       {{1, 1, 8, 1}},
       [](const Tensors& x) {
         return x[0].squeeze(at::IntArrayRef{-1, 1, 2});
       }},
      {"squeeze of all dims", {{1, 8, 1}}, [](const Tensors& x) { return x[0].squeeze(); }},
      {"squeeze of no dims",
       {{1, 8, 1}},
       [](const Tensors& x) { return x[0].squeeze(at::IntArrayRef{}); }},
      // A rank may have one element of a dim that has more.
      {"squeeze of a dim of two", {{2, 3}}, [](const Tensors& x) { return x[0].squeeze(0); }},
      {"squeeze of all of two and three",
       {{2, 3}},
       [](const Tensors& x) { return x[0].squeeze(); }},
      {"heads for a batch of one",
       {{1, 2, 4, 1}},
       [](const Tensors& x) {
         return x[0].squeeze(-1).unsqueeze(2).expand({1, 2, 2, 4}).reshape({1, 4, 4});
       }},
      {"t of a scalar", {{}}, [](const Tensors& x) { return x[0].t(); }},
      {"view as another dtype",
       {{5, 4}},
       [](const Tensors& x) { return whole_numbers(x[0], 50).view(at::kDouble).view(at::kLong); },
       false},
      {"view as a shorter dtype",
       {{5, 4}},
       [](const Tensors& x) { return whole_numbers(x[0], 50).view(at::kInt); },
       false},
      {"view as a longer dtype",
       {{5, 4}},
       [](const Tensors& x) { return whole_numbers(x[0], 50).to(at::kInt).view(at::kLong); },
       false},
      {"reshape_alias",
       {{4, 6}},
       [](const Tensors& x) {
         return torch::_reshape_alias(x[0], {2, 2, 6}, {12, 6, 1});
       }},
      {"expand",
       {{5, 1}},
       [](const Tensors& x) {
         return x[0].expand({2, 5, 3});
       }},
      {"slice", {{5, 4}}, [](const Tensors& x) { return x[0].slice(0, 1, 4); }},
      {"select", {{5, 4}}, [](const Tensors& x) { return x[0].select(1, 2); }},
      {"split",
       {{5, 6}},
       [](const Tensors& x) {
         const auto p = x[0].split(2, 1);
         return p[0] * p[2] + p[1];
       }},
      {"chunk", {{6, 5}}, [](const Tensors& x) { return x[0].chunk(3, 0)[1]; }},
      {"unbind", {{3, 5}}, [](const Tensors& x) { return x[0].unbind(0)[1]; }},
      {"parts of no elements, of which there are none",
       {{0, 3}, {2}},
       [](const Tensors& x) {
         const auto parts = x[0].unbind(0).size() + x[0].split_with_sizes({}, 0).size();
         return x[0].unbind(1)[1].sum() + x[1] * static_cast<double>(1 + parts);
       }},
      {"cat",
       {{5, 4}, {5, 2}},
       [](const Tensors& x) {
         return torch::cat({x[0], x[1]}, 1);
       }},
      {"stack",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) {
         return torch::stack({x[0], x[1]}, 1);
       }},
      {"contiguous", {{5, 4}}, [](const Tensors& x) { return x[0].t().contiguous(); }},
      {"flip of a scalar", {{}}, [](const Tensors& x) { return x[0].flip(0); }},
      {"index_select",
       {{5, 4}, {3}},
       [](const Tensors& x) { return x[0].index_select(0, whole_numbers(x[1], 5)); }},
      {"index_select by a scalar",
       {{5, 4}, {}},
       [](const Tensors& x) { return x[0].index_select(1, whole_numbers(x[1], 4)); }},
      {"index_select of a scalar",
       {{}, {1}},
       [](const Tensors& x) { return x[0].index_select(0, whole_numbers(x[1], 1)); }},
      {"index_add",
       {{5, 4}, {3}, {3, 4}},
       [](const Tensors& x) { return x[0].index_add(0, whole_numbers(x[1], 5), x[2]); }},
      {"index_add along the last",
       {{4, 5}, {3}, {4, 3}},
       [](const Tensors& x) { return x[0].index_add(-1, whole_numbers(x[1], 5), x[2]); }},
      {"gather",
       {{5, 4}, {3, 4}},
       [](const Tensors& x) { return x[0].gather(0, whole_numbers(x[1], 5)); }},
      {"scatter",
       {{5, 4}, {5, 2}, {5, 2}},
       [](const Tensors& x) { return x[0].scatter_add(1, whole_numbers(x[1], 4), x[2]); }},
      {"scatter_reduce",
       {{5, 4}, {5, 2}},
       [](const Tensors& x) {
         return x[0].detach().scatter_reduce(1, whole_numbers(x[1], 4), x[1].detach(), "amax");
       },
       false},
      {"index",
       {{5, 4}, {3}},
       [](const Tensors& x) { return x[0].index({whole_numbers(x[1], 5)}); }},
      {"index of the last dim",
       {{2, 5, 4}, {3, 1}},
       [](const Tensors& x) {
         return x[0].index(
             {torch::indexing::Slice(), torch::indexing::Slice(), whole_numbers(x[1], 4)});
       }},
      {"index by two neighbors",
       {{2, 5, 4}, {3}, {2, 1}},
       [](const Tensors& x) {
         return x[0].index(
             {torch::indexing::Slice(), whole_numbers(x[1], 5), whole_numbers(x[2], 4)});
       }},
      {"index by two apart",
       {{2, 5, 4}, {3}, {3}},
       [](const Tensors& x) {
         return x[0].index(
             {whole_numbers(x[1], 2), torch::indexing::Slice(), whole_numbers(x[2], 4)});
       }},
      {"index by a mask",
       {{5, 4}, {5}},
       [](const Tensors& x) { return x[0].index({x[1].detach() > 0}); }},
      {"index_put",
       {{5, 4}, {2}, {2, 4}},
       [](const Tensors& x) {
         return x[0].index_put({whole_numbers(x[1], 5)}, x[2], /*accumulate=*/true);
       }},
      {"index_put of a number in place",
       {{5, 4}, {2}},
       [](const Tensors& x) {
         return (x[0] * 1).index_put_({torch::indexing::Slice(), whole_numbers(x[1], 4)}, 7);
       }},
      {"flip", {{5, 4}}, [](const Tensors& x) { return x[0].flip({0}); }},
      {"roll", {{5, 4}}, [](const Tensors& x) { return x[0].roll(2, 0); }},
      {"roll of all", {{5, 4}}, [](const Tensors& x) { return x[0].roll(3); }},
      {"tril, triu", {{2, 4, 5}}, [](const Tensors& x) { return x[0].tril() + x[0].triu(1) * 2; }},
      {"pad",
       {{2, 5, 4}},
       [](const Tensors& x) {
         return torch::constant_pad_nd(x[0], {1, 2, 0, 0, 0, 3}, 0.5);
       }},
      {"pad off",
       {{5, 4}},
       [](const Tensors& x) {
         return torch::constant_pad_nd(x[0], {0, 0, -1, -1});
       }},
      {"repeat",
       {{5, 1, 4}},
       [](const Tensors& x) {
         return x[0].repeat({2, 1, 3, 1});
       }},
      {"numbers under masks of rows",
       {{4, 3}, {4}},
       [](const Tensors& x) {
         const at::Tensor mask = x[1].detach() > 0;
         at::Tensor y = x[0] * 1;
         y.index_put_({mask}, 5);
         return y * x[0] + x[0].index_put({mask}, x[0].new_full({}, 2));
       }},
      {"a written row of a window",
       {{4, 3, 5}},
       [](const Tensors& x) {
         const at::Tensor y = (x[0] * 1).view({4, 15});
         y.select(1, 3).mul_(2);
         return y * x[0].view({4, 15});
       }},
  };
}

// Cases that send nothing if the first dim is cut.
std::vector<OperatorCase> quiet_cases() {
  const std::vector<std::vector<int64_t>> one = {{4, 3, 5}};
  const auto of = [&](const std::string& name, auto f) {
    return OperatorCase{name, one, [f](const Tensors& x) { return f(x[0]); }};
  };
  return {
      of("diagonal",
         [](const at::Tensor& x) {
           return x.diagonal(1, 1, 2) + torch::diagonal_copy(x, 1, 1, 2);
         }),
      of("diag_embed", [](const at::Tensor& x) { return torch::diag_embed(x, -1, 1, 3); }),
      {"diagonal_scatter",
       {{4, 3, 5}, {4, 3}},
       [](const Tensors& x) { return torch::diagonal_scatter(x[0], x[1], 0, 1, 2); }},
      {"select_scatter",
       {{4, 3, 5}, {4, 5}},
       [](const Tensors& x) { return torch::select_scatter(x[0], x[1], 1, 2); }},
      {"slice_scatter",
       {{4, 3, 5}, {4, 3, 2}},
       [](const Tensors& x) { return torch::slice_scatter(x[0], x[1], 2, 1, 5, 2); }},
      of("unfold", [](const at::Tensor& x) { return x.unfold(2, 3, 2) * 2; }),
      of("unsafe_split",
         [](const at::Tensor& x) {
           return torch::unsafe_split(x, 2, 2)[1] +
                  torch::unsafe_split_with_sizes(x, {1, 4}, 2)[0] +
                  torch::split_with_sizes_copy(x, {1, 4}, 2)[0];
         }),
      of("copies of views",
         [](const at::Tensor& x) {
           const at::Tensor flat = torch::view_copy(x, {4, 15});
           return flat.add_(1) +
                  torch::expand_copy(x.select(2, 0).unsqueeze(2), {4, 3, 5}).reshape({4, 15});
         }),
      of("a number under a mask",
         [](const at::Tensor& x) {
           at::Tensor y = x * 1;
           y.index_put_({x.detach() > 0}, 7);
           return y * x;
         }),
      of("a written slice",
         [](const at::Tensor& x) {
           const at::Tensor y = x * 1;
           y.slice(1, 1, 3).mul_(3);
           y.slice(2, 0, 5, 2).select(1, 0).add_(x.select(1, 1).slice(1, 1, 4));
           y.transpose(1, 2).slice(1, 0, 2).tanh_();
           return y * x;
         }),
  };
}

TEST(ViewOperators, ThatSendNothingOnTwoRanks) { expect_as_plain(quiet_cases(), {2}); }
TEST(ViewOperators, ThatSendNothingOnThreeRanks) { expect_as_plain(quiet_cases(), {3}); }
TEST(ViewOperators, SendNothingWhereOtherDimsAreCut) {
  std::vector<QuietCase> quiet;
  for (const OperatorCase& test : quiet_cases())
    quiet.push_back({test, Placements(test.sizes.size(), Shard{0})});
  expect_quiet(quiet);
}
// A batch of one lies on the first rank, and is shown as it is.
TEST(ViewOperators, OfOneElementAlongTheCutDimShareItsMemory) {
  for (const int ranks : {1, 2, 3}) {
    run_world(ranks, [](World&) {
      const auto mesh = DeviceMesh::over_world();
      const at::Tensor whole = torch::arange(8.).view({1, 2, 1, 2, 2});
      const std::vector<std::vector<int64_t>> all = {
          {1, 4, 2}, {1, 1, 8}, {1, 2, 1, 2, 2}, {1, 2, 1, 4}};
      for (const int64_t dim : {0, 2}) {
        for (const auto& sizes : all) {
          const at::Tensor x = distribute(on_test_device(whole.clone()), mesh, {Shard{dim}});
          const CommDebug debug;
          const at::Tensor y = x.view(sizes);
          if (dim == 0 || sizes.size() > 3) {
            EXPECT_EQ(debug.calls(), 0) << dim << sizes;
          }
          y.mul_(3);
          EXPECT_TRUE(full_tensor(x).equal(on_test_device(whole * 3))) << dim << sizes;
          EXPECT_TRUE(full_tensor(y).equal(on_test_device((whole * 3).view(sizes))));
        }
      }
    });
  }
}

TEST(ViewOperators, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(ViewOperators, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(ViewOperators, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(ViewOperatorsNightly, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

TEST(IndexedWrites, OfComplexNumbersByAMask) {
  const auto complex = [](const at::Tensor& real, const at::Tensor& imaginary) {
    return torch::complex(real, imaginary);
  };
  EXPECT_RULE(torch::view_as_real(
                  complex(x[0], x[0] * 2).index_put({x[0].detach() > 0}, complex(x[1], x[1] * 3))),
              {{5, 4}, {}});
  EXPECT_RULE(torch::view_as_real(
                  complex(x[0], x[0] * 2)
                      .index_put({on_test_device(torch::tensor({true, false, true, true, false}))},
                                 complex(x[1], x[1] * 3), /*accumulate=*/true)),
              {{5, 4}, {3, 4}});
}

// Autograd shows the gradient of a view that was written to so: the imaginary part of a conjugate
// is marked as a negative, and has gaps.
TEST(GatheredViews, OfNegativesHaveTheirStrides) {
  run_world(2, [](World&) {
    const at::Tensor real = on_test_device(torch::arange(24.0).view({3, 4, 2}));
    const at::Tensor plain = torch::complex(real, real + 1);
    const auto show = [](const at::Tensor& x) {
      return torch::imag(x.conj()).as_strided({24}, {2}, 1);
    };
    for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{2})})
      EXPECT_TRUE(full_tensor(show(distribute(plain, DeviceMesh({2}, {0, 1}), {placement})))
                      .equal(show(plain)))
          << to_string({placement});
  });
}

TEST(FourierTransforms, HaveTheStridesOfTheKernel) {
  using Show = std::function<at::Tensor(const at::Tensor&)>;
  std::vector<Show> shown;
  for (const Show& view :
       {Show([](const at::Tensor& x) { return x.unfold(1, 2, 1); }),
        Show([](const at::Tensor& x) { return x.unsqueeze(0).transpose(1, 2); })}) {
    for (const int64_t dim : {0, 1, 2, 3}) {
      shown.push_back(
          [=](const at::Tensor& x) { return torch::fft::fft(view(x), std::nullopt, dim); });
      shown.push_back(
          [=](const at::Tensor& x) { return torch::fft::rfft(view(x), std::nullopt, dim); });
      shown.push_back([=](const at::Tensor& x) {
        return torch::fft::ifft2(torch::complex(view(x), view(x)), {}, {dim, (dim + 2) % 4});
      });
    }
  }
  run_world(2, [&](World&) {
    const at::Tensor plain = on_test_device(torch::arange(18.0).view({2, 3, 3}));
    for (const Placement& placement :
         {Placement(Replicate{}), Placement(Shard{0}), Placement(Shard{2})}) {
      const at::Tensor x = distribute(plain, DeviceMesh({2}, {0, 1}), {placement});
      for (size_t i = 0; i < shown.size(); ++i) {
        EXPECT_EQ(shown[i](x).strides(), shown[i](plain).strides()) << to_string({placement}) << i;
        EXPECT_TRUE(full_tensor(shown[i](x)).allclose(shown[i](plain))) << i;
      }
    }
  });
}

TEST(GatheredViews, OfExpandedTensorsAreNotWrittenOnAnyRank) {
  run_world(3, [](World&) {
    const DeviceMesh mesh({2}, {0, 1});
    const at::Tensor plain = on_test_device(torch::arange(10.0).view({2, 5}));
    const at::Tensor wide = distribute(plain, mesh, {Shard{0}}).expand({2, -1, -1});
    const at::Tensor diagonal = wide.diagonal();
    expect_contains(error_of<c10::Error>([&] { diagonal.fill_(-1); }),
                    {"a view of an expanded DistTensor is a copy here", "single memory location"});
    if (mesh.is_member()) {
      EXPECT_TRUE(full_tensor(diagonal).equal(plain.expand({2, -1, -1}).diagonal()));
      EXPECT_TRUE(full_tensor(wide)[1].equal(plain));
    }
  });
}

}  // namespace tessera::testing::view_operators_test
