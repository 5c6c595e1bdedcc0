// LoRA (arXiv 2106.09685): low-rank updates are trained beside the frozen weights of a Llama.
//   ./dev example cookbook/lora
// The frozen weights, random ones without --base, have no gradients and no optimizer state.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fstream>

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kWidth = 128, kHeads = 4, kHidden = 344, kLayers = 2, kSeq = 64, kRank = 4;

// y = W x + B A x, where W is frozen; B starts as zeros.
struct LoraLinearImpl : nn::Module {
  LoraLinearImpl(int64_t in, int64_t out) {
    weight = register_parameter("weight", torch::randn({out, in}) * 0.02, /*requires_grad=*/false);
    lora_a = register_parameter("lora_a", torch::randn({kRank, in}) / std::sqrt(in));
    lora_b = register_parameter("lora_b", torch::zeros({out, kRank}));
  }
  Tensor forward(const Tensor& x) {
    return torch::linear(x, weight) + torch::linear(torch::linear(x, lora_a), lora_b);
  }
  Tensor weight, lora_a, lora_b;
};
TORCH_MODULE(LoraLinear);

struct RMSNormImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    return x * (x.square().mean(-1, true) + 1e-5).rsqrt() * weight;
  }
  Tensor weight = register_parameter("weight", torch::ones({kWidth}), /*requires_grad=*/false);
};
TORCH_MODULE(RMSNorm);

// Turns pairs of numbers (i, i + half) by angles that grow with the position.
Tensor rotated(const Tensor& x) {
  const int64_t half = x.size(-1) / 2;
  const auto rates = torch::pow(10000, -torch::arange(half) / static_cast<double>(half));
  const auto angle = torch::outer(torch::arange(x.size(-2)), rates);
  const auto a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  return torch::cat({a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()}, -1);
}

struct BlockImpl : nn::Module {
  Tensor forward(Tensor x) {
    const auto h = attention_norm(x);
    const auto heads = [&](const Tensor& y) {
      return y.unflatten(-1, {kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    const auto mixed = torch::scaled_dot_product_attention(
        rotated(heads(wq(h))), rotated(heads(wk(h))), heads(wv(h)), {}, 0, true);
    x = x + wo(mixed.transpose(1, 2).flatten(-2));
    const auto f = ffn_norm(x);
    return x + w2(torch::silu(w1(f)) * w3(f));
  }
  RMSNorm attention_norm = register_module("attention_norm", RMSNorm()),
          ffn_norm = register_module("ffn_norm", RMSNorm());
  LoraLinear wq = register_module("wq", LoraLinear(kWidth, kWidth)),
             wk = register_module("wk", LoraLinear(kWidth, kWidth));
  LoraLinear wv = register_module("wv", LoraLinear(kWidth, kWidth)),
             wo = register_module("wo", LoraLinear(kWidth, kWidth));
  LoraLinear w1 = register_module("w1", LoraLinear(kWidth, kHidden)),
             w3 = register_module("w3", LoraLinear(kWidth, kHidden));
  LoraLinear w2 = register_module("w2", LoraLinear(kHidden, kWidth));
};
TORCH_MODULE(Block);

struct LlamaImpl : nn::Module {
  LlamaImpl() {
    for (int64_t i = 0; i < kLayers; ++i) layers->push_back(Block());
    tok_embeddings->weight.requires_grad_(false);
  }
  Tensor loss(const Tensor& bytes) {  // of each byte by those before it
    auto x = tok_embeddings(bytes.slice(1, 0, -1));
    for (const auto& layer : *layers) x = layer->as<BlockImpl>()->forward(x);
    return torch::cross_entropy_loss(output(norm(x)).flatten(0, 1), bytes.slice(1, 1).flatten());
  }
  nn::Embedding tok_embeddings = register_module("tok_embeddings", nn::Embedding(256, kWidth));
  nn::ModuleList layers = register_module("layers", nn::ModuleList());
  RMSNorm norm = register_module("norm", RMSNorm());
  LoraLinear output = register_module("output", LoraLinear(kWidth, 256));
};
TORCH_MODULE(Llama);

int main(int argc, char** argv) {
  std::string data = "data/corpus.txt", base, runs = "runs/lora";
  int64_t steps = 200, batch = 8, save_every = 100;
  CLI::App app{"Trains low-rank updates of a frozen Llama"};
  app.add_option("--data", data, "text to learn from")->check(CLI::ExistingFile);
  app.add_option("--base", base, "frozen weights: a file of safetensors or its directory");
  app.add_option("--runs", runs, "directory of checkpoints and logs");
  app.add_option("--steps", steps, "in all")->check(CLI::PositiveNumber);
  app.add_option("--save-every", save_every)->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "windows per step and rank")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  std::ifstream file(data, std::ios::binary);
  const std::vector<uint8_t> text((std::istreambuf_iterator<char>(file)), {});
  const auto bytes = torch::tensor(text, torch::kByte);
  TORCH_CHECK_VALUE(bytes.numel() > kSeq + 1, "[lora] --data must have more than ", kSeq + 1,
                    " bytes");

  const auto world = tessera::init();
  tessera::manual_seed(1 + world.rank());
  Llama llama;
  auto model = tessera::fully_shard(llama);
  if (!base.empty())
    tessera::load_safetensors(base, model, {.allow_missing = true});  // it has no lora_*
  std::vector<Tensor> trained;
  for (const auto& parameter : llama->parameters())
    if (parameter.requires_grad()) trained.push_back(parameter);
  torch::optim::AdamW adamw(trained, torch::optim::AdamWOptions(1e-2).weight_decay(0));
  tessera::ShardedOptimizer optimizer(model, adamw);
  tessera::LambdaLR schedule(adamw, tessera::warmup_linear({.warmup = 10, .steps = steps}));

  int64_t step = 0;
  if (const auto latest = tessera::latest_checkpoint(runs))
    step = static_cast<int64_t>(
        tessera::load_checkpoint(*latest, model, &optimizer, {.schedulers = {&schedule}})
            .numbers.at("step"));
  tessera::MetricsLog log(runs, {.first_step = step + 1});
  tessera::ProgressLine progress(steps);
  while (step < steps) {
    const auto begin = torch::randint(bytes.numel() - kSeq - 1, {batch, 1});
    const auto windows = bytes.index({begin + torch::arange(kSeq + 1)}).to(torch::kLong);
    optimizer.zero_grad();
    const auto loss = llama->loss(windows);
    loss.backward();
    optimizer.clip_grad_norm_(1);
    optimizer.step();
    schedule.step();
    const double mean = tessera::mean_over_ranks(loss.item<double>());
    log.write(++step, {{"loss", mean}, {"lr", adamw.param_groups()[0].options().get_lr()}});
    progress.show(step, fmt::format("loss {:.3f}", mean));
    if (step % save_every == 0 || step == steps)
      tessera::save_checkpoint(
          fmt::format("{}/step-{}", runs, step), model, &optimizer,
          {.numbers = {{"step", double(step)}}, .schedulers = {&schedule}, .keep_last = 2});
  }
  // The updates alone, for load_state_dict(): a few per cent of the model.
  tessera::StateDict updates;
  for (const auto& [name, value] : model.full_state())
    if (name.find("lora_") != std::string::npos) updates[name] = value;
  tessera::save_state_dict(runs + "/updates", updates);
  const auto memory = optimizer.memory();
  fmt::print("rank {} keeps {} bytes of parameters and {} of optimizer state\n", world.rank(),
             memory.parameters, memory.optimizer_state);
}
