// Operators of the family "elementwise" on DistTensors, forward and backward, against ordinary
// tensors.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <variant>
#include <vector>

#include "support/operator_parity.h"
#include "support/run_world.h"

namespace tessera::testing::elementwise_operators_test {

std::vector<OperatorCase> cases() {
  return {
      {"add", {{5, 4}, {5, 4}}, [](const Tensors& x) { return x[0] + x[1]; }},
      {"add broadcasts", {{5, 4}, {4}}, [](const Tensors& x) { return x[0] + x[1]; }},
      {"add broadcasts ones", {{5, 1, 4}, {3, 1}}, [](const Tensors& x) { return x[0] + x[1]; }},
      {"add a number", {{5, 4}}, [](const Tensors& x) { return x[0] + 3; }},
      {"sub", {{5, 4}, {5, 4}}, [](const Tensors& x) { return x[0] - 2 * x[1]; }},
      {"mul", {{5, 4}, {5, 1}}, [](const Tensors& x) { return x[0] * x[1]; }},
      {"div", {{5, 4}, {4}}, [](const Tensors& x) { return x[0] / (x[1] * x[1] + 1); }},
      {"neg", {{3}}, [](const Tensors& x) { return -x[0]; }},
      // Its gradient is a tensor of zeros without memory.
      {"sgn", {{5, 4}}, [](const Tensors& x) { return torch::sgn(x[0]); }},
      {"sgn of a product",
       {{5, 4}, {4}},
       [](const Tensors& x) { return torch::sgn(x[0] * x[1]) + x[1]; }},
      {"relu", {{5, 4}}, [](const Tensors& x) { return torch::relu(x[0]); }},
      {"gelu", {{5, 4}}, [](const Tensors& x) { return torch::gelu(x[0]); }},
      {"silu", {{5, 4}}, [](const Tensors& x) { return torch::silu(x[0]); }},
      {"tanh", {{5, 4}}, [](const Tensors& x) { return torch::tanh(x[0]); }},
      {"sigmoid", {{5, 4}}, [](const Tensors& x) { return torch::sigmoid(x[0]); }},
      {"exp, sqrt", {{5, 4}}, [](const Tensors& x) { return torch::exp(x[0]).sqrt(); }},
      {"pow", {{5, 4}}, [](const Tensors& x) { return x[0].pow(3); }},
      {"where", {{5, 4}, {4}}, [](const Tensors& x) { return torch::where(x[0] > 0, x[0], x[1]); }},
      {"maximum", {{5, 4}, {5, 4}}, [](const Tensors& x) { return torch::maximum(x[0], x[1]); }},
      {"clamp", {{5, 4}}, [](const Tensors& x) { return x[0].clamp(-0.5, 0.5); }},
      {"clone, to", {{5, 4}}, [](const Tensors& x) { return x[0].clone().to(at::kDouble); }},
      {"in place", {{5, 4}, {4}}, [](const Tensors& x) { return (x[0] * 1).add_(x[1]).mul_(2); }},
      {"in place by another",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return (x[0] * 1).mul_(x[1]).div_(x[1].square() + 1).sub_(x[1]); }},
      {"div with a rounded quotient",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::div(x[0] * 3, x[1].abs() + 1, "trunc"); },
       false},
      {"div by a number, rounded down",
       {{5, 4}},
       [](const Tensors& x) { return torch::div(x[0] * 3, 2, "floor"); },
       false},
      {"div in place, rounded",
       {{5, 4}},
       [](const Tensors& x) { return (x[0] * 3).div_(0.5, "trunc"); },
       false},
      {"to whole numbers", {{5, 4}}, [](const Tensors& x) { return x[0].to(at::kLong); }, false},
      {"to flags", {{5, 4}}, [](const Tensors& x) { return (x[0] - x[0]).to(at::kBool); }, false},
      {"copy_ to whole numbers",
       {{5, 4}},
       [](const Tensors& x) { return torch::zeros_like(x[0], at::kLong).copy_(x[0] * 3); },
       false},
      {"whole numbers",
       {{5, 4}, {4}},
       [](const Tensors& x) {
         const at::Tensor a = x[0].to(at::kLong) * 5 + 3, b = x[1].to(at::kLong);
         return (a.neg() * b - a).add_(b).floor_divide_(2).remainder(3) + a.bitwise_xor(b);
       },
       false},
      {"where with a number",
       {{5, 4}},
       [](const Tensors& x) { return torch::where(x[0] > 0, x[0], 1.5); }},
      {"where chooses from pending sums",
       {{5, 4}, {5, 1}},
       [](const Tensors& x) { return torch::where(x[0].detach() > 0, x[1] * 2, x[1]); }},
      {"masked_fill",
       {{5, 4}},
       [](const Tensors& x) { return x[0].masked_fill(x[0].detach() > 0, 2); }},
      {"masked_fill by scalars",
       {{5, 4}, {}, {}},
       [](const Tensors& x) { return x[0].masked_fill(x[1].detach() > 0, x[2]); }},
      {"a number minus", {{5, 4}}, [](const Tensors& x) { return 2 - x[0]; }},
      {"a multiple of another",
       {{5, 4}, {4}},
       [](const Tensors& x) { return torch::add(x[0], x[1], 3); }},
      {"addcmul, addcdiv",
       {{5, 4}, {4}, {5, 1}},
       [](const Tensors& x) { return x[0].addcmul(x[1], x[2], 2).addcdiv(x[1], x[2].abs() + 1); }},
      {"lerp", {{5, 4}, {5, 4}}, [](const Tensors& x) { return x[0].lerp(x[1], 0.3); }},
      {"logs",
       {{5, 4}},
       [](const Tensors& x) {
         const at::Tensor y = x[0].abs() + 0.5;
         return y.log() + y.log2() + y.log10() + y.log1p() + y.expm1() + y.exp2();
       }},
      {"angles",
       {{5, 4}},
       [](const Tensors& x) {
         const at::Tensor y = torch::tanh(x[0]) * 0.9;
         return y.sin() + y.cos() + y.tan() + y.asin() + y.acos() + y.atan() + y.sinh() + y.cosh() +
                y.asinh() + y.atanh() + (y + 2.5).acosh();
       }},
      {"atan2, hypot",
       {{5, 4}, {4}},
       [](const Tensors& x) { return torch::atan2(x[0], x[1]) + torch::hypot(x[0], x[1]); }},
      {"activations",
       {{5, 4}},
       [](const Tensors& x) {
         return torch::mish(x[0]) + torch::hardswish(x[0]) + torch::hardsigmoid(x[0]) +
                torch::log_sigmoid(x[0]) + torch::celu(x[0]) + torch::selu(x[0]) +
                torch::elu(x[0]) + torch::softplus(x[0]) + torch::leaky_relu(x[0]) +
                torch::hardtanh(x[0]) + torch::threshold(x[0], 0.1, 2);
       }},
      {"shrinking",
       {{5, 4}},
       [](const Tensors& x) { return torch::hardshrink(x[0], 0.3) + torch::softshrink(x[0]); }},
      {"prelu", {{5, 4}, {4}}, [](const Tensors& x) { return torch::prelu(x[0], x[1]); }},
      {"square, rsqrt, reciprocal",
       {{5, 4}},
       [](const Tensors& x) {
         const at::Tensor y = x[0].square() + 1;
         return y.rsqrt() + y.reciprocal();
       }},
      {"erf", {{5, 4}}, [](const Tensors& x) { return x[0].erf() + x[0].erfc(); }},
      {"sigmoid, logit",
       {{5, 4}},
       [](const Tensors& x) { return torch::logit(torch::sigmoid(x[0]) * 0.9 + 0.05); }},
      {"logaddexp, xlogy",
       {{5, 4}, {4}},
       [](const Tensors& x) {
         return torch::logaddexp(x[0], x[1]) + torch::xlogy(x[0], x[1].abs() + 1);
       }},
      {"fmax, copysign",
       {{5, 4}, {4}},
       [](const Tensors& x) { return torch::fmax(x[0], x[1]) + torch::copysign(x[1], x[0]); }},
      {"remainder, fmod",
       {{5, 4}, {4}},
       [](const Tensors& x) { return x[0].remainder(1.5) + x[0].fmod(x[1].abs() + 0.5); }},
      {"rounding",
       {{5, 4}},
       [](const Tensors& x) {
         const at::Tensor y = x[0] * 4;
         return y.floor() + y.ceil() + y.round() + y.trunc() + y.frac() + y.sign() + y.sgn();
       }},
      {"flags",
       {{5, 4}, {4}},
       [](const Tensors& x) {
         const at::Tensor a = x[0] > 0, b = (1 / (x[1] - x[1])).isinf();
         return a.logical_xor(x[1]).logical_and_(b.logical_not()) | x[0].isfinite() |
                x[0].signbit();
       },
       false},
      {"nan_to_num",
       {{5, 4}},
       [](const Tensors& x) { return torch::nan_to_num(torch::sqrt(x[0].detach()), 3); },
       false},
      {"in-place forms",
       {{5, 4}},
       [](const Tensors& x) {
         const at::Tensor y = x[0].square() + 1;
         y.rsqrt_().reciprocal_().log1p_().sinh_().atan_().tanh_().abs_().clamp_(0.1, 2).floor_();
         return y.pow_(2).sub_(x[0]).div_(2).neg_().lt_(0.5);
       },
       false},
      {"special functions",
       {{5, 4}},
       [](const Tensors& x) {
         const at::Tensor p = x[0].abs() + 1;
         return torch::digamma(p) + torch::i0(x[0]) + torch::special_i0e(x[0]) +
                torch::special_i1(x[0]) + torch::special_entr(p) + torch::special_erfcx(x[0]) +
                torch::special_log_ndtr(x[0]) + torch::polygamma(1, p) + torch::mvlgamma(p + 1, 2) +
                torch::special_xlog1py(x[0], p) + torch::deg2rad(x[0]) + torch::rad2deg(x[0]);
       }},
      {"special functions without gradients",
       {{5, 4}, {4}},
       [](const Tensors& x) {
         const at::Tensor p = x[0].abs() + 1, q = x[1].abs() + 1;
         return torch::igamma(p, q) + torch::igammac(p, q) + torch::special_bessel_j0(p) +
                torch::special_zeta(p + 1, q) + torch::special_hermite_polynomial_h(x[0], 3) +
                torch::nextafter(p, q) + torch::ldexp(x[0], torch::ones_like(x[1])) +
                std::get<0>(torch::frexp(x[0])) + torch::heaviside(x[0], x[1]);
       },
       false},
      {"whole numbers by bits",
       {{5, 4}, {4}},
       [](const Tensors& x) {
         const at::Tensor a = whole_numbers(x[0], 50) + 1, b = whole_numbers(x[1], 3) + 1;
         return torch::gcd(a, b) + torch::lcm(a, b) + torch::bitwise_left_shift(a, b) +
                torch::bitwise_right_shift(a, b) + torch::__lshift__(a, 2);
       },
       false},
      {"rrelu in evaluation",
       {{5, 4}},
       [](const Tensors& x) { return torch::rrelu(x[0], 0.1, 0.3, /*training=*/false); }},
  };
}

TEST(ElementwiseOperators, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(ElementwiseOperators, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(ElementwiseOperators, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(ElementwiseOperatorsNightly, OnASquare) {
  expect_as_plain(cases(), {2, 2}, Combinations::kAll);
}

// Averages whose terms are whole numbers, or are changed in place.
TEST(PendingAverages, StayPendingUnderOperatorsThatTheyGoThrough) {
  run_world(3, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const auto rank = static_cast<double>(world.rank());
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      at::Tensor y = from_local(on_test_device(torch::full({2, 2}, rank, dtype)), mesh,
                                {Partial{PartialOp::kAvg}});
      y.add_(3).mul_(2).sub_(on_test_device(torch::ones({2}, dtype))).neg_().div_(3);
      EXPECT_EQ(placements_of(y)[0], Placement(Partial{PartialOp::kAvg}));
      EXPECT_TRUE(
          torch::allclose(full_tensor(y), on_test_device(torch::full({2, 2}, -7. / 3, dtype))));
      y.square_();
      EXPECT_TRUE(
          torch::allclose(full_tensor(y), on_test_device(torch::full({2, 2}, 49. / 9, dtype))));
    }
    const at::Tensor whole = from_local(on_test_device(torch::full({2}, world.rank(), at::kLong)),
                                        mesh, {Partial{PartialOp::kAvg}});
    EXPECT_TRUE(torch::allclose(full_tensor(whole / 2), on_test_device(torch::full({2}, 0.5))));
    EXPECT_TRUE(torch::allclose(full_tensor(whole * 0.5), on_test_device(torch::full({2}, 0.5))));
  });
}

TEST(PendingExtrema, StayPendingUnderTheSameExtremum) {
  run_world(3, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const auto rank = static_cast<float>(world.rank());
    for (const PartialOp op : {PartialOp::kMax, PartialOp::kMin}) {
      const auto extremum = op == PartialOp::kMax ? &at::maximum : &at::minimum;
      const auto terms = [&](std::vector<float> values) {
        return from_local(on_test_device(torch::tensor(values)), mesh, {Partial{op}});
      };
      const at::Tensor x = terms({rank, -rank, 1}), y = terms({-rank, 5 * rank, rank});
      const at::Tensor result = extremum(x, y);
      EXPECT_EQ(placements_of(result)[0], Placement(Partial{op}));
      EXPECT_TRUE(full_tensor(result).equal(extremum(full_tensor(x), full_tensor(y))));
      const at::Tensor other = op == PartialOp::kMax ? torch::minimum(x, y) : torch::maximum(x, y);
      EXPECT_FALSE(std::holds_alternative<Partial>(placements_of(other)[0]));
    }
  });
}

TEST(PendingSums, OfWholeNumbersAreDoneBeforeTheyAreRounded) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    at::Tensor x = from_local(on_test_device(torch::full({2}, 3, at::kLong)), mesh, {Partial{}});
    EXPECT_EQ(full_tensor(x.floor_divide(4))[0].item<int64_t>(), 1);
    EXPECT_EQ(full_tensor(x.bitwise_and(3))[0].item<int64_t>(), 2);
    x.remainder_(4);
    EXPECT_EQ(full_tensor(x)[0].item<int64_t>(), 2);
    const at::Tensor halves = from_local(on_test_device(torch::full({2}, 0.5)), mesh, {Partial{}});
    EXPECT_EQ(full_tensor(halves.to(at::kLong))[0].item<int64_t>(), 1);
    at::Tensor into = distribute(on_test_device(torch::zeros({2}, at::kLong)), mesh, {Partial{}});
    into.copy_(halves);
    EXPECT_EQ(full_tensor(into)[0].item<int64_t>(), 1);
  });
}

TEST(PendingSums, AreDoneBeforeTheyAreRoundedToAShorterType) {
  run_world(2, [](World& world) {
    const auto mesh = DeviceMesh::over_world();
    const double term = world.rank() == 0 ? 1000.125 : -1000.0;
    const at::Tensor x = from_local(on_test_device(torch::full({2}, term)), mesh, {Partial{}});
    EXPECT_EQ(full_tensor(x.to(at::kBFloat16))[0].item<float>(), 0.125F);
    for (const Placement& where : {Placement(Replicate{}), Placement(Partial{})}) {
      const at::Tensor into =
          distribute(on_test_device(torch::zeros({2}, at::kBFloat16)), mesh, {where});
      EXPECT_EQ(full_tensor(into.copy_(x))[0].item<float>(), 0.125F);
    }
  });
}

}  // namespace tessera::testing::elementwise_operators_test
