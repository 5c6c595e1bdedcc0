// Trains the GPT of train_gpt.cpp with its matrices cut over the ranks (tensor parallelism):
//   python scripts/make_corpus.py data/corpus.txt
//   tessera run -n 2 build/dev/examples/tensor_parallel --data data/corpus.txt
//
// The model's code is unchanged. `shard_fn` chooses the placements of parameters; all else follows
// from them. All ranks see the same batches, and every loss is that of one process. With --sequence
// the ranks also shard the positions between the matrices: norms and residuals then take a part of
// the memory on each rank.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fstream>

#include "gpt.h"

namespace paddle = tessera::paddle;
using tessera::Shard;

struct Options : GptOptions {
  std::string data = "data/corpus.txt", losses;
  bool sequence = false, show = false;
  int64_t steps = 100, batch = 8, seed = 1;
  double lr = 1e-3;
};

// Columns of a matrix (rows of LibTorch's weight) give each rank some heads, or some of the hidden
// features; rows of the next matrix turn them into terms of a sum; the ranks add these up.
void shard_fn(const std::string& name, nn::Module& layer, const tessera::DeviceMesh& mesh) {
  auto* linear = layer.as<nn::Linear>();
  if (!linear) return;
  const auto place = [&](Tensor& tensor, Shard shard) {
    tensor = paddle::shard_tensor(tensor, mesh, {shard});
  };
  if (name.ends_with(".qkv")) {  // heads of the queries, of the keys and of the values
    place(linear->weight, {.dim = 0, .split_factor = 3});
    place(linear->bias, {.dim = 0, .split_factor = 3});
  } else if (name.ends_with(".fc")) {
    place(linear->weight, {.dim = 0});
    place(linear->bias, {.dim = 0});
  } else if (name.ends_with(".proj") || name.ends_with(".out")) {
    place(linear->weight, {.dim = 1});
  }
}

void train(const Options& o) {
  const auto world = tessera::init();
  const auto mesh = tessera::DeviceMesh::over_world({}, {"tp"});
  TORCH_CHECK_VALUE(o.heads % world.size() == 0, "[tensor_parallel] --heads must be a multiple of ",
                    "the ", world.size(), " ranks; got ", o.heads);
  tessera::manual_seed(o.seed);
  Gpt gpt(o);
  const auto cut_positions = [&](std::vector<Tensor> inputs, const tessera::DeviceMesh& mesh) {
    return o.sequence ? paddle::shard_tensor(inputs[0], mesh, {Shard{1}}) : inputs[0];
  };
  auto model = paddle::shard_layer(gpt, mesh, shard_fn, cut_positions);
  torch::optim::AdamW adamw(gpt->parameters(), torch::optim::AdamWOptions(o.lr));
  auto optimizer = paddle::shard_optimizer(adamw);
  const auto text = read_bytes(o.data);
  TORCH_CHECK_VALUE(text.size(0) > o.seq + 1, "[tensor_parallel] --data must hold a window; ",
                    "expected over ", o.seq + 1, " bytes, got ", text.size(0));
  std::ofstream losses(world.rank() == 0 ? o.losses : "");
  const auto start = std::chrono::steady_clock::now();
  for (int64_t step = 0; step < o.steps; ++step) {
    const tessera::CommDebug debug;
    const auto rows = windows(text, random_starts(text, o.seq, o.batch, o.seed, step), o.seq);
    optimizer.zero_grad();
    const auto logits = model(rows.narrow(1, 0, o.seq));
    const auto targets = rows.narrow(1, 1, o.seq);
    const auto loss = torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
    loss.backward();
    optimizer.clip_grad_norm_(1.0);
    optimizer.step();
    const double value = loss.item<double>();
    losses << fmt::format("{:.9g}\n", value) << std::flush;
    if (world.rank() != 0) continue;
    if (o.show && step == 0) fmt::print("{}", debug.describe());
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if ((step + 1) % 10 == 0 || step + 1 == o.steps)
      fmt::print("step {}/{}  loss {:.4f}  {:.0f} B/s  {:.0f} s left\n", step + 1, o.steps, value,
                 o.batch * o.seq * (step + 1) / taken.count(),
                 taken.count() / (step + 1) * (o.steps - step - 1));
  }
}

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"Trains a byte-level GPT on a text, its matrices cut over the ranks"};
  const CLI::Validator positive = CLI::PositiveNumber, natural = CLI::NonNegativeNumber;
  app.option_defaults()->always_capture_default();
  app.add_option("--data", o.data, "text to learn from")->check(CLI::ExistingFile);
  app.add_flag("--sequence", o.sequence, "cut the positions between the matrices as well");
  app.add_flag("--show", o.show, "print what the first step sends");
  app.add_option("--losses", o.losses, "file for the loss of each step, one per line");
  app.add_option("--lr", o.lr, "learning rate");
  app.add_option("--steps", o.steps, "steps")->check(positive);
  app.add_option("--batch", o.batch, "windows per step")->check(positive);
  o.add_to(app);
  app.add_option("--seed", o.seed, "of initial values and batches")->check(natural);
  CLI11_PARSE(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    train(o);
  } catch (const c10::Error& error) {
    fmt::print(stderr, "tensor_parallel: {}\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
