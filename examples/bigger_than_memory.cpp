// Trains a GPT whose parameters, gradients and optimizer state need more memory than a process may
// use: nothing of it is ever whole on a rank, and what a step does not use is in files.
//   ./dev example bigger_than_memory
// gives each process a cgroup with a limit (scripts/bigger_than_memory.py), and shows that the
// kernel ends the same training by LibTorch alone, `--plain`.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>

#include "gpt.h"

struct Options : TrainingOptions {
  std::string offload = "runs/bigger_than_memory";
  bool plain = false;
};

// A block that keeps only its input, and is computed again in backward.
Tensor run_recomputed(BlockImpl& block, const Tensor& x) {
  return tessera::checkpoint([&block](Tensor input) { return block.forward(input); }, x);
}

void say_step(const Options& o, int64_t step, double loss, const Pace& pace) {
  fmt::print("step {}/{}  loss {:.6f}  {:.1f} s a step\n", step + 1, o.steps, loss,
             pace.seconds_per_step());
}

void train_plain(const Options& o, const Tensor& text) {
  torch::manual_seed(o.seed);
  Gpt gpt(o);
  torch::optim::AdamW adamw(gpt->parameters(), torch::optim::AdamWOptions(o.lr));
  Pace pace;
  for (int64_t step = 0; step < o.steps; ++step) {
    adamw.zero_grad();
    const auto starts = random_starts(text, o.seq, o.batch, o.seed, step);
    const auto loss = gpt->loss(windows(text, starts, o.seq));
    loss.backward();
    adamw.step();
    pace.step_done();
    say_step(o, step, loss.item<double>(), pace);
  }
}

void train_sharded(const Options& o, const Tensor& text) {
  const auto world = tessera::init();
  const bool prints = world.rank() == 0;
  TORCH_CHECK_VALUE(o.batch % world.size() == 0, "[bigger_than_memory] --batch is that of all ",
                    "ranks; expected a multiple of ", world.size(), ", got ", o.batch);
  tessera::manual_seed(o.seed);
  Gpt gpt = [&] {
    tessera::DeferredInit scope;  // values are made when the model is sharded, unit by unit
    return Gpt(o);
  }();
  int64_t numel = 0;
  for (const auto& parameter : gpt->parameters()) numel += parameter.numel();
  auto sharded = tessera::fully_shard(gpt, {.level = tessera::ShardLevel::kParameters,
                                            .offload = tessera::Offload::kDirectory,
                                            .offload_directory = o.offload});
  torch::optim::AdamW adamw(gpt->parameters(), torch::optim::AdamWOptions(o.lr));
  tessera::ShardedOptimizer optimizer(sharded, adamw);
  const auto rows = o.batch / world.size();
  Pace pace;
  for (int64_t step = 0; step < o.steps; ++step) {
    optimizer.zero_grad();
    const auto starts =
        random_starts(text, o.seq, o.batch, o.seed, step).narrow(0, world.rank() * rows, rows);
    const auto loss = gpt->loss(windows(text, starts, o.seq), run_recomputed);
    loss.backward();
    optimizer.step();
    const double mean = tessera::mean_over_ranks(loss.item<double>());
    pace.step_done();
    if (prints) say_step(o, step, mean, pace);
  }
  const auto kept = optimizer.memory();
  if (prints)
    fmt::print(
        "{} parameters need {:.2f} GB with gradients and state; rank 0 keeps {:.2f} GB of "
        "gradients, {:.2f} GB in files, and gathers at most {:.2f} GB at a time\n",
        numel, 16e-9 * numel, 1e-9 * kept.gradients, 1e-9 * kept.offloaded,
        1e-9 * kept.peak_unsharded);
}

int main(int argc, char** argv) {
  Options o;
  o.layers = 12, o.width = 1024, o.heads = 16, o.batch = 2, o.steps = 4, o.lr = 3e-5;
  CLI::App app{"Trains a GPT that is bigger than the memory of a rank"};
  app.option_defaults()->always_capture_default();
  app.add_option("--offload", o.offload, "directory of the files; on a disk, not in memory");
  app.add_flag("--plain", o.plain, "train in one process, by LibTorch alone");
  o.add_to(app);
  CLI11_PARSE(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    const auto text = read_bytes(o.data);
    o.plain ? train_plain(o, text) : train_sharded(o, text);
  } catch (const c10::Error& error) {
    fmt::print(stderr, "bigger_than_memory: {}\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
