// Trains the GPT of train_gpt.cpp with ColossalAI's interface: it is built without memory, kept in
// shards, computed in half precision, and updated in fp32.
//   ./dev example sharded_model
// or, with a text of your own,
//   tessera run -n 2 build/release/examples/sharded_model --data text --dtype fp32 --cpu-offload
//
// Each batch is a pure function of seed and step and is cut over the ranks, so that in fp32 every
// loss is that of one process.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fstream>

#include "gpt.h"

namespace cai = tessera::colossalai;

struct Options : GptOptions {
  std::string data = "data/corpus.txt", losses, memory;
  torch::Dtype dtype = torch::kBFloat16;
  bool cpu_offload = false;
  int64_t steps = 60, batch = 8, seed = 1;
  double lr = 1e-3;
};

// Its parameters are made when the model is sharded, one after the other: no rank has all of them.
Gpt build(const Options& o, const cai::ShardStrategyPtr& strategy, const Tensor& numel) {
  tessera::manual_seed(o.seed);
  cai::ZeroInitContext context(
      torch::kCPU, strategy,
      {.shard_param = true, .model_numel_tensor = numel, .param_dtype = o.dtype});
  return Gpt(o);
}

struct Job {
  // Returns the mean over all ranks of the loss of this rank's windows.
  double step(int64_t number) {
    const auto rows = o.batch / world.size();
    const auto starts = random_starts(text, o.seq, o.batch, o.seed, number);
    const auto own = windows(text, starts.narrow(0, world.rank() * rows, rows), o.seq);
    const auto logits = model.forward(own.narrow(1, 0, o.seq)).to(torch::kFloat);
    const auto targets = own.narrow(1, 1, o.seq);
    const auto loss = torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
    optimizer.zero_grad();
    optimizer.backward(loss);
    optimizer.clip_grad_norm(model, 1.0);
    optimizer.step();
    const auto mean = loss.detach() / world.size();
    world.process_group()->all_reduce(mean, tessera::ReduceOp::kSum, {.subject = "loss"})->wait();
    return mean.item<double>();
  }

  void report() {
    const auto memory = optimizer.sharded().memory();
    const auto [cuda, cpu] = optimizer.get_memory_usage();
    fmt::print("rank {} keeps {} bytes of parameters and {} of fp32 values and optimizer state\n",
               world.rank(), memory.parameters, cuda + cpu);
    if (!o.memory.empty()) model.dump_memory_stats(o.memory);
  }

  void run() {
    std::ofstream losses(world.rank() == 0 ? o.losses : "");
    for (int64_t number = 0; number < o.steps; ++number) {
      const double loss = step(number);
      losses << fmt::format("{:.9g}\n", loss) << std::flush;
      if (world.rank() == 0 && ((number + 1) % 10 == 0 || number + 1 == o.steps))
        fmt::print("step {}/{}  loss {:.4f}  scale {:g}\n", number + 1, o.steps, loss,
                   optimizer.loss_scale());
    }
    report();
  }

  const Options& o;
  const tessera::World& world;
  Tensor text;
  cai::ShardStrategyPtr strategy = std::make_shared<cai::BucketTensorShardStrategy>();
  Tensor numel = torch::zeros({1}, torch::kLong);
  Gpt gpt = build(o, strategy, numel);
  cai::ShardedModelV2<Gpt> model{gpt,
                                 strategy,
                                 {.tensor_placement_policy = o.cpu_offload ? "cpu" : "cuda",
                                  .use_memory_tracer = !o.memory.empty()}};
  cai::HybridAdam adam{gpt->parameters(), cai::CPUAdamOptions(o.lr)};
  cai::ShardedOptimizerV2 optimizer{model, adam, {.cpu_offload = o.cpu_offload}};
};

void train(const Options& o) {
  const auto world = tessera::init();
  TORCH_CHECK_VALUE(o.batch % world.size() == 0, "[sharded_model] --batch is that of all ranks; ",
                    "expected a multiple of ", world.size(), ", got ", o.batch);
  const auto text = read_bytes(o.data);
  TORCH_CHECK_VALUE(text.size(0) > o.seq + 1, "[sharded_model] --data must hold a window; ",
                    "expected over ", o.seq + 1, " bytes, got ", text.size(0));
  Job job{o, world, text};
  if (world.rank() == 0)
    fmt::print("{} parameters, sharded over {} ranks\n", job.numel.item<int64_t>(), world.size());
  job.run();
}

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"Trains a byte-level GPT in half precision, sharded over the ranks"};
  const CLI::Validator positive = CLI::PositiveNumber, natural = CLI::NonNegativeNumber;
  const std::map<std::string, torch::Dtype> dtypes = {
      {"fp16", torch::kHalf}, {"bf16", torch::kBFloat16}, {"fp32", torch::kFloat}};
  app.option_defaults()->always_capture_default();
  app.add_option("--data", o.data, "text to learn from")->check(CLI::ExistingFile);
  app.add_option("--dtype", o.dtype, "of parameters and activations: fp16, bf16 or fp32")
      ->transform(CLI::CheckedTransformer(dtypes))
      ->capture_default_str()
      ->default_str("bf16");
  app.add_flag("--cpu-offload", o.cpu_offload, "keep fp32 values and state in host memory");
  app.add_option("--memory", o.memory, "file for what was in memory during the last step");
  app.add_option("--losses", o.losses, "file for the loss of each step, one per line");
  app.add_option("--lr", o.lr, "learning rate");
  app.add_option("--steps", o.steps, "steps")->check(positive);
  app.add_option("--batch", o.batch, "windows per step, over all ranks")->check(positive);
  o.add_to(app);
  app.add_option("--seed", o.seed, "of initial values and batches")->check(natural);
  CLI11_PARSE(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    train(o);
  } catch (const c10::Error& error) {
    fmt::print(stderr, "sharded_model: {}\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
