#include "bench/step_result.h"

#include <numeric>

#include "bench/median.h"

namespace tessera::tools {
namespace {

void append(std::vector<double>& to, const nlohmann::json& numbers) {
  for (const double number : numbers) to.push_back(number);
}

}  // namespace

double RoleResult::turn_median(int turn) const {
  std::vector<double> seconds;
  for (const auto& rank : turns[turn]) append(seconds, rank.at("seconds"));
  return median_of(std::move(seconds));
}

double RoleResult::turn_mean(int turn) const {
  std::vector<double> seconds;
  for (const auto& rank : turns[turn]) append(seconds, rank.at("seconds"));
  return std::reduce(seconds.begin(), seconds.end()) / static_cast<double>(seconds.size());
}

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

}  // namespace tessera::tools
