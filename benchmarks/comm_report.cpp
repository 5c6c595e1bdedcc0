#include "benchmarks/comm_report.h"

#include <fmt/format.h>
#include <tessera/version.h>
#include <torch/version.h>

#include <algorithm>

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

double bus_factor(const std::string& operation, int ranks) {
  return operation == "broadcast" || operation == "memcpy" ? 1.0 : (ranks - 1.0) / ranks;
}

ordered_json entry(const CommBenchOptions& options,
                   const std::vector<CommMeasurement>& measurements, const CommMeasurement& m) {
  const double algbw = 1e-9 * static_cast<double>(m.bytes) / m.seconds;
  ordered_json result = {
      {"operation", m.operation}, {"by", m.by},
      {"bytes", m.bytes},         {"seconds", m.seconds},
      {"algbw", algbw},           {"busbw", algbw * bus_factor(m.operation, options.ranks)}};
  const auto theirs = std::ranges::find_if(measurements, [&](const CommMeasurement& other) {
    return other.by == "c10d" && other.operation == m.operation && other.bytes == m.bytes;
  });
  if (m.by == "tessera" && theirs != measurements.end()) {
    result["of_c10d"] = m.seconds / theirs->seconds;
  }
  return result;
}

}  // namespace

ordered_json comm_report(const CommBenchOptions& options,
                         const std::vector<CommMeasurement>& measurements) {
  ordered_json results = ordered_json::array();
  for (const CommMeasurement& measurement : measurements) {
    results.push_back(entry(options, measurements, measurement));
  }
  return {{"ranks", options.ranks},
          {"rounds", options.rounds},
          {"backend", "gloo"},
          {"tessera", fmt::format("{}.{}.{}", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR,
                                  TESSERA_VERSION_PATCH)},
          {"libtorch", TORCH_VERSION},
          {"results", std::move(results)}};
}

std::string comm_table(const ordered_json& report) {
  std::string table = fmt::format(
      "Gloo, {} ranks on this machine, median of {} rounds\n"
      "{:<15} {:<8} {:>11} {:>10} {:>11} {:>11} {:>8}\n",
      report["ranks"].get<int>(), report["rounds"].get<int>(), "operation", "by", "bytes",
      "time (ms)", "algbw GB/s", "busbw GB/s", "of c10d");
  int64_t bytes = -1;
  for (const auto& result : report["results"]) {
    if (bytes != result["bytes"].get<int64_t>()) {
      bytes = result["bytes"].get<int64_t>();
      table += "\n";
    }
    const std::string of_c10d =
        result.contains("of_c10d") ? fmt::format("{:.2f}", result["of_c10d"].get<double>()) : "";
    table += fmt::format("{:<15} {:<8} {:>11} {:>10.3f} {:>11.2f} {:>11.2f} {:>8}\n",
                         result["operation"].get<std::string>(), result["by"].get<std::string>(),
                         bytes, 1e3 * result["seconds"].get<double>(),
                         result["algbw"].get<double>(), result["busbw"].get<double>(), of_c10d);
  }
  return table;
}

}  // namespace tessera::tools
