#include "benchmarks/scale_bench.h"

#include <fmt/format.h>
#include <malloc.h>
#include <tessera/base/process_memory.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/fake_world.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/comm/spawn.h>
#include <tessera/engine/sharded_optimizer.h>
#include <tessera/init/deferred_init.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "benchmarks/seconds.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kSmall = 64;  // elements of a tensor where they don't matter
// In the order of the report.
constexpr const char* kQuantities[] = {"wrap s",     "optimizer s",     "first step s",
                                       "step s",     "save s",          "load s",
                                       "describe s", "agreement bytes", "resident bytes"};

using Numbers = std::map<std::string, double>;

struct Model {
  Model(int64_t count, int64_t numel, bool deferred) {
    std::optional<DeferredInit> scope;
    if (deferred) scope.emplace();
    for (int64_t i = 0; i < count; ++i) {
      params.push_back(torch::ones({numel}, torch::requires_grad()));
      named.push_back({fmt::format("p{}", i), params.back()});
    }
  }
  void backward() const {
    std::vector<at::Tensor> sums;
    for (const at::Tensor& param : params) sums.push_back(param.sum());
    at::stack(sums).sum().backward();
  }

  std::vector<at::Tensor> params;
  std::vector<NamedTensor> named;
};

/// Trains a model of `count` tensors with `numel` elements over `group`. A checkpoint is written to
/// `directory`, unless it is empty.
Numbers measure(int64_t count, int64_t numel, const ProcessGroupPtr& group, bool deferred,
                const std::filesystem::path& directory) {
  ::malloc_trim(0);
  const int64_t before = pss_bytes();
  const Model model(count, numel, deferred);
  const auto counting = counting_process_group(group);
  std::optional<ShardedModule> sharded;
  std::optional<ShardedOptimizer> optimizer;
  Numbers numbers;
  numbers["wrap s"] = seconds_of(
      [&] { sharded.emplace(fully_shard(model.named, {}, {.process_group = counting})); });
  const CollectiveCounts counts = counting->counts();  // values are broadcast
  const int64_t agreed = counts.all_reduce.bytes_sent + counts.all_gather.bytes_sent;
  if (agreed > 0) numbers["agreement bytes"] = static_cast<double>(agreed);  // not in shared memory
  torch::optim::AdamW adamw(model.params, torch::optim::AdamWOptions(1e-3));
  numbers["optimizer s"] = seconds_of([&] { optimizer.emplace(*sharded, adamw); });
  const auto step = [&] {
    optimizer->zero_grad();
    model.backward();
    optimizer->step();
  };
  numbers["first step s"] = seconds_of(step);
  numbers["step s"] = seconds_of(step);
  numbers["resident bytes"] = static_cast<double>(std::max<int64_t>(0, pss_bytes() - before));
  numbers["describe s"] = seconds_of([&] { sharded->describe(); });
  if (!directory.empty()) {
    numbers["save s"] = seconds_of([&] { save_checkpoint(directory, *sharded, &*optimizer); });
    numbers["load s"] = seconds_of([&] { load_checkpoint(directory, *sharded, &*optimizer); });
  }
  return numbers;
}

Numbers on_threads(int64_t ranks, int64_t count, const std::filesystem::path& directory) {
  Numbers of_rank_0;
  spawn(static_cast<int>(ranks), [&] {
    const World world = init();
    const Numbers own = measure(count, kSmall, world.process_group(), false, directory);
    if (world.rank() == 0) of_rank_0 = own;
  });
  return of_rank_0;
}

Numbers in_fake_world(int64_t ranks, int64_t count, int64_t numel, bool deferred) {
  return measure(count, numel, fake_process_group(0, static_cast<int>(ranks)), deferred, {});
}

/// The least of each quantity.
Numbers least_of(int rounds, const std::function<Numbers()>& f) {
  Numbers least = f();
  for (int round = 1; round < rounds; ++round)
    for (const auto& [name, value] : f()) least[name] = std::min(least[name], value);
  return least;
}

/// The slope between the first number whose value is measurable and the last. None: there are no
/// two of them.
std::optional<double> exponent_of(const std::vector<int64_t>& sizes,
                                  const std::vector<double>& values, double measurable) {
  const auto first = std::ranges::find_if(values, [&](double v) { return v >= measurable; });
  const auto at = static_cast<size_t>(first - values.begin());
  if (at + 1 >= values.size()) return std::nullopt;
  return std::log(values.back() / *first) /
         std::log(static_cast<double>(sizes.back()) / static_cast<double>(sizes[at]));
}

ordered_json axis_of(const std::string& name, const std::vector<int64_t>& sizes, int rounds,
                     const std::function<Numbers(int64_t)>& f) {
  std::map<std::string, std::vector<double>> values;
  for (const int64_t size : sizes) {
    fmt::print(stderr, "bench scale: {} {}\n", size, name);
    for (const auto& [quantity, value] : least_of(rounds, [&] { return f(size); }))
      values[quantity].push_back(value);
  }
  ordered_json axis{{"axis", name}, {"sizes", sizes}, {"quantities", ordered_json::object()}};
  for (const std::string quantity : kQuantities) {
    const auto found = values.find(quantity);
    if (found == values.end()) continue;
    const auto exponent = exponent_of(sizes, found->second, quantity.ends_with(" s") ? 1e-3 : 1.0);
    axis["quantities"][quantity] = {{"values", found->second},
                                    {"exponent", exponent ? ordered_json(*exponent) : nullptr}};
  }
  return axis;
}

std::string table_of(const ordered_json& axis) {
  auto table = fmt::format("{:<18}", axis["axis"].get<std::string>());
  for (const auto& size : axis["sizes"]) table += fmt::format("{:>12}", size.get<int64_t>());
  table += fmt::format("{:>10}\n", "exponent");
  for (const auto& [name, quantity] : axis["quantities"].items()) {
    table += fmt::format("{:<18}", name);
    for (const auto& value : quantity["values"])
      table += fmt::format("{:>12.4g}", value.get<double>());
    const auto& exponent = quantity["exponent"];
    table += exponent.is_null() ? fmt::format("{:>10}\n", "-")
                                : fmt::format("{:>10.2f}\n", exponent.get<double>());
  }
  return table + "\n";
}

}  // namespace

int bench_scale(const ScaleBenchOptions& options) {
  at::set_num_threads(1);
  const auto directory = options.directory / fmt::format("tessera-scale-{}", ::getpid());
  const auto measured = [&](const std::string& name, const std::vector<int64_t>& sizes,
                            const std::function<Numbers(int64_t)>& f) {
    return axis_of(name, sizes, options.rounds, f);
  };
  const ordered_json report = {
      measured("tensors", options.tensors, [&](int64_t n) { return on_threads(2, n, directory); }),
      measured("elements", options.elements,
               [](int64_t n) { return in_fake_world(1024, 100, n / 100, true); }),
      measured("threads", options.threads, [](int64_t n) { return on_threads(n, 1000, {}); }),
      measured("ranks", options.ranks,
               [](int64_t n) { return in_fake_world(n, 1000, kSmall, false); })};
  std::filesystem::remove_all(directory);
  if (options.json) {
    fmt::print("{}\n", report.dump());
  } else {
    for (const ordered_json& axis : report) fmt::print("{}", table_of(axis));
  }
  return 0;
}

}  // namespace tessera::tools
