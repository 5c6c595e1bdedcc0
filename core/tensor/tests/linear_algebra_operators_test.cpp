// Functions of matrices, of which ranks have different ones, Fourier transforms, complex numbers.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/operator_parity.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::testing::linear_algebra_operators_test {

// Symmetric, with eigenvalues above 1 that differ.
at::Tensor definite(const at::Tensor& x) {
  const at::Tensor eye =
      torch::diag_embed(torch::arange(1, x.size(-1) + 1, x.options().requires_grad(false)));
  return x.matmul(x.transpose(-1, -2)) * 0.1 + eye;
}

at::Tensor as_real(const at::Tensor& complex) { return torch::view_as_real(complex); }

// Cases that send nothing if the first dim of each input is cut.
std::vector<OperatorCase> cases() {
  const std::vector<std::vector<int64_t>> matrices = {{4, 3, 3}};
  const std::vector<std::vector<int64_t>> equations = {{4, 3, 3}, {4, 3, 2}};
  const auto of = [&](const std::string& name, auto f, bool differentiable = true) {
    return OperatorCase{name, matrices, [f](const Tensors& x) { return f(x[0]); }, differentiable};
  };
  return {
      of("det", [](const at::Tensor& x) { return torch::linalg_det(definite(x)); }),
      // Transposed matrices are not contiguous, parts of them that other ranks sent may be.
      of("det of transposed matrices",
         [](const at::Tensor& x) { return torch::linalg_det(x.transpose(1, 2) * 1 + 1); }),
      of("det of every second column",
         [](const at::Tensor& x) {
           return torch::linalg_det(torch::cat({x, x + 1}, 2).slice(2, 0, 6, 2));
         }),
      of("slogdet of transposed matrices",
         [](const at::Tensor& x) {
           return std::get<1>(torch::linalg_slogdet(x.transpose(1, 2) * 0.2 + definite(x)));
         }),
      of("slogdet",
         [](const at::Tensor& x) { return std::get<1>(torch::linalg_slogdet(definite(x))); }),
      of("cholesky",
         [](const at::Tensor& x) {
           return torch::cholesky(definite(x)) +
                  std::get<0>(torch::linalg_cholesky_ex(definite(x)));
         }),
      of("cholesky_inverse",
         [](const at::Tensor& x) {
           return torch::cholesky_inverse(torch::linalg_cholesky(definite(x)));
         }),
      of("eigh",
         [](const at::Tensor& x) {
           const auto [values, vectors] = torch::linalg_eigh(definite(x));
           return values + vectors.square().sum(-1);
         }),
      of("svd", [](const at::Tensor& x) { return std::get<1>(torch::linalg_svd(definite(x))); }),
      of("singular values alone",
         [](const at::Tensor& x) { return torch::linalg_svdvals(definite(x)); }),
      of("qr",
         [](const at::Tensor& x) {
           const auto [q, r] = torch::linalg_qr(definite(x));
           return q.matmul(r);
         }),
      of("inverse", [](const at::Tensor& x) { return torch::linalg_inv(definite(x)); }),
      of("pinv", [](const at::Tensor& x) { return torch::linalg_pinv(definite(x)); }),
      of("matrix_exp", [](const at::Tensor& x) { return torch::linalg_matrix_exp(x * 0.2); }),
      of("lu",
         [](const at::Tensor& x) {
           const auto [p, l, u] = torch::linalg_lu(definite(x));
           return p.matmul(l).matmul(u);
         }),
      of("lu by parts",
         [](const at::Tensor& x) {
           const auto [packed, pivots] = torch::linalg_lu_factor(definite(x));
           const auto [p, l, u] = torch::lu_unpack(packed, pivots);
           return l.matmul(u) + torch::linalg_lu_solve(packed, pivots, x);
         }),
      of("eigenvalues",
         [](const at::Tensor& x) {
           return torch::view_as_real(std::get<0>(torch::linalg_eig(definite(x))))
               .select(-1, 0)
               .sum(-1);
         }),
      of(
          "ldl",
          [](const at::Tensor& x) {
            const auto [packed, pivots] = torch::linalg_ldl_factor(definite(x));
            return torch::linalg_ldl_solve(packed, pivots, x);
          },
          /*differentiable=*/false),
      of(
          "geqrf",
          [](const at::Tensor& x) {
            const auto [a, tau] = torch::geqrf(definite(x));
            return torch::linalg_householder_product(a, tau) + torch::ormqr(a, tau, x);
          },
          /*differentiable=*/false),
      {"solve", equations,
       [](const Tensors& x) { return torch::linalg_solve(definite(x[0]), x[1]); }},
      {"solve_triangular", equations,
       [](const Tensors& x) {
         const at::Tensor a = definite(x[0]).tril();
         return torch::linalg_solve_triangular(a, x[1], /*upper=*/false) +
                std::get<0>(torch::triangular_solve(x[1], a, /*upper=*/false));
       }},
      {"cholesky_solve", equations,
       [](const Tensors& x) {
         return torch::cholesky_solve(x[1], torch::linalg_cholesky(definite(x[0])));
       }},
      {"cross", {{4, 3}, {4, 3}}, [](const Tensors& x) { return torch::linalg_cross(x[0], x[1]); }},
      {"Fourier transforms of real numbers",
       {{4, 6}},
       [](const Tensors& x) {
         return torch::fft_irfft(torch::fft_rfft(x[0]) * 2, 6) + torch::fft_fft(x[0]).abs();
       }},
      {"Fourier transforms of planes",
       {{4, 3, 5}},
       [](const Tensors& x) { return as_real(torch::fft_ifft2(torch::fft_fft2(x[0]))).sum(-1); }},
      {"complex numbers by parts",
       {{4, 3, 2}},
       [](const Tensors& x) {
         const at::Tensor z = torch::view_as_complex(x[0] * 1);
         return as_real(z * torch::polar(x[0].select(-1, 0), x[0].select(-1, 1)) + z.conj() * 2);
       }},
      {"rotary embedding",
       {{2, 4, 6}},
       [](const Tensors& x) {
         const at::Tensor angles =
             torch::outer(torch::arange(4), torch::arange(3) * 0.1).to(x[0].device());
         const at::Tensor turn = torch::polar(torch::ones_like(angles), angles);
         const at::Tensor z = torch::view_as_complex(x[0].reshape({2, 4, 3, 2}));
         return torch::view_as_real(z * turn).flatten(2);
       }},
      {"complex, angle, conj_physical",
       {{4, 3}, {4, 3}},
       [](const Tensors& x) {
         const at::Tensor z = torch::complex(x[0], x[1]);
         return torch::angle(z) + torch::abs(z) + as_real(torch::conj_physical(z)).sum(-1);
       }},
  };
}

TEST(LinearAlgebra, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(LinearAlgebra, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(LinearAlgebraNightly, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

// But for the numbers that say whether matrices could be factorized: all ranks throw if one can't.
TEST(LinearAlgebra, OfACutBatchSendsNoElements) {
  constexpr int64_t kChecks = 3, kBytes = 4 * sizeof(int32_t);
  std::vector<QuietCase> quiet;
  for (const OperatorCase& test : cases()) {
    if (test.name == "matrix_exp")
      continue;  // its backward writes into a tensor that all ranks have
    quiet.push_back(
        {test, Placements(test.sizes.size(), Shard{0}), kChecks, kChecks, kChecks * kBytes});
  }
  expect_quiet(quiet);
}

TEST(LinearAlgebra, ReflectionsHaveGradients) {
  EXPECT_RULE(torch::linalg_householder_product(x[0] * 0.3, x[1]), {{3, 4, 2}, {3, 2}},
              {{5, 3}, {3}});
  EXPECT_RULE(torch::ormqr(x[0] * 0.3, x[1], x[2]), {{5, 3}, {3}, {5, 2}});
  EXPECT_RULE(torch::ormqr(x[0].detach() * 0.3, x[1].detach(), x[2], /*left=*/false, true),
              {{4, 3}, {3}, {2, 4}});
}

TEST(LinearAlgebra, AMatrixThatCantBeFactorizedIsAnErrorOnAllRanks) {
  run_world(2, [](World&) {
    at::Tensor plain = torch::eye(3).repeat({4, 1, 1});
    plain[3][2][2] = -1;
    const at::Tensor x = distribute(on_test_device(plain), DeviceMesh::over_world(), {Shard{0}});
    EXPECT_THROW(torch::linalg_cholesky(x), c10::Error);
  });
}

}  // namespace tessera::testing::linear_algebra_operators_test
