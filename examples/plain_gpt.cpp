// Trains the GPT of train_gpt.cpp in one process, by LibTorch alone, with OMP_NUM_THREADS threads.
// Its steps are the same: initial values, batches, schedule, clipping, optimizer. `./dev demo
// --compare` compares the two.
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>

#include "gpt.h"

int main(int argc, char** argv) {
  GptOptions o;
  std::string data = "data/corpus.txt";
  int64_t steps = 400, batch = 16, seed = 1, warmup = 20;
  double lr = 1e-3, clip = 1.0;
  CLI::App app{"Trains a byte-level GPT on a text in one process, by LibTorch alone"};
  app.option_defaults()->always_capture_default();
  app.add_option("--data", data, "text to learn from")->check(CLI::ExistingFile);
  app.add_option("--steps", steps, "steps")->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "windows per step")->check(CLI::PositiveNumber);
  app.add_option("--lr", lr, "highest learning rate");
  app.add_option("--clip", clip, "largest norm of the gradients; 0: any");
  app.add_option("--seed", seed, "of initial values and batches")->check(CLI::NonNegativeNumber);
  o.add_to(app);
  CLI11_PARSE(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);

  torch::manual_seed(seed);
  const auto bytes = read_bytes(data);
  const auto train = bytes.narrow(0, 0, bytes.size(0) - bytes.size(0) / 10);
  Gpt gpt(o);
  torch::optim::AdamW adamw(gpt->parameters(), torch::optim::AdamWOptions(lr));
  Pace pace;
  for (int64_t step = 0; step < steps; ++step) {
    adamw.param_groups()[0].options().set_lr(learning_rate(lr, step, warmup, steps));
    adamw.zero_grad();
    const auto starts = random_starts(train, o.seq, batch, seed, step);
    const auto loss = gpt->loss(windows(train, starts, o.seq));
    loss.backward();
    if (clip > 0) torch::nn::utils::clip_grad_norm_(gpt->parameters(), clip);
    adamw.step();
    const double value = loss.item<double>();
    pace.step_done();
    if ((step + 1) % 10 == 0 || step + 1 == steps)
      fmt::print("step {}/{}  loss {:.4f}\n", step + 1, steps, value);
  }
  const double seconds = pace.seconds_per_step();
  fmt::print("speed: {:.0f} bytes per second on {} threads (median step: {:.4f} s)\n",
             batch * o.seq / seconds, torch::get_num_threads(), seconds);
}
