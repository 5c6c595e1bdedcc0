// A transformer whose code knows nothing of meshes trains on sequences that are cut over ranks as
// it does in one process.

#include <gtest/gtest.h>
#include <tessera/comm/comm_debug.h>
#include <tessera/parallel/context_parallel.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::context_parallel_training_test {

namespace nn = torch::nn;
using testing::on_test_device;

constexpr int64_t kVocabulary = 17, kWidth = 32, kHeads = 8, kKvHeads = 4, kLength = 12, kBatch = 2;

struct BlockImpl : nn::Module {
  static at::Tensor heads_of(const at::Tensor& x, int64_t heads) {
    return x.view({x.size(0), x.size(1), heads, kWidth / kHeads}).transpose(1, 2);
  }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor y = ln1(x);
    const at::Tensor mixed = torch::scaled_dot_product_attention(
        heads_of(q(y), kHeads), heads_of(k(y), kKvHeads), heads_of(v(y), kKvHeads), {}, 0.0,
        /*is_causal=*/true, std::nullopt, /*enable_gqa=*/true);
    x = x + proj(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), kWidth}));
    return x + down(torch::gelu(up(ln2(x))));
  }
  nn::LayerNorm ln1 = register_module("ln1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear q = register_module("q", nn::Linear(kWidth, kWidth));
  nn::Linear k = register_module("k", nn::Linear(kWidth, kWidth / 2));
  nn::Linear v = register_module("v", nn::Linear(kWidth, kWidth / 2));
  nn::Linear proj = register_module("proj", nn::Linear(kWidth, kWidth));
  nn::LayerNorm ln2 = register_module("ln2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
  nn::Linear down = register_module("down", nn::Linear(4 * kWidth, kWidth));
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  GptImpl() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
    torch::NoGradGuard no_grad;
    for (auto& parameter : named_parameters()) {
      if (parameter.value().dim() == 2) parameter.value().normal_(0, 0.2, generator);
      if (parameter.key().ends_with("bias")) parameter.value().zero_();
    }
    to(testing::test_device());
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& positions) {
    return head(ln(second(first(tok(tokens) + pos(positions)))));
  }
  nn::Embedding tok = register_module("tok", nn::Embedding(kVocabulary, kWidth));
  nn::Embedding pos = register_module("pos", nn::Embedding(kLength, kWidth));
  Block first = register_module("first", Block());
  Block second = register_module("second", Block());
  nn::LayerNorm ln = register_module("ln", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear head = register_module("head", nn::Linear(kWidth, kVocabulary));
};
TORCH_MODULE(Gpt);

// Changes a tensor of [batch, sequence] before it is used.
using Place = std::function<at::Tensor(const at::Tensor&)>;

double step(Gpt& gpt, torch::optim::Optimizer& optimizer, int number, const Place& place) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(number);
  const at::Tensor text =
      on_test_device(torch::randint(0, kVocabulary, {kBatch, kLength + 1}, generator));
  const at::Tensor tokens = place(text.slice(1, 0, kLength)), labels = place(text.slice(1, 1)),
                   positions = place(on_test_device(torch::arange(kLength)).unsqueeze(0));
  optimizer.zero_grad();
  const at::Tensor logits = gpt(tokens, positions);
  const at::Tensor loss =
      torch::cross_entropy_loss(logits.view({-1, kVocabulary}), labels.reshape({-1}));
  loss.backward();
  optimizer.step();
  return loss.item<double>();
}

void expect_trains_as_one_process(const DeviceMesh& mesh, const ContextParallelOptions& options,
                                  const PartitionFn& partition = {}) {
  Gpt plain, dist;
  distribute_module(*dist, mesh, partition);
  const torch::optim::AdamWOptions adam(1e-2);
  torch::optim::AdamW plain_optimizer(plain->parameters(), adam),
      optimizer(dist->parameters(), adam);
  Placements placements(mesh.ndim(), Replicate{});
  placements.back() = Shard{1};
  const auto place = [&](const at::Tensor& tensor) {
    const at::Tensor ordered =
        options.load_balance ? balance_sequence(tensor, 1, mesh, options.mesh_dim) : tensor;
    return distribute(ordered, mesh, placements);
  };
  const ContextParallel scope(mesh, options);
  CommDebug debug;
  for (int number = 0; number < 3; ++number) {
    const double expected = step(plain, plain_optimizer, number, [](const auto& x) { return x; });
    const double loss = step(dist, optimizer, number, place);
    ASSERT_NEAR(loss, expected, 1e-5 * expected) << "step " << number;
  }
  // Nothing else moves or gathers parts of sequences; shared memory is set up with small messages.
  const int64_t others = mesh.size(-1) - 1;
  EXPECT_EQ(debug.calls("all_to_all", "aten::scaled_dot_product_attention"), 3 * 2 * 2 * others)
      << debug.describe();
  EXPECT_EQ(debug.calls("all_to_all"), 3 * 2 * (2 * others + others + 1)) << debug.describe();
  EXPECT_EQ(debug.calls("all_gather"), debug.calls("all_gather", "shared memory"))
      << debug.describe();
}

TEST(ContextParallelTraining, IsThatOfOneProcess) {
  for (const int ranks : {2, 3}) {
    run_world(
        ranks,
        [](World&) {
          const auto mesh = DeviceMesh::over_world();
          for (const bool is_balanced : {false, true})
            expect_trains_as_one_process(mesh, {.load_balance = is_balanced});
        },
        std::chrono::seconds(60));
  }
}

TEST(ContextParallelTraining, MayHaveHeadsCutOverAnotherMeshDim) {
  run_world(
      4,
      [](World&) {
        const auto mesh = DeviceMesh::over_world({2, 2}, {"tp", "cp"});
        const auto partition = [](const std::string& name, nn::Module& module,
                                  const DeviceMesh& mesh) {
          auto* const linear = module.as<nn::LinearImpl>();
          if (!linear || name == "head") return;
          const bool is_second = name.ends_with("proj") || name.ends_with("down");
          distribute_(linear->weight, mesh, {is_second ? Shard{1} : Shard{0}});
          if (!is_second) distribute_(linear->bias, mesh, {Shard{0}});
        };
        for (const bool is_balanced : {false, true})
          expect_trains_as_one_process(mesh, {.mesh_dim = "cp", .load_balance = is_balanced},
                                       partition);
      },
      std::chrono::seconds(60));
}

}  // namespace tessera::context_parallel_training_test
