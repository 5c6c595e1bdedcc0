// Losses on DistTensors, forward and backward, against ordinary tensors.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <cmath>

#include "support/operator_parity.h"
#include "support/run_world.h"

namespace tessera::testing::loss_operators_test {

std::vector<OperatorCase> cases() {
  return {
      {"mse_loss", {{5, 4}, {5, 4}}, [](const Tensors& x) { return torch::mse_loss(x[0], x[1]); }},
      {"mse_loss, the sum",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::mse_loss(x[0], x[1], at::Reduction::Sum); }},
      {"mse_loss of each",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::mse_loss(x[0], x[1], at::Reduction::None); }},
      {"l1_loss", {{5, 4}, {5, 4}}, [](const Tensors& x) { return torch::l1_loss(x[0], x[1]); }},
      {"smooth_l1_loss",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::smooth_l1_loss(x[0], x[1]); }},
      {"huber_loss, the sum",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::huber_loss(x[0], x[1], at::Reduction::Sum); }},
      {"huber_loss",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::huber_loss(x[0], x[1]); }},
      {"soft_margin_loss",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::soft_margin_loss(x[0], x[1].detach().sign()); }},
      {"binary_cross_entropy",
       {{5, 4}, {5, 4}, {4}},
       [](const Tensors& x) {
         return torch::binary_cross_entropy(torch::sigmoid(x[0]), torch::sigmoid(x[1].detach()),
                                            x[2].detach().abs());
       }},
      {"binary_cross_entropy_with_logits",
       {{5, 4}, {5, 4}, {4}},
       [](const Tensors& x) {
         return torch::binary_cross_entropy_with_logits(x[0], torch::sigmoid(x[1].detach()), {},
                                                        x[2].detach().abs());
       }},
      {"kl_div",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) {
         return torch::kl_div(torch::log_softmax(x[0], 1), torch::softmax(x[1], 1));
       }},
      {"cross_entropy",
       {{5, 4}, {5}},
       [](const Tensors& x) { return torch::cross_entropy_loss(x[0], whole_numbers(x[1], 4)); }},
      {"cross_entropy with weights of classes",
       {{5, 4}, {5}, {4}},
       [](const Tensors& x) {
         return torch::cross_entropy_loss(x[0], whole_numbers(x[1], 4), x[2].detach().abs(),
                                          at::Reduction::Mean, /*ignore_index=*/1);
       }},
      {"cross_entropy of each",
       {{5, 4}, {5}},
       [](const Tensors& x) {
         return torch::cross_entropy_loss(x[0], whole_numbers(x[1], 4), {}, at::Reduction::None);
       }},
      {"cross_entropy, the sum",
       {{5, 4}, {5}},
       [](const Tensors& x) {
         return torch::cross_entropy_loss(x[0], whole_numbers(x[1], 4), {}, at::Reduction::Sum, 2);
       }},
      {"cross_entropy of pixels",
       {{3, 4, 2, 5}, {3, 2, 5}},
       [](const Tensors& x) {
         return torch::cross_entropy_loss(x[0], whole_numbers(x[1], 4), {}, at::Reduction::Mean, 3);
       }},
      {"cross_entropy of positions",
       {{3, 4, 5}, {3, 5}},
       [](const Tensors& x) { return torch::cross_entropy_loss(x[0], whole_numbers(x[1], 4)); }},
      {"cross_entropy with smoothed labels",
       {{5, 4}, {5}},
       [](const Tensors& x) {
         return torch::cross_entropy_loss(x[0], whole_numbers(x[1], 4), {}, at::Reduction::Mean,
                                          -100, 0.1);
       }},
      {"ctc_loss with lengths of tensors",
       {{6, 3, 4}, {3, 5}, {3}},
       [](const Tensors& x) {
         const at::Tensor targets = whole_numbers(x[1], 3) + 1,
                          lengths = whole_numbers(x[2], 2) + 1;
         return torch::ctc_loss(x[0].log_softmax(2), targets, lengths + 4, lengths);
       }},
      {"cosine_similarity",
       {{5, 4}, {5, 4}},
       [](const Tensors& x) { return torch::cosine_similarity(x[0], x[1]); }},
  };
}

TEST(Losses, OnTwoRanks) { expect_as_plain(cases(), {2}); }
TEST(Losses, OnThreeRanks) { expect_as_plain(cases(), {3}); }
TEST(Losses, OnASquare) { expect_as_plain(cases(), {2, 2}); }
TEST(LossesNightly, OnASquare) { expect_as_plain(cases(), {2, 2}, Combinations::kAll); }

TEST(Losses, OfACutBatchSendASum) {
  const auto labels = [](const Tensors& x) { return whole_numbers(x[1], 4); };
  const Placements rows = {Shard{0}, Shard{0}};
  expect_quiet({
      {{"mse_loss", {{5, 4}, {5, 4}}, [](const Tensors& x) { return torch::mse_loss(x[0], x[1]); }},
       rows,
       1,
       0,
       16},
      {{"cross_entropy",
        {{5, 4}, {5}},
        [=](const Tensors& x) { return torch::cross_entropy_loss(x[0], labels(x)); }},
       rows,
       1,
       0,
       32},
      {{"cross_entropy of pixels",
        {{3, 4, 2, 5}, {3, 2, 5}},
        [=](const Tensors& x) { return torch::cross_entropy_loss(x[0], labels(x)); }},
       rows,
       1,
       0,
       32},
      {{"binary_cross_entropy_with_logits",
        {{5, 4}, {5, 4}},
        [](const Tensors& x) {
          return torch::binary_cross_entropy_with_logits(x[0], torch::sigmoid(x[1].detach()));
        }},
       rows,
       1,
       0,
       16},
      {{"kl_div",
        {{5, 4}, {5, 4}},
        [](const Tensors& x) {
          return torch::kl_div(torch::log_softmax(x[0], 1), torch::softmax(x[1], 1));
        }},
       rows,
       1,
       0,
       16},
  });
}

// For a row of logits, ranks send the maximum, the sum of the exponentials and the target's logit.
TEST(Losses, OfAVocabularyThatIsCutGatherNoLogits) {
  const auto loss = [](int64_t ignored, at::Reduction::Reduction reduction) {
    return [=](const Tensors& x) {
      return torch::cross_entropy_loss(x[0], whole_numbers(x[1], 6), {}, reduction, ignored);
    };
  };
  const Placements classes = {Shard{1}, Replicate{}};
  expect_quiet({
      {{"mean", {{4, 6}, {4}}, loss(-100, at::Reduction::Mean)}, classes, 3, 1, 16 + 16 + 8 + 16},
      {{"sum", {{4, 6}, {4}}, loss(2, at::Reduction::Sum)}, classes, 3, 1, 16 + 16 + 4 + 16},
      {{"of each", {{4, 6}, {4}}, loss(2, at::Reduction::None)}, classes, 3, 1, 4 * 16},
      {{"of pixels", {{2, 6, 1, 3}, {2, 1, 3}}, loss(2, at::Reduction::Mean)},
       classes,
       3,
       1,
       24 + 24 + 8 + 24},
  });
}

TEST(Losses, RefuseTargetsOutsideOfAVocabularyThatIsCut) {
  TESSERA_ON_HOST_ONLY("on a device the host does not read the targets");
  run_world(2, [](World&) {
    const at::Tensor x =
        distribute(on_test_device(torch::ones({2, 6})), DeviceMesh::over_world(), {Shard{1}});
    for (const int64_t target : {-1, 6})
      EXPECT_THROW(
          torch::cross_entropy_loss(x, on_test_device(torch::tensor({0, int(target)}, at::kLong))),
          c10::IndexError);
  });
}

// The gradient of the smaller one has the sizes of both until autograd sums it up.
TEST(Losses, OfTensorsThatBroadcast) {
  EXPECT_RULE(torch::mse_loss(x[0], x[1]), {{5, 4}, {4}}, {{4}, {5, 4}});
  EXPECT_RULE(torch::smooth_l1_loss(x[0], x[1], at::Reduction::None), {{5, 4}, {5, 1}});
  EXPECT_RULE(torch::huber_loss(x[0], x[1], at::Reduction::Sum), {{5, 4}, {4}});
}

TEST(Losses, OfTargetsThatAreAllIgnoredAreNotNumbers) {
  run_world(2, [](World&) {
    const auto mesh = DeviceMesh::over_world();
    const at::Tensor x = distribute(on_test_device(torch::ones({3, 4})), mesh, {Shard{0}});
    const at::Tensor y = distribute(on_test_device(torch::ones({3}, at::kLong)), mesh, {Shard{0}});
    const at::Tensor loss = torch::cross_entropy_loss(x, y, {}, at::Reduction::Mean, 1);
    EXPECT_TRUE(std::isnan(full_tensor(loss).item<float>()));
  });
}

}  // namespace tessera::testing::loss_operators_test
