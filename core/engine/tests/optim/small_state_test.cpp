// CPUAdam's state in bfloat16 and in 8 bits, on ordinary tensors.
#include "engine/optim/small_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>

#include "engine/optim/cpu_adam_step.h"
#include "engine/optim/param_state.h"
#include "support/models.h"

namespace tessera::testing::small_state_test {

using torch::Tensor;

constexpr at::ScalarType kSmall[] = {at::kBFloat16, at::kByte};

Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return seeded(seed, [&] { return torch::randn(sizes, default_generator()); });
}

// The dynamic code as bitsandbytes and torchao make it: decades of means of borders.
std::vector<double> expected_code(bool is_signed) {
  std::vector<double> code = {0, 1};
  for (int i = 0; i < 7; ++i) {
    const int borders = (1 << (is_signed ? i : i + 1)) + 1;
    const Tensor border = torch::linspace(0.1, 1, borders, torch::kDouble);
    const Tensor means = (border.slice(0, 0, -1) + border.slice(0, 1)) / 2;
    for (int k = 0; k < borders - 1; ++k) {
      const double value = std::pow(10.0, i - 6) * means[k].item<double>();
      code.push_back(value);
      if (is_signed) code.push_back(-value);
    }
  }
  std::ranges::sort(code);
  return code;
}

class OnHost : public ::testing::Test {
 protected:
  void SetUp() override { TESSERA_ON_HOST_ONLY("states of few bits are for host memory"); }
};
using DynamicCode = OnHost;
using NoisyRounding = OnHost;
using SmallState = OnHost;

TEST_F(DynamicCode, HasTheValuesOfItsDefinition) {
  for (const bool is_signed : {true, false}) {
    const auto expected = expected_code(is_signed);
    ASSERT_EQ(expected.size(), 256u);
    for (size_t i = 0; i < 256; ++i)
      EXPECT_NEAR(dynamic_code(is_signed)[i], expected[i], 1e-7 * std::abs(expected[i])) << i;
  }
  EXPECT_EQ(dynamic_code(true)[127], 0);
  EXPECT_EQ(dynamic_code(false)[0], 0);
  EXPECT_EQ(dynamic_code(true)[255], 1);
}

TEST_F(DynamicCode, TakesTheNearestValueOfEachElement) {
  for (const bool is_signed : {true, false}) {
    const auto code = expected_code(is_signed);
    for (const int64_t numel : {1, 100, 256}) {
      Tensor values = random({numel}, 10 + numel) * torch::pow(10, 3 * random({numel}, 5) - 9);
      if (!is_signed) values = values.square();
      std::vector<uint8_t> codes(numel);
      std::vector<float> back(numel);
      const auto* const x = values.const_data_ptr<float>();
      const float scale = encode_block(x, is_signed, numel, codes.data());
      EXPECT_EQ(scale, values.abs().max().item<float>());
      decode_block(codes.data(), scale, is_signed, numel, back.data());
      for (int64_t i = 0; i < numel; ++i) {
        double least = std::numeric_limits<double>::infinity();
        for (const double value : code) least = std::min(least, std::abs(value * scale - x[i]));
        EXPECT_NEAR(std::abs(static_cast<double>(back[i]) - x[i]), least, 2e-7 * scale);
        // The widest gap is that below 1, or, signed, also the one above -1.
        EXPECT_LE(std::abs(back[i] - x[i]), (is_signed ? 0.0071 : 0.0036) * scale);
      }
      // What is decoded is encoded to the same values again, if it has the same scale.
      if (values.max().item<float>() != scale) continue;
      std::vector<float> again(numel);
      EXPECT_EQ(encode_block(back.data(), is_signed, numel, codes.data()), scale);
      decode_block(codes.data(), scale, is_signed, numel, again.data());
      EXPECT_EQ(again, back);
    }
  }
}

TEST_F(DynamicCode, OfZerosIsZeroAndOfNumbersThatAreNotFiniteIsNaN) {
  std::vector<float> values(256, 0.0F), back(256);
  std::vector<uint8_t> codes(256);
  for (const bool is_signed : {true, false}) {
    EXPECT_EQ(encode_block(values.data(), is_signed, 256, codes.data()), 0);
    decode_block(codes.data(), 0, is_signed, 256, back.data());
    EXPECT_EQ(back, values);
    for (const float wrong : {std::numeric_limits<float>::infinity(), -std::nanf("")}) {
      auto with_one = values;
      with_one[200] = wrong, with_one[7] = 3;
      const float scale = encode_block(with_one.data(), is_signed, 256, codes.data());
      decode_block(codes.data(), scale, is_signed, 256, back.data());
      EXPECT_TRUE(std::ranges::all_of(back, [](float value) { return std::isnan(value); }));
    }
  }
}

float widened(uint16_t half) { return std::bit_cast<float>(uint32_t{half} << 16); }

TEST_F(NoisyRounding, GoesToANeighbourAndIsRightOnAverage) {
  constexpr int64_t kCount = 1 << 18;
  const Tensor noise = random({kCount}, 3);
  std::vector<uint16_t> rounded(kCount);
  for (const float value : {1.0F, 1.001F, -0.3F, 7.77e-21F, 3.0e38F, 1e-41F}) {
    const std::vector<float> values(kCount, value);
    for (const int64_t step : {1, 2, 1000}) {
      round_with_noise(values.data(), noise.const_data_ptr<float>(), noise_start(5, step, false),
                       kCount, rounded.data());
      const uint32_t bits = std::bit_cast<uint32_t>(value) & 0xffff0000;
      const double low = std::bit_cast<float>(bits),
                   gap = std::bit_cast<float>(bits + 0x10000) - low;
      double sum = 0;
      for (const uint16_t half : rounded) {
        const double share = (widened(half) - low) / gap;
        ASSERT_TRUE(share == 0 || share == 1) << value;
        sum += share;
      }
      // A mean of independent draws of 0 and 1 has a deviation of sqrt(p (1 - p) / count).
      const double share = (value - low) / gap;
      EXPECT_NEAR(sum / kCount, share, 5 * std::sqrt(share * (1 - share) / kCount)) << value;
    }
  }
}

TEST_F(NoisyRounding, DiffersByStepSeedAndMomentButNotByPlace) {
  constexpr int64_t kCount = 4096;
  const Tensor values = random({kCount}, 1), grads = random({kCount}, 2);
  const auto round = [&](uint32_t start, int64_t begin, int64_t end) {
    std::vector<uint16_t> rounded(end - begin);
    round_with_noise(values.const_data_ptr<float>() + begin, grads.const_data_ptr<float>() + begin,
                     start, end - begin, rounded.data());
    return rounded;
  };
  const auto whole = round(noise_start(1, 1, false), 0, kCount);
  const auto part = round(noise_start(1, 1, false), 1001, 1100);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 1001));
  for (const uint32_t start :
       {noise_start(1, 2, false), noise_start(2, 1, false), noise_start(1, 1, true)}) {
    const auto other = round(start, 0, kCount);
    int64_t differ = 0;
    for (int64_t i = 0; i < kCount; ++i) differ += other[i] != whole[i];
    // Independent noise rounds a third of numbers with a random fraction differently.
    EXPECT_NEAR(differ, kCount / 3.0, 5 * std::sqrt(kCount * 2 / 9.0));
  }
}

TEST_F(NoisyRounding, KeepsWhatIsNotFinite) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float values[] = {infinity, -infinity, std::bit_cast<float>(0x7fffffffU),
                          std::bit_cast<float>(0xff800001U), 0.0F};
  const float grads[] = {1, 2, 3, 4, 5};
  uint16_t rounded[5];
  for (int64_t step = 0; step < 100; ++step) {
    round_with_noise(values, grads, noise_start(0, step, true), 5, rounded);
    EXPECT_EQ(widened(rounded[0]), infinity);
    EXPECT_EQ(widened(rounded[1]), -infinity);
    EXPECT_TRUE(std::isnan(widened(rounded[2])) && std::isnan(widened(rounded[3])));
    EXPECT_EQ(rounded[4], 0);
  }
}

// Second moments of 1 that shrink by less than half of bfloat16's distance at each step.
TEST_F(SmallState, DoesNotLoseSmallUpdates) {
  constexpr int64_t kCount = 4096, kSteps = 300;
  const Tensor grad = 0.5 + 0.01 * random({kCount}, 1);  // different noise for each element
  Tensor param = torch::zeros({kCount});
  CPUAdam adam({param}, CPUAdamOptions(0).state_dtype(at::kBFloat16));
  param.mutable_grad() = grad;
  adam.step();
  auto& state = static_cast<CPUAdamParamState&>(*adam.state().at(param.unsafeGetTensorImpl()));
  state.exp_avg_sq().fill_(1);
  Tensor nearest = torch::ones({kCount}, torch::kBFloat16);
  for (int step = 0; step < kSteps; ++step) {
    adam.step();
    nearest = (0.999 * nearest.to(at::kFloat) + 0.001 * grad.square()).to(at::kBFloat16);
  }
  EXPECT_TRUE(torch::equal(nearest, torch::ones_like(nearest)));
  const double target = grad.square().mean().item<double>();
  const double expected = target + (1 - target) * std::pow(0.999, kSteps);
  // Each step adds noise of at most half of the distance 2^-8; elements are independent.
  const double deviation = std::ldexp(0.5, -8) * std::sqrt(static_cast<double>(kSteps) / kCount);
  EXPECT_NEAR(state.exp_avg_sq().to(at::kDouble).mean().item<double>(), expected, 5 * deviation);
}

TEST_F(SmallState, TakesTheBytesThatItsHeaderSays) {
  for (const int64_t numel : {1, 255, 256, 257, 4096}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kByte}) {
      Tensor param = random({numel}, 1);
      CPUAdam adam({param}, CPUAdamOptions(0.1).state_dtype(dtype));
      param.mutable_grad() = random({numel}, 2);
      adam.step();
      const int64_t wanted = dtype == at::kFloat      ? 8 * numel
                             : dtype == at::kBFloat16 ? 4 * numel
                                                      : 2 * numel + 8 * ((numel + 255) / 256);
      EXPECT_EQ(state_nbytes(adam), wanted);
    }
  }
}

// Steps in float with state that is decoded before and encoded after.
TEST_F(SmallState, StepsWithFloatMomentsAndRoundsThemOnce) {
  for (const at::ScalarType dtype : kSmall) {
    for (const at::ScalarType param_dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      Tensor own = random({37, 19}, 1).to(param_dtype), other = own.clone();
      CPUAdam adam({own}, CPUAdamOptions(1e-2).weight_decay(0.1).state_dtype(dtype).seed(7));
      CPUAdam wide({other}, CPUAdamOptions(1e-2).weight_decay(0.1));
      for (int step = 1; step <= 4; ++step) {
        const Tensor grad = random({37, 19}, 10 + step);
        own.mutable_grad() = grad.to(param_dtype), other.mutable_grad() = grad.to(param_dtype);
        adam.step(), wide.step();
        ASSERT_TRUE(torch::equal(own, other)) << "step " << step;
        ParamState state = read_param_state(wide, other);
        for (auto& [name, tensor] : state.tensors) {
          const bool is_first = name == "exp_avg";
          if (dtype == at::kBFloat16) {
            Tensor rounded = torch::empty_like(tensor, at::kBFloat16);
            const Tensor slope = other.grad().to(at::kFloat);
            round_with_noise(tensor.const_data_ptr<float>(), slope.const_data_ptr<float>(),
                             noise_start(7, step, !is_first), tensor.numel(),
                             reinterpret_cast<uint16_t*>(rounded.data_ptr()));
            tensor = rounded.to(at::kFloat);
          } else {
            const KeptMoment kept = converted({tensor, {}}, is_first, at::kByte, tensor);
            tensor = converted(kept, is_first, at::kFloat, tensor).values;
          }
        }
        write_param_state(wide, other, state);
      }
    }
  }
}

// As ranks and threads cut: a whole parameter and its blocks, and bfloat16 anywhere.
TEST_F(SmallState, GivesEachElementTheSameBitsWhereverItLies) {
  constexpr int64_t kCount = 5 * 256 + 77;
  for (const at::ScalarType dtype : kSmall) {
    const auto options = CPUAdamOptions(1e-2).state_dtype(dtype);
    const int64_t border = dtype == at::kByte ? 512 : 333;
    Tensor whole = random({kCount}, 1), memory = torch::zeros({kCount + 3});
    Tensor first = whole.narrow(0, 0, border).clone();
    Tensor rest =
        memory.narrow(0, 3, kCount - border).copy_(whole.narrow(0, border, kCount - border));
    CPUAdam one({whole}, options), two({first, rest}, options);
    const int threads = torch::get_num_threads();
    for (int step = 0; step < 3; ++step) {
      const Tensor grad = random({kCount}, 10 + step);
      whole.mutable_grad() = grad;
      first.mutable_grad() = grad.narrow(0, 0, border),
      rest.mutable_grad() = grad.narrow(0, border, kCount - border);
      torch::set_num_threads(1 + step);
      one.step();
      torch::set_num_threads(threads);
      two.step();
    }
    EXPECT_TRUE(torch::equal(whole, torch::cat({first, rest})));
    for (const auto& [name, tensor] : read_param_state(one, whole).tensors) {
      const Tensor begin = read_param_state(two, first).tensors.at(name);
      const Tensor end = read_param_state(two, rest).tensors.at(name);
      EXPECT_TRUE(torch::equal(tensor, torch::cat({begin, end}))) << name;
    }
  }
}

// Blocks count in the order of memory, so views without gaps step as their memory does.
TEST_F(SmallState, FollowsTheOrderOfMemory) {
  for (const at::ScalarType dtype : kSmall) {
    const auto options = CPUAdamOptions(1e-2).state_dtype(dtype);
    const Tensor start = random({20, 31}, 1);
    Tensor flat = start.clone().flatten(), turned = start.clone().t(),
           gaps = torch::zeros({20, 40});
    Tensor wide = gaps.narrow(1, 4, 31).copy_(start);
    CPUAdam adam({flat, turned, wide}, options);
    for (int step = 0; step < 3; ++step) {
      const Tensor grad = random({20, 31}, 10 + step);
      flat.mutable_grad() = grad.flatten();
      turned.mutable_grad() = step == 1 ? grad.t() : grad.t().contiguous();
      wide.mutable_grad() = grad;
      adam.step();
    }
    EXPECT_TRUE(torch::equal(turned.t().flatten(), flat));
    EXPECT_TRUE(torch::equal(wide.flatten(), flat));
    for (const auto& [name, tensor] : read_param_state(adam, flat).tensors) {
      const Tensor other = read_param_state(adam, turned).tensors.at(name);
      EXPECT_TRUE(torch::equal(other.dim() == 2 ? other.t().flatten() : other, tensor)) << name;
    }
    wide.zero_();
    EXPECT_TRUE(torch::equal(gaps, torch::zeros_like(gaps)));
  }
}

TEST_F(SmallState, IsConvertedWhenItsOptionChanges) {
  Tensor param = random({600}, 1);
  CPUAdam adam({param}, CPUAdamOptions(1e-2));
  const auto options = [&]() -> CPUAdamOptions& {
    return static_cast<CPUAdamOptions&>(adam.param_groups()[0].options());
  };
  param.mutable_grad() = random({600}, 2);
  for (const at::ScalarType dtype : {at::kFloat, at::kByte, at::kBFloat16, at::kByte, at::kFloat}) {
    options().state_dtype(dtype);
    adam.step();
    const ParamState state = read_param_state(adam, param);
    EXPECT_EQ(state.tensors.at("exp_avg").scalar_type(), dtype);
    EXPECT_EQ(state.tensors.contains("exp_avg_scale"), dtype == at::kByte);
  }
  // The gradient is the same at all steps, so its average is a known part of it.
  const Tensor expected = param.grad() * (1 - std::pow(0.9, 5));
  const Tensor error = (read_param_state(adam, param).tensors.at("exp_avg") - expected).abs();
  // Each rounding is off by 0.71 % of the largest, or by 2^-8 of the number.
  EXPECT_LT(error.max().item<float>(), 4 * 0.0075 * expected.abs().max().item<float>());
}

TEST_F(SmallState, IsSavedByLibTorchToTheBit) {
  for (const at::ScalarType saved : {at::kFloat, at::kBFloat16, at::kByte}) {
    Tensor param = random({300}, 1), other = param.clone();
    CPUAdam adam({param}, CPUAdamOptions(1e-2).state_dtype(saved).seed(9)),
        loaded({other}, CPUAdamOptions(0.5).state_dtype(saved)), wide({other}, CPUAdamOptions(0.5));
    param.mutable_grad() = random({300}, 2);
    adam.step();
    std::stringstream first;
    torch::save(adam, first);
    std::stringstream second(first.str());
    torch::load(loaded, first);
    other.copy_(param);
    for (const int step : {3, 4}) {
      param.mutable_grad() = random({300}, step), other.mutable_grad() = param.grad();
      adam.step(), loaded.step();
    }
    EXPECT_TRUE(torch::equal(other, param));
    // An optimizer of another kind keeps its own, and converts what it has loaded.
    torch::load(wide, second);
    auto& options = static_cast<CPUAdamOptions&>(wide.param_groups()[0].options());
    EXPECT_EQ(options.state_dtype(), at::kFloat);
    EXPECT_EQ(options.seed(), 9);
    wide.step();
    EXPECT_EQ(read_param_state(wide, other).tensors.at("exp_avg").scalar_type(), at::kFloat);
  }
}

TEST_F(SmallState, IsThatOfTheOptimizerForArchivesWithoutTheOption) {
  Tensor param = random({300}, 1), other = param.clone();
  CPUAdam adam({param}, CPUAdamOptions(1e-2)), loaded({other}, CPUAdamOptions().seed(4));
  param.mutable_grad() = other.mutable_grad() = random({300}, 2);
  adam.step();
  OptimizerStateDict dict = state_dict_of(adam);
  for (const char* const name : {"state_dtype", "seed"})
    EXPECT_EQ(dict.param_groups[0].options.erase(name), 1U);
  load_state_dict(loaded, dict);
  other.copy_(param);
  adam.step(), loaded.step();
  EXPECT_TRUE(torch::equal(other, param));
}

TEST_F(SmallState, TakesItsOptionFromTheOptimizerUnlessAGroupSaysMore) {
  Tensor a = random({10}, 1), b = random({10}, 2);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{a},
                      std::make_unique<CPUAdamOptions>(CPUAdamOptions().state_dtype(at::kByte)));
  groups.emplace_back(std::vector<Tensor>{b});
  groups.emplace_back(std::vector<Tensor>{torch::ones({4})},
                      std::make_unique<CPUAdamOptions>(CPUAdamOptions(0.5)));
  CPUAdam adam(groups, CPUAdamOptions(1e-2).state_dtype(at::kBFloat16).seed(5));
  const auto& other = static_cast<const CPUAdamOptions&>(adam.param_groups()[2].options());
  EXPECT_EQ(other.state_dtype(), at::kFloat);
  EXPECT_EQ(other.seed(), 5);
  a.mutable_grad() = random({10}, 3), b.mutable_grad() = random({10}, 4);
  adam.step();
  EXPECT_EQ(read_param_state(adam, a).tensors.at("exp_avg").scalar_type(), at::kByte);
  EXPECT_EQ(read_param_state(adam, b).tensors.at("exp_avg").scalar_type(), at::kBFloat16);
}

TEST_F(SmallState, IsRefusedWhereItCannotBeKept) {
  Tensor param = torch::ones({4}, torch::kDouble), narrow = torch::ones({4});
  expect_error([&] { CPUAdam({narrow}, CPUAdamOptions().state_dtype(at::kHalf)); },
               {"[CPUAdam] state_dtype must be Float, BFloat16 or Byte; got Half"});
  for (const at::ScalarType dtype : kSmall) {
    CPUAdam adam({narrow, param}, CPUAdamOptions().state_dtype(dtype));
    narrow.mutable_grad() = torch::ones({4}), param.mutable_grad() = torch::ones_like(param);
    expect_error([&] { adam.step(); }, {"is not for a parameter of shape [4]: it is Double"});
    EXPECT_TRUE(adam.state().empty() && torch::equal(narrow, torch::ones({4})));
  }
  expect_error([] { check_small(at::kBFloat16, at::kFloat, at::kCUDA, false, "'w'"); },
               {"state_dtype BFloat16 is not for 'w': it is not in host memory"});
  Tensor other = torch::ones({4});
  CPUAdam adam({other}, CPUAdamOptions().state_dtype(at::kByte));
  auto broken = std::make_unique<CPUAdamParamState>();
  broken->exp_avg(torch::zeros({4}, torch::kByte)).exp_avg_sq(torch::zeros({4}, torch::kByte));
  adam.state()[other.unsafeGetTensorImpl()] = std::move(broken);
  other.mutable_grad() = torch::ones({4});
  expect_error([&] { adam.step(); }, {"a Float scale for each block of 256 elements"});
}

}  // namespace tessera::testing::small_state_test
