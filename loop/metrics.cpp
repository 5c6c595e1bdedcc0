#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/comm/world.h>
#include <tessera/loop/metrics.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "comm/group/blocking_all_reduce.h"

namespace tessera {
namespace {

constexpr CollectiveTag kMetrics{"metrics", Channel::kControl};

void sum(ProcessGroup& ranks, std::vector<double>& values) {
  const at::Tensor tensor = at::tensor(values, at::kDouble);
  blocking_all_reduce(ranks, tensor, ReduceOp::kSum, kMetrics);
  values.assign(tensor.const_data_ptr<double>(), tensor.const_data_ptr<double>() + values.size());
}

// Throws on every rank unless all have the same names: the lengths of messages depend on them.
void check_names(ProcessGroup& ranks, const std::map<std::string, double>& values) {
  if (ranks.size() == 1) return;
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  const auto all = all_gather_bytes(ranks, fmt::format("{}", fmt::join(names, ", ")), kMetrics);
  for (size_t rank = 1; rank < all.size(); ++rank)
    TORCH_CHECK_VALUE(all[rank] == all[0],
                      "[mean_over_ranks] all ranks must pass the same names; rank 0 has ", all[0],
                      ", rank ", rank, " has ", all[rank]);
}

std::map<std::string, double> means(ProcessGroup& ranks,
                                    const std::map<std::string, double>& values, double weight) {
  // A weight that is wrong on one rank makes the sum NaN on all of them.
  const bool is_valid = std::isfinite(weight) && weight >= 0;
  std::vector<double> sums = {is_valid ? weight : std::numeric_limits<double>::quiet_NaN()};
  for (const auto& [name, value] : values) sums.push_back(weight == 0 ? 0 : weight * value);
  sum(ranks, sums);
  TORCH_CHECK_VALUE(!std::isnan(sums[0]),
                    "[mean_over_ranks] weights must be finite and not negative; rank ",
                    ranks.rank(), " has ", weight);
  std::map<std::string, double> result;
  size_t place = 0;
  for (const auto& [name, value] : values) result[name] = sums[++place] / sums[0];
  return result;
}

}  // namespace

std::map<std::string, double> mean_over_ranks(const std::map<std::string, double>& values,
                                              double weight) {
  const ProcessGroupPtr ranks = default_process_group();
  check_names(*ranks, values);
  return means(*ranks, values, weight);
}

double mean_over_ranks(double value, double weight) {
  return means(*default_process_group(), {{"", value}}, weight).at("");
}

double sum_over_ranks(double value) {
  std::vector<double> sums = {value};
  sum(*default_process_group(), sums);
  return sums[0];
}

}  // namespace tessera
