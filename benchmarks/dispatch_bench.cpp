#include "benchmarks/dispatch_bench.h"

#include <fmt/format.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/torch.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/median.h"
#include "command/exit_code.h"

namespace tessera::tools {
namespace {

using Clock = std::chrono::steady_clock;
using torch::Tensor;

struct Operator {
  std::string name;
  std::function<Tensor(const std::vector<Tensor>&)> run;
  std::vector<std::vector<int64_t>> sizes;
};

std::vector<Operator> operators() {
  return {
      {"add", [](const auto& x) { return x[0] + x[1]; }, {{16, 16}, {16, 16}}},
      {"add_", [](const auto& x) { return x[0].add_(x[1]); }, {{16, 16}, {16, 16}}},
      {"mm", [](const auto& x) { return torch::mm(x[0], x[1]); }, {{16, 16}, {16, 16}}},
      {"addmm",
       [](const auto& x) { return torch::addmm(x[0], x[1], x[2]); },
       {{16}, {16, 16}, {16, 16}}},
      {"view",
       [](const auto& x) {
         return x[0].view({4, 64});
       },
       {{16, 16}}},
      {"transpose", [](const auto& x) { return x[0].transpose(0, 1); }, {{16, 16}}},
      {"gelu", [](const auto& x) { return torch::gelu(x[0]); }, {{16, 16}}},
      {"layer_norm",
       [](const auto& x) { return torch::layer_norm(x[0], {16}, x[1], x[2]); },
       {{16, 16}, {16}, {16}}},
      {"sum", [](const auto& x) { return x[0].sum(); }, {{16, 16}}},
      {"softmax", [](const auto& x) { return torch::softmax(x[0], 1); }, {{16, 16}}},
  };
}

double microseconds_per_call(const Operator& op, const std::vector<Tensor>& inputs, int calls) {
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) op.run(inputs);
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / calls;
}

nlohmann::ordered_json measure(const Operator& op, const DispatchBenchOptions& options) {
  torch::NoGradGuard no_grad;
  const auto mesh = DeviceMesh::over_world();
  std::vector<Tensor> plain, dist;
  for (const auto& sizes : op.sizes) {
    plain.push_back(torch::rand(sizes));
    // The first tensor is sharded by rows if it is a matrix; the others are replicated.
    dist.push_back(
        distribute(plain.back().clone(), mesh,
                   {sizes.size() == 2 && dist.empty() ? Placement(Shard{0}) : Replicate{}}));
  }
  std::vector<double> plain_times, dist_times;
  microseconds_per_call(op, dist, options.calls);
  for (int round = 0; round < options.rounds; ++round) {
    plain_times.push_back(microseconds_per_call(op, plain, options.calls));
    dist_times.push_back(microseconds_per_call(op, dist, options.calls));
  }
  const double plain_median = median_of(plain_times), dist_median = median_of(dist_times);
  return {{"operator", op.name},
          {"plain_us", plain_median},
          {"dist_us", dist_median},
          {"beyond_us", dist_median - plain_median}};
}

std::string dispatch_table(const nlohmann::ordered_json& results) {
  std::string text =
      fmt::format("{:<14}{:>12}{:>12}{:>12}\n", "microseconds", "plain", "DistTensor", "beyond");
  for (const auto& result : results)
    text += fmt::format("{:<14}{:>12.2f}{:>12.2f}{:>12.2f}\n",
                        result["operator"].get<std::string>(), result["plain_us"].get<double>(),
                        result["dist_us"].get<double>(), result["beyond_us"].get<double>());
  return text;
}

}  // namespace

int bench_dispatch(const DispatchBenchOptions& options) {
  TORCH_CHECK_VALUE(options.rounds >= 1 && options.calls >= 1,
                    "[bench dispatch] --rounds and --calls must be at least 1; got ",
                    options.rounds, " and ", options.calls);
  at::set_num_threads(1);
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const Operator& op : operators()) results.push_back(measure(op, options));
  const nlohmann::ordered_json report = {{"bench", "dispatch"},
                                         {"rounds", options.rounds},
                                         {"calls", options.calls},
                                         {"operators", results},
                                         {"versions", {{"torch", TORCH_VERSION}}}};
  fmt::print("{}\n", options.json ? report.dump() : dispatch_table(results));
  return 0;
}

void add_dispatch_bench(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<DispatchBenchOptions>();
  auto* dispatch = bench.add_subcommand(
      "dispatch", "processor time of an operator on DistTensors beyond that of the plain one");
  dispatch->option_defaults()->always_capture_default();
  dispatch->add_option("--rounds", options->rounds, "turns of each operator");
  dispatch->add_option("--calls", options->calls, "calls in a turn");
  dispatch->add_flag("--json", options->json, "print one line of JSON");
  dispatch->callback([options, &exit_code] {
    exit_code = exit_code_of("tessera bench dispatch", [&] { return bench_dispatch(*options); });
  });
}

}  // namespace tessera::tools
