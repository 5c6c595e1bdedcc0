#include "benchmarks/comm_bench.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "benchmarks/comm_report.h"
#include "launcher/launch.h"

namespace tessera::tools {
namespace {

void check_options(const CommBenchOptions& options) {
  TORCH_CHECK_VALUE(options.ranks >= 1, "[bench comm] --ranks must be at least 1, got ",
                    options.ranks);
  TORCH_CHECK_VALUE(options.rounds >= 1, "[bench comm] --rounds must be at least 1, got ",
                    options.rounds);
  TORCH_CHECK_VALUE(!options.sizes.empty(), "[bench comm] --sizes must name a size");
  for (const int size : options.sizes) {
    TORCH_CHECK_VALUE(size >= 1 && size <= 4096,
                      "[bench comm] --sizes must be from 1 to 4096 MiB, got ", size);
  }
}

std::vector<CommMeasurement> read_measurements(const std::string& line) {
  std::vector<CommMeasurement> measurements;
  for (const auto& entry : nlohmann::json::parse(line)) {
    measurements.push_back(
        {entry.at("operation"), entry.at("by"), entry.at("bytes"), entry.at("seconds")});
  }
  return measurements;
}

}  // namespace

int bench_comm(const CommBenchOptions& options) {
  check_options(options);
  std::string numbers;
  LaunchOptions launch_options;
  launch_options.ranks = options.ranks;
  launch_options.command = {std::filesystem::read_symlink("/proc/self/exe").string(),
                            "bench",
                            "comm-worker",
                            "--sizes",
                            fmt::format("{}", fmt::join(options.sizes, ",")),
                            "--rounds",
                            std::to_string(options.rounds)};
  launch_options.environment = {{"OMP_NUM_THREADS", "1"}};
  launch_options.on_stdout = [&](int rank, std::string_view line) {
    if (rank == 0) {
      numbers += line;
    }
  };
  if (const int status = launch(launch_options); status != 0) {
    return status;
  }
  const auto report = comm_report(options, read_measurements(numbers));
  fmt::print("{}", options.json ? report.dump() + "\n" : comm_table(report));
  return 0;
}

}  // namespace tessera::tools
