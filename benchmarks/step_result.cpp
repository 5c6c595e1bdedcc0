#include "benchmarks/step_result.h"

#include "benchmarks/median.h"

namespace tessera::tools {
namespace {

void append(std::vector<double>& to, const nlohmann::json& numbers) {
  for (const double number : numbers) to.push_back(number);
}

std::vector<double> seconds_of(const std::vector<nlohmann::json>& ranks) {
  std::vector<double> seconds;
  for (const auto& rank : ranks) append(seconds, rank.at("seconds"));
  return seconds;
}

}  // namespace

double RoleResult::turn_median(int turn) const { return median_of(seconds_of(turns[turn])); }

double RoleResult::turn_mean(int turn) const { return mean_of(seconds_of(turns[turn])); }

std::vector<double> RoleResult::seconds() const {
  std::vector<double> all;
  for (const auto& turn : turns) {
    for (const auto& rank : turn) append(all, rank.at("seconds"));
  }
  return all;
}

std::vector<double> RoleResult::part_seconds(const std::string& part) const {
  std::vector<double> all;
  for (const auto& turn : turns) {
    for (const auto& rank : turn) append(all, rank.at("parts").at(part));
  }
  return all;
}

double limit_seconds(const RoleResult& local, int ranks) {
  auto seconds = local.seconds();
  const auto optimizer = local.part_seconds("optimizer");
  for (size_t step = 0; step < seconds.size(); ++step) {
    seconds[step] -= optimizer[step] * (1 - 1.0 / ranks);
  }
  return median_of(std::move(seconds));
}

}  // namespace tessera::tools
