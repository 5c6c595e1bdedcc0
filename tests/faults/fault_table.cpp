#include "fault_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace tessera {
namespace {

std::string share(int part, int whole) {
  return whole == 0 ? "-" : fmt::format("{:.0f} %", 100.0 * part / whole);
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// "rank 3 hangs" of several trials are one kind of thing: the first words are enough.
std::string summary_of(const std::vector<std::string>& leftovers) {
  if (leftovers.empty()) return "none";
  std::map<std::string, int> counts;
  for (const std::string& left : leftovers) {
    const bool hangs = left.ends_with(" hangs");
    ++counts[hangs ? "hung ranks" : left.substr(0, left.find(' ')) + " left"];
  }
  std::string text;
  for (const auto& [kind, count] : counts)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, kind);
  return text;
}

}  // namespace

void FaultTable::add(const Cell& cell, const std::vector<Outcome>& outcomes) {
  Outcome sum;
  for (const Outcome& outcome : outcomes) {
    sum.survivors += outcome.survivors;
    sum.named += outcome.named;
    sum.blamed_others += outcome.blamed_others;
    sum.placed += outcome.placed;
    sum.seconds.insert(sum.seconds.end(), outcome.seconds.begin(), outcome.seconds.end());
    sum.leftovers.insert(sum.leftovers.end(), outcome.leftovers.begin(), outcome.leftovers.end());
  }
  const bool has_times = !sum.seconds.empty();
  const bool has_steps = cell.fault->is_in_step();
  rows_.push_back(fmt::format(
      "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {:.0f} | {} |\n", cell.fault->text,
      cell.transport,
      cell.hosts == 1 ? std::to_string(cell.ranks)
                      : fmt::format("{}x{}", cell.hosts, cell.ranks / cell.hosts),
      outcomes.size(), share(sum.named, sum.survivors), share(sum.blamed_others, sum.survivors),
      has_steps ? share(sum.placed, sum.survivors) : "-",
      has_times ? fmt::format("{:.2f}", median_of(sum.seconds)) : "-",
      has_times ? fmt::format("{:.2f}", *std::max_element(sum.seconds.begin(), sum.seconds.end()))
                : "-",
      goal_of(cell.fault->kind), summary_of(sum.leftovers)));
}

std::string FaultTable::text() const {
  std::string text =
      "| fault | transport | ranks | trials | name the culprit | blame another | name step and "
      "collective | "
      "median s | worst s | goal s | left over |\n"
      "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n";
  for (const std::string& row : rows_) text += row;
  return text;
}

}  // namespace tessera
