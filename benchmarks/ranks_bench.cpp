#include "benchmarks/ranks_bench.h"

#include <fmt/format.h>
#include <tessera/comm/fake_world.h>
#include <tessera/tessera.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>

#include "benchmarks/median.h"
#include "command/exit_code.h"
#include "command/level_names.h"

namespace tessera::tools {
namespace {

// Processor time, not wall-clock time: other programs don't count.
double processor_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

struct RankLayers : torch::nn::Module {
  RankLayers(int count, int width) {
    for (int i = 0; i < count; ++i) {
      const auto options = torch::nn::LinearOptions(width, width).bias(false);
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(options)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

/// Rank 0 of a number of ranks, in training.
class RankJob {
 public:
  RankJob(int ranks, const RanksBenchOptions& options)
      : ranks(ranks),
        net_(std::make_shared<RankLayers>(options.layers, options.width)),
        sharded_(fully_shard(net_, {.level = kLevels.at(options.level),
                                    .unit_bytes = 0,
                                    .process_group = fake_process_group(0, ranks)})),
        sgd_(net_->parameters(), torch::optim::SGDOptions(1e-6)),
        optimizer_(sharded_, sgd_),
        input_(torch::zeros({1, options.width})) {
    for (int step = 0; step < 3; ++step) this->step();
  }

  /// Runs a turn, and appends the milliseconds of one of its steps.
  void turn(int steps) {
    passes_ms_ = optimizer_ms_ = 0;
    for (int i = 0; i < steps; ++i) step();
    passes.push_back(passes_ms_ / steps);
    optimizers.push_back(optimizer_ms_ / steps);
    totals.push_back((passes_ms_ + optimizer_ms_) / steps);
  }

  const int ranks;
  std::vector<double> passes, optimizers, totals;

 private:
  void step() {
    const double start = processor_ms();
    optimizer_.zero_grad();
    net_->forward(input_).sum().backward();
    const double middle = processor_ms();
    optimizer_.step();
    passes_ms_ += middle - start;
    optimizer_ms_ += processor_ms() - middle;
  }

  std::shared_ptr<RankLayers> net_;
  Sharded<RankLayers> sharded_;
  torch::optim::SGD sgd_;
  ShardedOptimizer optimizer_;
  torch::Tensor input_;
  double passes_ms_ = 0, optimizer_ms_ = 0;
};

nlohmann::ordered_json result_of(const RankJob& job) {
  const auto both = [](const std::vector<double>& values) -> nlohmann::ordered_json {
    return {{"median", median_of(values)}, {"least", *std::ranges::min_element(values)}};
  };
  return {{"ranks", job.ranks},
          {"passes_ms", both(job.passes)},
          {"optimizer_ms", both(job.optimizers)},
          {"step_ms", both(job.totals)}};
}

std::string ranks_table(const nlohmann::ordered_json& results) {
  std::string text = fmt::format("{:<14}{:>18}{:>18}{:>18}\n{:<14}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}\n",
                                 "milliseconds", "passes", "optimizer", "step", "ranks", "median",
                                 "least", "median", "least", "median", "least");
  for (const auto& result : results) {
    text += fmt::format("{:<14}", result["ranks"].get<int>());
    for (const char* part : {"passes_ms", "optimizer_ms", "step_ms"}) {
      for (const char* kind : {"median", "least"})
        text += fmt::format("{:>9.3f}", result[part][kind].get<double>());
    }
    text += "\n";
  }
  return text;
}

void check_options(const RanksBenchOptions& options) {
  TORCH_CHECK_VALUE(kLevels.contains(options.level),
                    "[bench ranks] --level must be none, os, os_g or p_g_os; got ", options.level);
  TORCH_CHECK_VALUE(
      options.rounds >= 1 && options.steps >= 1 && options.layers >= 1 && options.width >= 1,
      "[bench ranks] --rounds, --steps, --layers and --width must be at least 1");
}

}  // namespace

int bench_ranks(const RanksBenchOptions& options) {
  check_options(options);
  at::set_num_threads(1);
  std::vector<std::unique_ptr<RankJob>> jobs;
  for (const int ranks : options.ranks) jobs.push_back(std::make_unique<RankJob>(ranks, options));
  for (int round = 0; round < options.rounds; ++round) {
    for (const auto& job : jobs) job->turn(options.steps);
  }
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const auto& job : jobs) results.push_back(result_of(*job));
  const nlohmann::ordered_json report = {
      {"bench", "ranks"},         {"level", options.level},
      {"layers", options.layers}, {"width", options.width},
      {"rounds", options.rounds}, {"steps", options.steps},
      {"results", results},       {"versions", {{"torch", TORCH_VERSION}}}};
  fmt::print("{}\n", options.json ? report.dump() : ranks_table(results));
  return 0;
}

void add_ranks_bench(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<RanksBenchOptions>();
  auto* ranks = bench.add_subcommand(
      "ranks", "processor time of a step by the number of ranks, without messages");
  ranks->option_defaults()->always_capture_default();
  ranks->add_option("--level", options->level, "none, os, os_g or p_g_os");
  ranks->add_option("--ranks", options->ranks, "numbers of ranks");
  ranks->add_option("--layers", options->layers, "layers of the model; each is a unit");
  ranks->add_option("--width", options->width, "rows and columns of a layer's weight");
  ranks->add_option("--rounds", options->rounds, "turns of each number of ranks");
  ranks->add_option("--steps", options->steps, "steps in a turn");
  ranks->add_flag("--json", options->json, "print one line of JSON");
  ranks->callback([options, &exit_code] {
    exit_code = exit_code_of("tessera bench ranks", [&] { return bench_ranks(*options); });
  });
}

}  // namespace tessera::tools
