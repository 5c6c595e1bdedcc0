// Fine-tunes GPT-2 from the files of Hugging Face, in the precision and on the ranks that there
// are.
//   ./dev example cookbook/gpt2 --model DIRECTORY --tokens train.bin
// DIRECTORY has model.safetensors (or several, with their index), as `save_pretrained` writes them.
// --tokens: token ids as unsigned numbers of 16 bits, as nanoGPT's prepare.py writes them.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <nlohmann/json.hpp>

namespace nn = torch::nn;
using torch::Tensor;

struct Config {
  int64_t width, heads, layers, positions, tokens;
};

Config read_config(const std::string& directory) {
  std::ifstream file(directory + "/config.json");
  TORCH_CHECK_VALUE(file, "[gpt2] --model must be a directory with a config.json; got '", directory,
                    "'");
  const auto json = nlohmann::json::parse(file);
  return {json.at("n_embd"), json.at("n_head"), json.at("n_layer"), json.at("n_positions"),
          json.at("vocab_size")};
}

struct BlockImpl : nn::Module {
  explicit BlockImpl(const Config& c) : heads(c.heads) {
    ln_1 = register_module("ln_1", nn::LayerNorm(nn::LayerNormOptions({c.width})));
    ln_2 = register_module("ln_2", nn::LayerNorm(nn::LayerNormOptions({c.width})));
    qkv = register_module("qkv", nn::Linear(c.width, 3 * c.width));
    out = register_module("out", nn::Linear(c.width, c.width));
    up = register_module("up", nn::Linear(c.width, 4 * c.width));
    down = register_module("down", nn::Linear(4 * c.width, c.width));
  }
  Tensor forward(Tensor x) {
    const auto part = qkv(ln_1(x)).unflatten(-1, {3, heads, -1}).permute({2, 0, 3, 1, 4});
    const auto mixed = torch::scaled_dot_product_attention(part[0], part[1], part[2], {}, 0, true);
    x = x + out(mixed.transpose(1, 2).flatten(-2));
    return x + down(torch::gelu(up(ln_2(x)), "tanh"));
  }
  int64_t heads;
  nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct Gpt2Impl : nn::Module {
  explicit Gpt2Impl(const Config& c) {
    token = register_module("token", nn::Embedding(c.tokens, c.width));
    position = register_module("position", nn::Embedding(c.positions, c.width));
    for (int64_t i = 0; i < c.layers; ++i) blocks->push_back(Block(c));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({c.width})));
  }
  Tensor forward(const Tensor& tokens) {  // (B, T) to logits (B, T, tokens)
    auto x = token(tokens) + position(torch::arange(tokens.size(1)));
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return torch::linear(norm(x), token->weight);  // the head is the embedding
  }
  nn::Embedding token{nullptr}, position{nullptr};
  nn::ModuleList blocks = register_module("blocks", nn::ModuleList());
  nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Gpt2);

// From the names of Hugging Face, whose Conv1D stores weights transposed, to those above. Leaves
// out masks, as they are no weights, and a copy of the embedding.
const tessera::LoadSafetensorsOptions kNames = {
    .rename = {{"^transformer\\.", ""},
               {"^h\\..*\\.attn\\.(masked_)?bias$|^lm_head\\.weight$", ""},
               {"^wte", "token"},
               {"^wpe", "position"},
               {"^h\\.", "blocks."},
               {"^ln_f", "norm"},
               {"attn\\.c_attn", "qkv"},
               {"attn\\.c_proj", "out"},
               {"mlp\\.c_fc", "up"},
               {"mlp\\.c_proj", "down"}},
    .transpose = {"blocks\\..*\\.(qkv|out|up|down)\\.weight"}};

int main(int argc, char** argv) {
  std::string directory, tokens_file, runs = "runs/gpt2";
  int64_t steps = 100, batch = 4, length = 128, save_every = 50;
  double lr = 3e-5;
  bool bfloat16 = false;
  CLI::App app{"Fine-tunes GPT-2"};
  app.add_option("--model", directory, "of Hugging Face")
      ->required()
      ->check(CLI::ExistingDirectory);
  app.add_option("--tokens", tokens_file, "token ids of 16 bits")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--runs", runs, "directory of checkpoints and logs");
  app.add_option("--steps", steps, "in all")->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "windows per step and rank")->check(CLI::PositiveNumber);
  app.add_option("--length", length, "of a window")->check(CLI::PositiveNumber);
  app.add_option("--lr", lr, "highest learning rate");
  app.add_option("--save-every", save_every)->check(CLI::PositiveNumber);
  app.add_flag("--bfloat16", bfloat16, "compute in half precision, with float master weights");
  CLI11_PARSE(app, argc, argv);
  const auto tokens = torch::from_file(tokens_file, false,
                                       std::filesystem::file_size(tokens_file) / 2, torch::kUInt16);
  TORCH_CHECK_VALUE(tokens.numel() > length + 1, "[gpt2] --tokens must have more than ", length + 1,
                    " ids");

  const auto world = tessera::init();
  tessera::manual_seed(1 + world.rank());
  Gpt2 gpt(read_config(directory));
  tessera::ShardPlan plan;
  if (bfloat16) plan.precision.param_dtype = torch::kBFloat16;
  auto model = tessera::fully_shard(gpt, plan);
  torch::optim::AdamW adamw(gpt->parameters(), torch::optim::AdamWOptions(lr));
  tessera::ShardedOptimizer optimizer(model, adamw);
  tessera::LambdaLR schedule(adamw, tessera::warmup_cosine({.warmup = 10, .steps = steps}));

  int64_t step = 0;
  if (const auto latest = tessera::latest_checkpoint(runs)) {
    const auto loaded =
        tessera::load_checkpoint(*latest, model, &optimizer, {.schedulers = {&schedule}});
    step = static_cast<int64_t>(loaded.numbers.at("step"));
  } else {
    tessera::load_safetensors(directory, model, kNames);
  }
  tessera::MetricsLog log(runs, {.first_step = step + 1});
  tessera::ProgressLine progress(steps);
  while (step < steps) {
    const auto begin = torch::randint(tokens.numel() - length - 1, {batch, 1});
    const auto window =
        tokens.view(torch::kShort).index({begin + torch::arange(length + 1)}).to(torch::kLong) &
        0xffff;
    optimizer.zero_grad();
    const auto logits = gpt->forward(window.slice(1, 0, -1)).flatten(0, 1);
    const auto loss =
        torch::cross_entropy_loss(logits.to(torch::kFloat), window.slice(1, 1).flatten());
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
}
