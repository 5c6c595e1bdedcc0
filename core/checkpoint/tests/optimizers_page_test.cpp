// docs/guide/optimizers.md: each row that is of C++ is run.
#include <sstream>

#include "checkpoint/tests/saved_job.h"
#include "support/whole_optimizers.h"

namespace tessera::testing::optimizers_page_test {

using Row = std::map<std::string, std::string>;  // by the table's heads

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream stream(line.substr(1, line.rfind('|') - 1));
  for (std::string cell; std::getline(stream, cell, '|');) {
    const size_t begin = cell.find_first_not_of(' '), end = cell.find_last_not_of(' ');
    cells.push_back(begin == std::string::npos ? "" : cell.substr(begin, end - begin + 1));
  }
  return cells;
}

std::map<std::string, Row> rows_of_page() {
  std::istringstream page(read_text(OPTIMIZERS_PAGE));
  std::vector<std::string> heads;
  std::map<std::string, Row> rows;
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("| ") || line.starts_with("| ---")) continue;
    const auto cells = cells_of(line);
    if (heads.empty()) {
      heads = cells;
      continue;
    }
    EXPECT_EQ(cells.size(), heads.size()) << line;
    for (size_t i = 1; i < heads.size(); ++i) rows[cells[0]][heads[i]] = cells.at(i);
  }
  return rows;
}

// The rows of C++.
std::map<std::string, WholeOptimizer> optimizers() {
  using namespace torch::optim;
  register_whole_optimizers();
  std::map<std::string, WholeOptimizer> all;
  const auto add = [&](const std::string& row, auto make, const std::string& rule = "",
                       const std::vector<CutRule>& cuts = {}) {
    TrainingRun run = mixed_run<Lamb>();
    run.make_optimizer = [=](Net& net) -> std::unique_ptr<Optimizer> {
      return make(net, distinct_parameters(net));
    };
    all[row] = {rule, run, cuts};
  };
  const auto of = [&]<class O>(std::type_identity<O>, auto options) {
    return [=](Net&, const std::vector<at::Tensor>& params) {
      return std::make_unique<O>(params, options);
    };
  };
  add("`AdamW`", of(std::type_identity<AdamW>(), AdamWOptions(1e-2)));
  add("`Adam`", of(std::type_identity<Adam>(), AdamOptions(1e-2)));
  add("`CPUAdam`", of(std::type_identity<CPUAdam>(), CPUAdamOptions(1e-2)));
  add("`CPUAdam` in bfloat16",
      of(std::type_identity<CPUAdam>(), CPUAdamOptions(1e-2).state_dtype(at::kBFloat16)));
  add("`CPUAdam` in 8 bits",
      of(std::type_identity<CPUAdam>(), CPUAdamOptions(1e-2).state_dtype(at::kByte)),
      "`cpu_adam_cuts()`", cpu_adam_cuts());
  add("`SGD` with momentum", of(std::type_identity<SGD>(), SGDOptions(1e-2).momentum(0.9)));
  add("`Adagrad`", of(std::type_identity<Adagrad>(), AdagradOptions(1e-2)));
  add("`RMSprop`", of(std::type_identity<RMSprop>(), RMSpropOptions(1e-2)));
  add("`tessera::Muon`", [](Net& net, const std::vector<at::Tensor>&) {
    return std::make_unique<Muon>(muon_groups(net, {"head*"}));
  });
  add("one's own, such as LAMB", of(std::type_identity<Lamb>(), RateOptions()),
      "`{{\"*\", Cut::kWhole}}`", {{"*", Cut::kWhole}});
  add("one's own that steps each element", of(std::type_identity<Signs>(), RateOptions()));
  add("`LBFGS`", of(std::type_identity<LBFGS>(), LBFGSOptions()));
  return all;
}

// One process.
State train_first(const TrainingRun& run, int steps) {
  const auto net = run.make_net();
  const auto optimizer = run.make_optimizer(*net);
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    rank_loss(*net, global_batch(step, run.rows, run.in, run.out), 0, 1, step).backward();
    optimizer->step();
  }
  return plain_state(*net);
}

void expect_row(World& world, const std::string& name, const Row& row,
                const WholeOptimizer& optimizer, const State& expected,
                const std::filesystem::path& path) {
  EXPECT_EQ(row.at("rule in C++"), optimizer.name) << name;  // the rule
  ShardPlan plan{.unit_bytes = 900, .average = false};
  if (row.at("placement") != "any")
    expect_error([&] { FirstRankJob(optimizer.run, world, plan); },
                 {name == "`CPUAdam` in 8 bits" ? "needs blocks of" : "must be elementwise"});
  if (row.at("placement") == "refused") return;
  plan.cuts = optimizer.cuts;
  FirstRankJob job(optimizer.run, world, plan);
  job.train(0, 3);
  expect_same_state(job.state(), expected, row.at("exact") == "bits" ? 0 : 1e-5, name);
  const OptimizerStateDict dict = full_state_dict(job.optimizer, -1);
  int64_t numel = 0;  // of the first parameter, a square matrix
  for (const auto& [key, value] : dict.state.at(0))
    if (value.isTensor() && value.toTensor().numel() > 1) numel += value.toTensor().numel();
  if (row.at("state per element") != "its own") {
    EXPECT_EQ(numel, std::stoi(row.at("state per element")) * 13 * 13) << name;
  }
  ASSERT_EQ(row.at("checkpoint"), "yes") << name;
  save_checkpoint(path, job.sharded, &job.optimizer);
}

TEST(OptimizersPage, EachRowOfCppIsRun) {
  TESSERA_ON_HOST_ONLY("states of 8 bits are for parameters in host memory");
  const auto rows = rows_of_page();
  const auto all = optimizers();
  for (const auto& [name, row] : rows)
    EXPECT_EQ(row.at("language").starts_with("C++"), all.contains(name)) << name;
  for (const auto& [name, optimizer] : all) {
    ASSERT_TRUE(rows.contains(name)) << name;
    const Row& row = rows.at(name);
    const bool is_refused = row.at("placement") == "refused";
    const State expected = is_refused ? State() : train_first(optimizer.run, 3);
    const ScratchDirectory scratch;
    run_world(3, [&, &name = name, &optimizer = optimizer](World& world) {
      expect_row(world, name, row, optimizer, expected, scratch / "one");
    });
  }
}

}  // namespace tessera::testing::optimizers_page_test
