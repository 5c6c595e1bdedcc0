// A GPT with attention sharded by heads, and linear layers by columns and rows, trains as one
// process does.

#include <gtest/gtest.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera {
namespace dist_gpt_test {

namespace nn = torch::nn;
using testing::on_test_device;

constexpr int64_t kVocabulary = 17, kWidth = 16, kHeads = 4, kLength = 6, kBatch = 3;

struct BlockImpl : nn::Module {
  BlockImpl()
      : ln1(register_module("ln1", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        q(register_module("q", nn::Linear(kWidth, kWidth))),
        k(register_module("k", nn::Linear(kWidth, kWidth))),
        v(register_module("v", nn::Linear(kWidth, kWidth))),
        proj(register_module("proj", nn::Linear(kWidth, kWidth))),
        ln2(register_module("ln2", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        up(register_module("up", nn::Linear(kWidth, 4 * kWidth))),
        down(register_module("down", nn::Linear(4 * kWidth, kWidth))) {}

  at::Tensor heads_of(const at::Tensor& x) {
    return x.view({x.size(0), x.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
  }

  at::Tensor forward(at::Tensor x) {
    const at::Tensor y = ln1(x);
    const at::Tensor mixed = torch::scaled_dot_product_attention(
        heads_of(q(y)), heads_of(k(y)), heads_of(v(y)), {}, 0.0, /*is_causal=*/true);
    x = x + proj(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), kWidth}));
    return x + down(torch::gelu(up(ln2(x))));
  }

  nn::LayerNorm ln1;
  nn::Linear q, k, v, proj;
  nn::LayerNorm ln2;
  nn::Linear up, down;
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  GptImpl()
      : tok(register_module("tok", nn::Embedding(kVocabulary, kWidth))),
        pos(register_module("pos", nn::Embedding(kLength, kWidth))),
        first(register_module("first", Block())),
        second(register_module("second", Block())),
        ln(register_module("ln", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        head(register_module("head", nn::Linear(kWidth, kVocabulary))) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
    torch::NoGradGuard no_grad;
    for (auto& parameter : named_parameters()) {
      if (parameter.value().dim() == 2) parameter.value().normal_(0, 0.2, generator);
      if (parameter.key().ends_with("bias")) parameter.value().zero_();
    }
    to(testing::test_device());
  }

  at::Tensor loss(const at::Tensor& text) {
    const at::Tensor inputs = text.slice(1, 0, kLength), targets = text.slice(1, 1);
    const at::Tensor x = tok(inputs) + pos(on_test_device(torch::arange(kLength)));
    return torch::cross_entropy_loss(head(ln(second(first(x)))).view({-1, kVocabulary}),
                                     targets.reshape({-1}));
  }

  nn::Embedding tok, pos;
  Block first, second;
  nn::LayerNorm ln;
  nn::Linear head;
};
TORCH_MODULE(Gpt);

Placement placement_of(const std::string& name, bool is_bias) {
  const auto in = [&](const std::string& layer) {
    return name.find("." + layer + ".") != std::string::npos;
  };
  if (in("q") || in("k") || in("v") || in("up")) return Shard{0};
  if ((in("proj") || in("down")) && !is_bias) return Shard{1};
  return Replicate{};
}

double step(Gpt& gpt, torch::optim::Optimizer& optimizer, int number) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(number);
  const at::Tensor text =
      on_test_device(torch::randint(0, kVocabulary, {kBatch, kLength + 1}, generator));
  optimizer.zero_grad();
  const at::Tensor loss = gpt->loss(text);
  loss.backward();
  optimizer.step();
  return loss.item<double>();
}

void expect_losses_of_one_process(const DeviceMesh& mesh, int steps) {
  Gpt plain, dist;
  for (auto& parameter : dist->named_parameters()) {
    Placements placements(mesh.ndim(), Replicate{});
    placements.back() = placement_of(parameter.key(), parameter.key().ends_with("bias"));
    distribute_(parameter.value(), mesh, placements);
  }
  const torch::optim::AdamWOptions options(1e-2);
  torch::optim::AdamW plain_optimizer(plain->parameters(), options),
      optimizer(dist->parameters(), options);
  for (int number = 0; number < steps; ++number) {
    const double expected = step(plain, plain_optimizer, number),
                 loss = step(dist, optimizer, number);
    ASSERT_NEAR(loss, expected, 1e-5 * expected) << "step " << number;
  }
}

TEST(DistGpt, TensorParallelTrainingHasTheLossesOfOneProcess) {
  for (const int ranks : {2, 4}) {
    run_world(
        ranks, [](World&) { expect_losses_of_one_process(DeviceMesh::over_world(), 50); },
        std::chrono::seconds(120));
  }
}

TEST(DistGpt, OverTheArena) {
  run_arena(2, [](World&) { expect_losses_of_one_process(DeviceMesh::over_world(), 20); });
}

TEST(DistGpt, OnOneDimOfASquare) {
  run_world(
      4,
      [](World&) {
        expect_losses_of_one_process(DeviceMesh::over_world({2, 2}), 10);
      },
      std::chrono::seconds(120));
}

}  // namespace dist_gpt_test
}  // namespace tessera
