// Traffic of unchanged model code whose matrices are cut by columns and rows: as much as that of
// code with explicit reductions, 2 all-reduces of the activations per layer and direction.

#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/tensor/dist_debug.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "support/counted.h"
#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::tensor_parallel_test {

namespace nn = torch::nn;
using testing::on_test_device;

constexpr int64_t kVocabulary = 32, kWidth = 64, kHeads = 4, kHidden = 96, kLength = 16, kBatch = 2;
constexpr int64_t kLayers = 2;
constexpr int64_t kActivationBytes = kBatch * kLength * kWidth * 4;

nn::Linear make_linear(int64_t in, int64_t out) {
  return nn::Linear(nn::LinearOptions(in, out).bias(false));
}

struct RmsNormImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor wide = x.to(torch::kFloat);
    const at::Tensor scale = torch::rsqrt(wide.pow(2).mean(-1, true) + 1e-5);
    return (wide * scale).to(x.scalar_type()) * weight;
  }
  at::Tensor weight = register_parameter("weight", torch::ones({kWidth}));
};
TORCH_MODULE(RmsNorm);

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.chunk(2, -1);
  return x * cos + torch::cat({-halves[1], halves[0]}, -1) * sin;
}

struct AttentionImpl : nn::Module {
  at::Tensor heads_of(const at::Tensor& x) {
    return x.view({x.size(0), x.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor angles = torch::outer(on_test_device(torch::arange(kLength)),
                                           on_test_device(torch::arange(kWidth / kHeads)) * 0.1);
    const at::Tensor cos = angles.cos(), sin = angles.sin();
    const at::Tensor mixed = torch::scaled_dot_product_attention(
        rotated(heads_of(wq(x)), cos, sin), rotated(heads_of(wk(x)), cos, sin), heads_of(wv(x)), {},
        0.0, /*is_causal=*/true);
    return wo(mixed.transpose(1, 2).contiguous().view({x.size(0), x.size(1), kWidth}));
  }
  nn::Linear wq = register_module("wq", make_linear(kWidth, kWidth));
  nn::Linear wk = register_module("wk", make_linear(kWidth, kWidth));
  nn::Linear wv = register_module("wv", make_linear(kWidth, kWidth));
  nn::Linear wo = register_module("wo", make_linear(kWidth, kWidth));
};
TORCH_MODULE(Attention);

struct FeedForwardImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return w2(torch::silu(w1(x)) * w3(x)); }
  nn::Linear w1 = register_module("w1", make_linear(kWidth, kHidden));
  nn::Linear w2 = register_module("w2", make_linear(kHidden, kWidth));
  nn::Linear w3 = register_module("w3", make_linear(kWidth, kHidden));
};
TORCH_MODULE(FeedForward);

struct LayerImpl : nn::Module {
  explicit LayerImpl(bool parallel) : is_parallel(parallel) {}
  at::Tensor forward(const at::Tensor& x) {
    if (is_parallel) {
      const at::Tensor y = attention_norm(x);
      return x + attention(y) + feed_forward(y);
    }
    const at::Tensor h = x + placed(attention(placed(attention_norm(x), Replicate{})), Shard{1});
    return h + placed(feed_forward(placed(ffn_norm(h), Replicate{})), Shard{1});
  }
  at::Tensor placed(const at::Tensor& x, const Placement& placement) const {
    return cuts_sequence && is_dist(x) ? redistribute(x, {placement}) : x;
  }
  bool is_parallel, cuts_sequence = false;  // between the blocks
  Attention attention = register_module("attention", Attention());
  FeedForward feed_forward = register_module("feed_forward", FeedForward());
  RmsNorm attention_norm = register_module("attention_norm", RmsNorm());
  RmsNorm ffn_norm = register_module("ffn_norm", RmsNorm());
};
TORCH_MODULE(Layer);

struct LlamaImpl : nn::Module {
  explicit LlamaImpl(bool parallel = false) {
    for (int64_t i = 0; i < kLayers; ++i) layers->push_back(Layer(parallel));
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      if (parameter.dim() == 2) parameter.normal_(0, 0.1, generator);
    }
    to(testing::test_device());
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor h = tok_embeddings(tokens);
    for (const auto& layer : *layers) h = layer->as<LayerImpl>()->forward(h);
    return output(norm(h));
  }
  nn::Embedding tok_embeddings =
      register_module("tok_embeddings", nn::Embedding(kVocabulary, kWidth));
  nn::ModuleList layers = register_module("layers", nn::ModuleList());
  RmsNorm norm = register_module("norm", RmsNorm());
  nn::Linear output = register_module("output", make_linear(kWidth, kVocabulary));
};
TORCH_MODULE(Llama);

// Shards a Llama's matrices, and its vocabulary if `cuts_vocabulary`.
void cut(Llama& llama, const DeviceMesh& mesh, bool cuts_vocabulary) {
  for (auto& item : llama->named_parameters()) {
    const auto in = [&](const char* name) {
      return item.key().find(std::string(".") + name + ".") != std::string::npos;
    };
    Placement placement = Replicate{};
    if (in("wq") || in("wk") || in("wv") || in("w1") || in("w3")) placement = Shard{0};
    if (in("wo") || in("w2")) placement = Shard{1};
    if (cuts_vocabulary && item.key() == "tok_embeddings.weight") placement = Shard{0};
    if (cuts_vocabulary && item.key() == "output.weight") placement = Shard{0};
    Placements placements(mesh.ndim(), Replicate{});
    placements.back() = placement;
    distribute_(item.value(), mesh, placements);
  }
}

at::Tensor loss_of(Llama& llama, const at::Tensor& tokens) {
  return torch::cross_entropy_loss(llama(tokens).view({-1, kVocabulary}),
                                   tokens.roll(1, 1).view(-1));
}

at::Tensor some_tokens() {
  return on_test_device(
      torch::randint(kVocabulary, {kBatch, kLength}, at::make_generator<at::CPUGeneratorImpl>(2)));
}

void expect_gradients(Llama& dist, Llama& plain, double tolerance) {
  const auto expected = plain->named_parameters();
  for (const auto& item : dist->named_parameters()) {
    if (!expected[item.key()].grad().defined()) continue;
    EXPECT_EQ(placements_of(item.value().grad()), placements_of(item.value())) << item.key();
    EXPECT_TRUE(torch::allclose(full_tensor(item.value().grad()), expected[item.key()].grad(),
                                tolerance, tolerance))
        << item.key();
  }
}

// The traffic of one pass, whose loss and gradients must be those of one process.
struct Sent {
  CollectiveCounts forward, backward;
};
Sent sent_by(World& world, Llama& dist, Llama& plain) {
  const at::Tensor tokens = some_tokens(), expected = loss_of(plain, tokens);
  expected.backward();
  Sent sent;
  at::Tensor loss;
  sent.forward = count(world, [&] { loss = loss_of(dist, tokens); });
  sent.backward = count(world, [&] { loss.backward(); });
  EXPECT_NEAR(full_tensor(loss).item<double>(), expected.item<double>(), 1e-5);
  expect_gradients(dist, plain, 1e-4);
  return sent;
}

void expect_all_reduces(const CollectiveCounts& counts, int64_t calls, const std::string& what) {
  EXPECT_EQ(counts.calls(), calls) << what;
  EXPECT_EQ(counts.all_reduce.calls, calls) << what;
  EXPECT_EQ(counts.bytes_sent(), calls * kActivationBytes) << what;
}

TEST(TensorParallel, ALlamaAsWrittenSendsTwoAllReducesPerLayerAndDirection) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    Llama dist, plain;
    cut(dist, DeviceMesh::over_world(), false);
    const Sent sent = sent_by(world, dist, plain);
    expect_all_reduces(sent.forward, 2 * kLayers, "forward");
    expect_all_reduces(sent.backward, 2 * kLayers, "backward");
  });
}

TEST(TensorParallel, BranchesThatAreAddedAreReducedTogether) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    Llama dist(true), plain(true);
    cut(dist, DeviceMesh::over_world(), false);
    const Sent sent = sent_by(world, dist, plain);
    expect_all_reduces(sent.forward, kLayers, "forward");
    expect_all_reduces(sent.backward, kLayers, "backward");
  });
}

TEST(TensorParallel, ACutEmbeddingIsReducedOnce) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    Llama dist, plain;
    cut(dist, DeviceMesh::over_world(), true);
    const at::Tensor tokens = some_tokens();
    at::Tensor logits;
    const auto forward = count(world, [&] { logits = dist(tokens); });
    EXPECT_EQ(placements_of(logits), Placements{Shard{2}});
    expect_all_reduces(forward, 2 * kLayers + 1, "forward");
    const auto backward = count(world, [&] { logits.square().sum().backward(); });
    // One more, for the whole vocabulary's terms of the gradient of the last norm.
    expect_all_reduces(backward, 2 * kLayers + 1, "backward");
    plain(tokens).square().sum().backward();
    expect_gradients(dist, plain, 1e-3);
  });
}

// With activations that the model cuts along the sequence between the blocks, as in sequence
// parallelism: an all-gather, shared by q, k and v, before the matrices that are cut by columns,
// and a reduce-scatter after those that are cut by rows. In backward it is the other way round.
TEST(TensorParallel, ACutSequenceIsGatheredOncePerBlock) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    Llama dist, plain;
    const DeviceMesh mesh = DeviceMesh::over_world();
    cut(dist, mesh, false);
    const auto loss = [&](Llama& llama) {
      at::Tensor h = llama->tok_embeddings(some_tokens());
      for (const auto& item : *llama->layers) {
        auto& layer = *item->as<LayerImpl>();
        layer.cuts_sequence = true;
        h = layer.forward(layer.placed(h, Shard{1}));
      }
      return llama->norm(h).square().sum();
    };
    const at::Tensor expected = loss(plain);
    expected.backward();
    at::Tensor found;
    const StrictOperators strict;  // placements of the matrices ask for these gathers
    const auto forward = count(world, [&] { found = loss(dist); });
    EXPECT_EQ(forward.all_gather.calls, 2 * kLayers);
    EXPECT_EQ(forward.reduce_scatter.calls, 2 * kLayers);
    EXPECT_EQ(forward.all_to_all.calls, 0);
    const auto backward = count(world, [&] { found.backward(); });
    // One more, of the gradient of the first input.
    EXPECT_EQ(backward.all_gather.calls, 2 * kLayers + 1);
    EXPECT_EQ(backward.reduce_scatter.calls, 2 * kLayers);
    EXPECT_NEAR(full_tensor(found).item<double>(), expected.item<double>(), 1e-3);
    expect_gradients(dist, plain, 1e-3);
  });
}

TEST(TensorParallel, EvaluationSendsWhatForwardDoes) {
  run_world(2, [](World& world) {
    world.set_process_group(counting_process_group(world.process_group()));
    Llama dist;
    cut(dist, DeviceMesh::over_world(), false);
    const at::Tensor tokens = some_tokens();
    const auto sent = count(world, [&] {
      torch::NoGradGuard no_grad;
      dist(tokens);
    });
    expect_all_reduces(sent, 2 * kLayers, "under no_grad");
    const auto inferred = count(world, [&] {
      c10::InferenceMode inference;
      dist(tokens);
    });
    expect_all_reduces(inferred, 2 * kLayers, "in inference mode");
  });
}

TEST(TensorParallel, ALlamaTrainsAsOneProcessDoes) {
  const auto train = [](const DeviceMesh& mesh, bool cuts_vocabulary, int steps) {
    Llama dist, plain;
    cut(dist, mesh, cuts_vocabulary);
    torch::optim::AdamW optimizer(dist->parameters(), 1e-3),
        plain_optimizer(plain->parameters(), 1e-3);
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      plain_optimizer.zero_grad();
      const at::Tensor loss = loss_of(dist, some_tokens()),
                       expected = loss_of(plain, some_tokens());
      loss.backward();
      expected.backward();
      optimizer.step();
      plain_optimizer.step();
      ASSERT_NEAR(full_tensor(loss).item<double>(), expected.item<double>(), 1e-4) << step;
    }
  };
  for (const Transport transport : kTransports)
    run_over(transport, 2, [&](World&) { train(DeviceMesh::over_world(), false, 30); });
  run_world(4, [&](World&) {
    train(DeviceMesh::over_world(), true, 5);
    train(DeviceMesh::over_world({2, 2}), true, 5);
  });
}

}  // namespace tessera::tensor_parallel_test
