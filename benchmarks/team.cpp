#include "benchmarks/team.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "benchmarks/median.h"

namespace tessera::tools {
namespace {

constexpr std::chrono::seconds kLongestTurn(1800);

using Ranks = std::vector<nlohmann::json>;

/// Returns the numbers of each step under `key`, of all ranks in all `turns`.
std::vector<double> numbers_of(const std::vector<Ranks>& turns, const std::string& key) {
  std::vector<double> numbers;
  for (const Ranks& turn : turns) {
    for (const auto& rank : turn)
      for (const double number : rank.at(nlohmann::json::json_pointer(key)))
        numbers.push_back(number);
  }
  return numbers;
}

template <class Summary>
std::vector<double> each_turn(const std::vector<Ranks>& turns, Summary summary) {
  std::vector<double> result;
  for (const Ranks& turn : turns) result.push_back(summary(numbers_of({turn}, "/seconds")));
  return result;
}

}  // namespace

std::vector<double> RoleResult::turn_medians() const { return each_turn(turns, median_of); }
std::vector<double> RoleResult::turn_means() const { return each_turn(turns, mean_of); }
std::vector<double> RoleResult::seconds() const { return numbers_of(turns, "/seconds"); }
std::vector<double> RoleResult::part_seconds(const std::string& part) const {
  return numbers_of(turns, "/parts/" + part);
}

std::vector<double> ratios_of(std::vector<double> a, const std::vector<double>& b) {
  std::ranges::transform(a, b, a.begin(), std::divides());
  return a;
}

double limit_seconds(const RoleResult& local, int ranks) {
  auto seconds = local.seconds();
  const auto optimizer = local.part_seconds("optimizer");
  for (size_t step = 0; step < seconds.size(); ++step) {
    seconds[step] -= optimizer[step] * (1 - 1.0 / ranks);
  }
  return median_of(std::move(seconds));
}

std::vector<nlohmann::json> Team::ask(const std::string& verb, int64_t number) {
  return tools::ask(workers_, fmt::format("{} {}", verb, number), kLongestTurn);
}

void show_progress(const char* bench, const std::string& text) {
  fmt::print(stderr, "bench {}: {}\n", bench, text);
}

}  // namespace tessera::tools
