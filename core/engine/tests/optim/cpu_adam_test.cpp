// CPUAdam on ordinary tensors: LibTorch's numbers in one pass, and the same bits however it is cut.
#include <gtest/gtest.h>

#include <limits>
#include <sstream>

#include "engine/optim/cpu_adam_step.h"
#include "engine/optim/param_state.h"
#include "support/models.h"

namespace tessera::testing::cpu_adam_test {

using torch::Tensor;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

std::vector<CPUAdamOptions> all_modes() {
  std::vector<CPUAdamOptions> modes;
  for (const bool adamw_mode : {true, false}) {
    for (const double decay : {0.0, 0.1})
      modes.push_back(CPUAdamOptions(1e-2).adamw_mode(adamw_mode).weight_decay(decay));
  }
  modes.push_back(CPUAdamOptions(3e-2).betas({0.8, 0.95}).eps(1e-4).weight_decay(0.2));
  return modes;
}

Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return seeded(seed, [&] { return torch::randn(sizes, default_generator()); });
}

std::unique_ptr<torch::optim::Optimizer> libtorch_like(const CPUAdamOptions& options,
                                                       std::vector<Tensor> params) {
  const auto fill = [&](auto own) {
    own.betas(options.betas()).eps(options.eps()).weight_decay(options.weight_decay());
    return own;
  };
  if (options.adamw_mode())
    return std::make_unique<torch::optim::AdamW>(params,
                                                 fill(torch::optim::AdamWOptions(options.lr())));
  return std::make_unique<torch::optim::Adam>(params,
                                              fill(torch::optim::AdamOptions(options.lr())));
}

TEST(CPUAdam, StepsAsLibTorchInEveryMode) {
  for (const CPUAdamOptions& mode : all_modes()) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-12;
      Tensor own = random({37, 19}, 1).to(dtype), other = own.clone();
      CPUAdam adam({own}, mode);
      const auto expected = libtorch_like(mode, {other});
      for (int step = 0; step < 5; ++step) {
        own.mutable_grad() = random({37, 19}, 10 + step).to(dtype);
        other.mutable_grad() = own.grad().clone();
        adam.step();
        expected->step();
        EXPECT_TRUE(torch::allclose(own, other, tolerance, tolerance)) << "step " << step;
      }
      const ParamState state = read_param_state(adam, own);
      const ParamState wanted = read_param_state(*expected, other);
      EXPECT_EQ(state.counts, wanted.counts);
      for (const auto& [name, tensor] : wanted.tensors)
        EXPECT_TRUE(torch::allclose(state.tensors.at(name), tensor, tolerance, tolerance)) << name;
    }
  }
}

TEST(CPUAdam, WithoutBiasCorrectionTheMomentsAreTakenAsTheyAre) {
  for (const bool adamw_mode : {true, false}) {
    Tensor param = random({50}, 1).to(at::kDouble), grad = random({50}, 2).to(at::kDouble);
    const Tensor start = param.clone();
    CPUAdam adam(
        {param},
        CPUAdamOptions(0.1).bias_correction(false).adamw_mode(adamw_mode).weight_decay(0.2));
    param.mutable_grad() = grad;
    adam.step();
    const Tensor slope = adamw_mode ? grad : grad + 0.2 * start;
    const Tensor first = 0.1 * slope, second = 0.001 * slope * slope;
    const Tensor expected =
        start * (adamw_mode ? 1 - 0.1 * 0.2 : 1) - 0.1 * first / (second.sqrt() + 1e-8);
    EXPECT_TRUE(torch::allclose(param, expected, 1e-12, 1e-12));
  }
}

// Half and bfloat16 parameters get the values of a step in float, rounded once.
TEST(CPUAdam, NarrowParametersHaveFloatStateAndAreRoundedOnce) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool float_grads : {false, true}) {
      for (const CPUAdamOptions& mode : all_modes()) {
        Tensor narrow = random({1000}, 1).to(dtype);
        CPUAdam adam({narrow}, mode);
        Tensor wide = narrow.to(at::kFloat);
        CPUAdam reference({wide}, mode);
        for (int step = 0; step < 4; ++step) {
          const Tensor grad = random({1000}, 10 + step).to(dtype);
          // LibTorch checks the dtype of a gradient where it is set, not in the tensor's meta data.
          narrow.mutable_grad() = float_grads ? grad.to(at::kFloat) : grad;
          wide.copy_(narrow);
          wide.mutable_grad() = grad.to(at::kFloat);
          adam.step();
          reference.step();
          EXPECT_TRUE(torch::equal(narrow, wide.to(dtype)));
        }
        for (const auto& [name, tensor] : read_param_state(adam, narrow).tensors) {
          EXPECT_EQ(tensor.scalar_type(), at::kFloat);
          EXPECT_TRUE(torch::equal(tensor, read_param_state(reference, wide).tensors.at(name)));
        }
      }
    }
  }
}

// A narrow gradient is used as its float values: nothing else changes.
TEST(CPUAdam, GradientsMayBeNarrowerThanTheirParameter) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const CPUAdamOptions& mode : all_modes()) {
      Tensor own = random({1000}, 1), reference = own.clone();
      CPUAdam adam({own}, mode), expected({reference}, mode);
      for (int step = 0; step < 4; ++step) {
        const Tensor grad = random({1000}, 10 + step).to(dtype);
        own.mutable_grad() = grad;
        reference.mutable_grad() = grad.to(at::kFloat);
        adam.step();
        expected.step();
        EXPECT_TRUE(torch::equal(own, reference)) << dtype << ", step " << step;
      }
      for (const auto& [name, tensor] : read_param_state(adam, own).tensors) {
        EXPECT_EQ(tensor.scalar_type(), at::kFloat);
        EXPECT_TRUE(torch::equal(tensor, read_param_state(expected, reference).tensors.at(name)));
      }
    }
  }
}

// Every value of 16 bits, and every rounding: a step of size `lr` against the gradient's sign.
TEST(CPUAdam, ConvertsAsLibTorch) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const Tensor all = on_test_device(torch::arange(-32768, 32768).to(at::kShort).view(dtype));
    for (const double lr : {0.0, 1e-8, 3e-5, 0.123, 31.7, 70000.0, 1e30}) {
      Tensor param = all.clone();
      CPUAdam adam({param}, CPUAdamOptions(lr).betas({0, 0}).eps(0).bias_correction(false));
      param.mutable_grad() = torch::ones({65536}, test_device());
      adam.step();
      const Tensor expected =
          (all.to(at::kFloat) - torch::full({65536}, lr, all.options().dtype(at::kFloat)))
              .to(dtype);
      EXPECT_TRUE(torch::equal(param.isnan(), expected.isnan())) << dtype << ", lr " << lr;
      EXPECT_TRUE(torch::equal(param.nan_to_num(7), expected.nan_to_num(7)))
          << dtype << ", lr " << lr;
    }
  }
}

struct Moments {
  Tensor param, exp_avg, exp_avg_sq;
};

// Steps pieces of one long tensor as parameters of their own.
Moments step_pieces(at::ScalarType dtype, const std::vector<int64_t>& cuts) {
  const Tensor whole = random({cuts.back()}, 1).to(dtype);
  const Tensor first = random({cuts.back()}, 2).to(dtype);
  const Tensor second = random({cuts.back()}, 3).to(dtype);
  std::vector<Tensor> pieces;
  for (size_t i = 0; i + 1 < cuts.size(); ++i)
    pieces.push_back(whole.slice(0, cuts[i], cuts[i + 1]));
  CPUAdam adam(pieces, CPUAdamOptions(1e-2).weight_decay(0.1));
  for (const Tensor& grad : {first, second}) {
    for (size_t i = 0; i < pieces.size(); ++i)
      pieces[i].mutable_grad() = grad.slice(0, cuts[i], cuts[i + 1]);
    adam.step();
  }
  std::vector<Tensor> exp_avgs, exp_avg_sqs;
  for (const Tensor& piece : pieces) {
    const ParamState state = read_param_state(adam, piece);
    exp_avgs.push_back(state.tensors.at("exp_avg"));
    exp_avg_sqs.push_back(state.tensors.at("exp_avg_sq"));
  }
  return {whole, torch::cat(exp_avgs), torch::cat(exp_avg_sqs)};
}

void expect_equal(const Moments& actual, const Moments& expected, const std::string& what) {
  EXPECT_TRUE(torch::equal(actual.param, expected.param)) << what;
  EXPECT_TRUE(torch::equal(actual.exp_avg, expected.exp_avg)) << what;
  EXPECT_TRUE(torch::equal(actual.exp_avg_sq, expected.exp_avg_sq)) << what;
}

TEST(CPUAdam, TheWayATensorIsCutChangesNoBit) {
  TESSERA_ON_HOST_ONLY("the bits of the kernel of the host");
  for (const at::ScalarType dtype : kDtypes) {
    const Moments whole = step_pieces(dtype, {0, 1003});
    std::vector<int64_t> singles;
    for (int64_t i = 0; i <= 1003; ++i) singles.push_back(i);
    const std::vector<std::vector<int64_t>> ways = {
        {0, 1003}, {0, 1, 1003}, {0, 500, 1003}, {0, 333, 700, 1003}, {0, 255, 511, 768, 1003},
        singles};
    for (const auto& cuts : ways)
      expect_equal(step_pieces(dtype, cuts), whole, c10::str(dtype, ", ", cuts.size() - 1));
  }
}

TEST(CPUAdam, TheNumberOfThreadsChangesNoBit) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer does not see how OpenMP's threads wait for each other";
#endif
  TESSERA_ON_HOST_ONLY("the bits of the kernel of the host");
  const int before = at::get_num_threads();
  for (const at::ScalarType dtype : kDtypes) {
    at::set_num_threads(1);
    const Moments one = step_pieces(dtype, {0, 300001});
    for (const int threads : {2, 3}) {
      at::set_num_threads(threads);
      expect_equal(step_pieces(dtype, {0, 300001}), one, c10::str(dtype, ", ", threads));
    }
  }
  at::set_num_threads(before);
}

// Tensors with gaps, in other orders and with gradients of other strides have the same bits.
TEST(CPUAdam, StridesChangeNoBit) {
  const Tensor start = random({12, 7, 9}, 1), grad = random({12, 7, 9}, 2);
  Tensor dense = start.clone();
  Tensor transposed = start.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
  Tensor gaps = torch::zeros({12, 7, 18}, test_device()).slice(2, 0, 18, 2).copy_(start);
  Tensor scalar = start.select(0, 3).select(0, 2).select(0, 1).clone();
  CPUAdam adam({dense, transposed, gaps, scalar}, CPUAdamOptions(1e-2));
  for (int step = 0; step < 2; ++step) {
    dense.mutable_grad() = grad;
    transposed.mutable_grad() = grad;
    gaps.mutable_grad() = grad.transpose(0, 2).contiguous().transpose(0, 2);
    scalar.mutable_grad() = grad.select(0, 3).select(0, 2).select(0, 1);
    adam.step();
  }
  EXPECT_TRUE(torch::equal(transposed, dense));
  EXPECT_TRUE(torch::equal(gaps, dense));
  EXPECT_EQ(scalar.item<float>(), dense[3][2][1].item<float>());
}

TEST(CPUAdam, ValuesThatAreAlsoWrittenRoundedAreTheParametersOwn) {
  TESSERA_ON_HOST_ONLY("a call of the kernel of the host");
  const auto options = CPUAdamOptions(1e-2).betas({0.9, 0.99}).weight_decay(0.1);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const auto make = [] {
      return AdamParam{random({999}, 1), random({999}, 2), random({999}, 3), random({999}, 4).abs(),
                       3};
    };
    AdamParam plain = make(), rounding = make();
    // Also with gaps.
    for (const int64_t stride : {1, 2}) {
      rounding.rounded = torch::zeros({999 * stride}, dtype).slice(0, 0, 999 * stride, stride);
      step_on_host(options, plain);
      step_on_host(options, rounding);
      EXPECT_TRUE(torch::equal(rounding.param, plain.param));
      EXPECT_TRUE(torch::equal(rounding.rounded, plain.param.to(dtype)));
    }
  }
}

// The step for parameters on other devices; it works on any device.
TEST(CPUAdam, LibTorchsOperatorsGiveTheSameToRounding) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const bool adamw_mode : {true, false}) {
      for (const bool corrects : {true, false}) {
        const auto options = CPUAdamOptions(1e-2)
                                 .betas({0.9, 0.99})
                                 .weight_decay(0.1)
                                 .bias_correction(corrects)
                                 .adamw_mode(adamw_mode);
        const auto make = [&] {
          return AdamParam{random({99}, 1).to(dtype), random({99}, 2).to(dtype), random({99}, 3),
                           random({99}, 4).abs(), 3};
        };
        const AdamParam made = make(), other = make();
        const AdamParam host{made.param.cpu(), made.grad.cpu(), made.exp_avg.cpu(),
                             made.exp_avg_sq.cpu(), made.step};
        step_on_host(options, host);
        step_by_operators(options, {other});
        const double tolerance = dtype == at::kFloat ? 1e-5 : 1e-2;
        EXPECT_FALSE(same_values(host.param, make().param));
        EXPECT_TRUE(close_values(other.param, host.param, tolerance));
        EXPECT_TRUE(close_values(other.exp_avg, host.exp_avg, 1e-5));
        EXPECT_TRUE(close_values(other.exp_avg_sq, host.exp_avg_sq, 1e-5));
      }
    }
  }
}

TEST(CPUAdam, StepsOnlyWhatHasAGradientAndEvaluatesAClosure) {
  Tensor with = torch::ones({3}, test_device()).requires_grad_();
  const Tensor without = torch::ones({3}, test_device());
  CPUAdam adam({with, without}, CPUAdamOptions(0.1));
  torch::NoGradGuard no_grad;
  const Tensor loss = adam.step([&] {
    Tensor value = (with * 2).sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<double>(), 6);
  EXPECT_TRUE(torch::allclose(with, torch::full_like(with, 0.9)));
  EXPECT_TRUE(same_values(without, torch::ones({3})));
  EXPECT_EQ(adam.state().size(), 1u);
}

TEST(CPUAdam, AutogradHearsThatAParameterHasChanged) {
  Tensor param = torch::ones({3}, test_device()).requires_grad_();
  const Tensor loss = (param * param).sum();
  CPUAdam adam({param}, CPUAdamOptions(0.1));
  param.mutable_grad() = torch::ones({3}, test_device());
  adam.step();
  expect_error([&] { loss.backward(); }, {"modified by an inplace operation"});
}

TEST(CPUAdam, AutogradHearsThatADistTensorHasChanged) {
  run_world(2, [](World&) {
    const DeviceMesh mesh = DeviceMesh::over_world();
    for (const Placement& placement : {Placement(Shard{0}), Placement(Replicate{})}) {
      Tensor param = distribute(torch::ones({4}, test_device()), mesh, {placement});
      param.set_requires_grad(true);
      const Tensor loss = (param * param).sum();
      CPUAdam adam({param}, CPUAdamOptions(0.1));
      (param * 2).sum().backward();
      adam.step();
      expect_error([&] { loss.backward(); }, {"modified by an inplace operation"});
    }
  });
}

TEST(CPUAdam, StateFollowsAConvertedParameter) {
  Tensor param = random({20}, 1);
  CPUAdam adam({param}, CPUAdamOptions(0.1));
  param.mutable_grad() = torch::ones_like(param);
  adam.step();
  param.mutable_grad().reset();
  param.set_data(param.to(at::kDouble));
  param.mutable_grad() = torch::ones_like(param);
  adam.step();
  EXPECT_EQ(read_param_state(adam, param).tensors.at("exp_avg").scalar_type(), at::kDouble);
  EXPECT_EQ(read_param_state(adam, param).counts.at("step"), 2);
}

TEST(CPUAdam, RefusesWhatItCannotStepAndChangesNothing) {
  Tensor first = torch::ones({4}), second = torch::ones({4});
  CPUAdam adam({first, second}, CPUAdamOptions(0.1));
  first.mutable_grad() = torch::ones({4});
  second.mutable_grad() = torch::ones({4}).to_sparse();
  expect_error([&] { adam.step(); }, {"CPUAdam does not support sparse gradients"});
  Tensor whole = torch::ones({4}, at::kLong);
  CPUAdam integers({first, whole}, CPUAdamOptions(0.1));
  whole.mutable_grad() = torch::ones({4});
  EXPECT_THROW(integers.step(), c10::NotImplementedError);
  expect_error([&] { integers.step(); }, {"[CPUAdam]", "Float, BFloat16, Half or Double", "Long"});
  EXPECT_TRUE(torch::equal(first, torch::ones({4})));
  EXPECT_TRUE(adam.state().empty() && integers.state().empty());
}

}  // namespace tessera::testing::cpu_adam_test
