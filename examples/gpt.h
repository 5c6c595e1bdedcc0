#pragma once

// A byte-level GPT in plain torch::nn code. Several examples train it.
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace nn = torch::nn;
using torch::Tensor;

struct GptOptions {
  int64_t seq = 128, layers = 4, width = 256, heads = 4;
  std::string device = "cpu";

  void add_to(CLI::App& app) {
    app.add_option("--seq", seq, "bytes per window")->check(CLI::PositiveNumber);
    app.add_option("--layers", layers, "transformer blocks")->check(CLI::PositiveNumber);
    app.add_option("--width", width, "numbers per byte inside the model")
        ->check(CLI::PositiveNumber);
    app.add_option("--heads", heads, "attention heads")->check(CLI::PositiveNumber);
  }
};

/// The options of train_gpt.cpp and plain_gpt.cpp: both train in the same way, by default.
struct TrainingOptions : GptOptions {
  std::string data = "data/corpus.txt";
  int64_t steps = 400, batch = 16, seed = 1, warmup = 20;
  double lr = 1e-3, clip = 1.0;

  void add_to(CLI::App& app) {
    app.add_option("--data", data, "text to learn from")->check(CLI::ExistingFile);
    app.add_option("--lr", lr, "highest learning rate");
    app.add_option("--clip", clip, "largest norm of the gradients; 0: any");
    app.add_option("--steps", steps, "steps in all")->check(CLI::PositiveNumber);
    app.add_option("--batch", batch, "windows per step, over all ranks")
        ->check(CLI::PositiveNumber);
    app.add_option("--seed", seed, "of all random numbers")->check(CLI::NonNegativeNumber);
    GptOptions::add_to(app);
  }
};

struct BlockImpl : nn::Module {
  BlockImpl(int64_t width, int64_t heads) : width(width), heads(heads) {}

  Tensor forward(Tensor x) {
    const auto rows = x.size(0), length = x.size(1);
    const auto split = qkv(ln1(x)).view({rows, length, 3, heads, width / heads});
    const auto part = split.permute({2, 0, 3, 1, 4});  // queries, keys, values
    const auto mixed = torch::scaled_dot_product_attention(part[0], part[1], part[2], {}, 0, true);
    x = x + proj(mixed.transpose(1, 2).reshape({rows, length, width}));
    return x + out(torch::gelu(fc(ln2(x))));
  }

  int64_t width, heads;
  nn::LayerNorm ln1 = register_module("ln1", nn::LayerNorm(nn::LayerNormOptions({width})));
  nn::Linear qkv = register_module("qkv", nn::Linear(width, 3 * width));
  nn::Linear proj = register_module("proj", nn::Linear(width, width));
  nn::LayerNorm ln2 = register_module("ln2", nn::LayerNorm(nn::LayerNormOptions({width})));
  nn::Linear fc = register_module("fc", nn::Linear(width, 4 * width));
  nn::Linear out = register_module("out", nn::Linear(4 * width, width));
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  explicit GptImpl(const GptOptions& o) : o(o) {
    for (int64_t i = 0; i < o.layers; ++i) blocks->push_back(Block(o.width, o.heads));
    torch::NoGradGuard no_grad;
    for (auto& parameter : named_parameters()) {
      if (parameter.value().dim() == 2) parameter.value().normal_(0, 0.02);
    }
    if (!device.is_cpu()) to(device);
  }

  /// Returns a block's output for `x`.
  using RunBlock = std::function<Tensor(BlockImpl& block, const Tensor& x)>;
  static Tensor run_block(BlockImpl& block, const Tensor& x) { return block.forward(x); }

  Tensor forward(const Tensor& bytes, const RunBlock& run = run_block) {
    auto x = tok(bytes.to(device)) + pos(torch::arange(bytes.size(1), device));
    for (auto& block : *blocks) x = run(*block->as<Block>(), x);
    return head(ln_f(x));
  }

  /// Returns the mean cross entropy, in nats per byte, of each window's bytes given those before
  /// them.
  Tensor loss(const Tensor& windows, const RunBlock& run = run_block) {
    const auto logits = forward(windows.narrow(1, 0, o.seq), run).to(torch::kFloat);
    const auto next = windows.narrow(1, 1, o.seq).to(device);
    return torch::cross_entropy_loss(logits.flatten(0, 1), next.flatten());
  }

  GptOptions o;
  torch::Device device{o.device};
  nn::Embedding tok = register_module("tok", nn::Embedding(256, o.width));
  nn::Embedding pos = register_module("pos", nn::Embedding(o.seq, o.width));
  nn::ModuleList blocks = register_module("blocks", nn::ModuleList());
  nn::LayerNorm ln_f = register_module("ln_f", nn::LayerNorm(nn::LayerNormOptions({o.width})));
  nn::Linear head = register_module("head", nn::Linear(o.width, 256));
};
TORCH_MODULE(Gpt);

inline Tensor read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string all((std::istreambuf_iterator<char>(file)), {});
  return torch::from_blob(all.data(), {std::ssize(all)}, torch::kByte).to(torch::kLong);
}

/// Returns windows of `seq` bytes and the byte after each, by where they start.
inline Tensor windows(const Tensor& bytes, const Tensor& starts, int64_t seq) {
  return bytes.index({starts.unsqueeze(1) + torch::arange(seq + 1)});
}

/// Returns where the windows of a step start: a pure function of seed and step.
inline Tensor random_starts(const Tensor& bytes, int64_t seq, int64_t count, int64_t seed,
                            int64_t step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed * 1'000'003 + step);
  return torch::randint(bytes.size(0) - seq, {count}, generator, torch::kLong);
}

/// A linear warm-up, then a cosine down to a tenth.
inline double learning_rate(const TrainingOptions& o, int64_t step) {
  if (step < o.warmup) return o.lr * (step + 1) / o.warmup;
  const double done = double(step - o.warmup) / std::max<int64_t>(1, o.steps - o.warmup);
  return o.lr * (0.55 + 0.45 * std::cos(M_PI * done));
}

/// The speed of a training loop: the median of its steps. The first, slower ones don't count if
/// there are enough others; steps that evaluate or save are too few to matter.
class Pace {
 public:
  void step_done() {
    const auto last = std::exchange(last_, Clock::now());
    seconds_.push_back(std::chrono::duration<double>(last_ - last).count());
  }

  /// 0 before the first step.
  double seconds_per_step() const {
    if (seconds_.empty()) return 0;
    std::vector<double> counted(seconds_.begin() + (seconds_.size() > 2 * kFirst ? kFirst : 0),
                                seconds_.end());
    const auto middle = counted.begin() + counted.size() / 2;
    std::nth_element(counted.begin(), middle, counted.end());
    return *middle;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kFirst = 5;
  Clock::time_point last_ = Clock::now();
  std::vector<double> seconds_;
};
