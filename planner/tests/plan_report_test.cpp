// The plan on paper equals the engine's measurements, to the byte.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/planner/plan_report.h>

#include <numeric>

#include "engine/model/sharded_state.h"
#include "support/models.h"
#include "support/paper_net.h"
#include "support/run_world.h"

namespace tessera {
namespace plan_report_test {

using namespace testing;

// Ranks that send messages, which are counted.
void run_gloo(int size, const std::function<void(World&)>& fn) {
  run_world(size, fn, std::chrono::seconds(60), Transport::kGloo);
}

constexpr Partition kPartitions[] = {Partition::kFlatEven, Partition::kWholeParam};

void expect_same_entry(const CollectiveCounts::Entry& planned,
                       const CollectiveCounts::Entry& measured, const char* kind) {
  EXPECT_EQ(planned.calls, measured.calls) << kind;
  EXPECT_EQ(planned.bytes_sent, measured.bytes_sent) << kind;
}

void expect_same_counts(const CollectiveCounts& planned, const CollectiveCounts& measured) {
  expect_same_entry(planned.all_gather, measured.all_gather, "all_gather");
  expect_same_entry(planned.reduce_scatter, measured.reduce_scatter, "reduce_scatter");
  expect_same_entry(planned.all_reduce, measured.all_reduce, "all_reduce");
  EXPECT_EQ(planned.calls(), measured.calls()) << "other collectives";
}

void expect_same_memory(const ShardMemory& planned, const ShardMemory& measured) {
  EXPECT_EQ(planned.parameters, measured.parameters);
  EXPECT_EQ(planned.gradients, measured.gradients);
  EXPECT_EQ(planned.optimizer_state, measured.optimizer_state);
  EXPECT_EQ(planned.master_weights, measured.master_weights);
  EXPECT_EQ(planned.offloaded, measured.offloaded);
}

// The ranks of a world: `ranks` that shard, and their replicas, each group behind a counter.
struct Groups {
  Groups(World& world, int ranks)
      : shard(counting_process_group(world.hybrid_process_groups(ranks).shard)) {
    if (world.size() > ranks)
      replicate = counting_process_group(world.hybrid_process_groups(ranks).replicate);
  }
  void reset() const {
    shard->reset_counts();
    if (replicate) replicate->reset_counts();
  }
  std::shared_ptr<CountingProcessGroup> shard, replicate;
};

// Takes the order of use that the engine has learned, which sizes do not tell.
void take_order(const ShardedModule& sharded, PlanReportOptions& options) {
  const PassOrder& order = sharded.state()->residency().order();
  options.forward_order = order.forward;
  options.backward_order = order.backward;
}

void expect_plan_is_measured(const Groups& groups, ShardPlan plan,
                             at::ScalarType dtype = at::kFloat) {
  const auto net = seeded(3, [] { return std::make_shared<PaperNet>(); });
  net->to(dtype);
  const auto sizes = parameter_sizes(*net);
  plan.process_group = groups.shard;
  plan.replicate_group = groups.replicate;
  PaperJob<PaperNet> job(net, plan);
  const auto x = torch::ones({2, 13});
  for (int step = 0; step < 2; ++step) job.step(x);
  PlanReportOptions options{.ranks = groups.shard->size(),
                            .replicas = groups.replicate ? groups.replicate->size() : 1,
                            .rank = groups.shard->rank()};
  take_order(job.sharded, options);
  groups.reset();
  job.step(x);
  const PlanReport report = plan_report(sizes, plan, options);
  expect_same_memory(report.rank.memory, job.optimizer->memory());
  expect_same_counts(report.rank.traffic.over_ranks(), groups.shard->counts());
  if (groups.replicate)
    expect_same_counts(report.rank.traffic.over_replicas(), groups.replicate->counts());
  ASSERT_EQ(report.units.size(), job.sharded.state()->units().size());
  for (size_t unit = 0; unit < report.units.size(); ++unit)
    EXPECT_EQ(report.units[unit].nbytes, job.sharded.state()->units()[unit]->layout().nbytes());
}

// Ranks that shard, and replicas.
class PlanReportMatrix : public ::testing::TestWithParam<std::pair<int, int>> {
 protected:
  template <class F>
  void on_all_ranks(F&& f) {
    const auto [ranks, replicas] = GetParam();
    run_gloo(ranks * replicas, [&, ranks = ranks](World& world) { f(Groups(world, ranks)); });
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, PlanReportMatrix,
                         ::testing::Values(std::pair(1, 1), std::pair(2, 1), std::pair(3, 1),
                                           std::pair(4, 1), std::pair(1, 2), std::pair(2, 2),
                                           std::pair(3, 2), std::pair(4, 2)));

TEST_P(PlanReportMatrix, EqualsTheEngineInEveryLevelPartitionAndPrecision) {
  const std::vector<std::pair<at::ScalarType, Precision>> precisions = {
      {at::kFloat, {}},
      {at::kFloat, {.param_dtype = at::kBFloat16}},
      {at::kBFloat16, {.master_dtype = at::kFloat}},
      {at::kBFloat16, {.master_dtype = at::kFloat, .reduce_dtype = at::kFloat}},
      {at::kFloat, {.reduce_dtype = at::kBFloat16, .gather_dtype = at::kBFloat16}}};
  on_all_ranks([&](const Groups& groups) {
    for (const auto level : kAllLevels) {
      for (const auto partition : kPartitions) {
        for (size_t i = 0; i < precisions.size(); ++i) {
          SCOPED_TRACE(fmt::format("level {}, partition {}, precision {}", static_cast<int>(level),
                                   static_cast<int>(partition), i));
          expect_plan_is_measured(groups,
                                  {.level = level,
                                   .partition = partition,
                                   .unit_bytes = 400,
                                   .precision = precisions[i].second},
                                  precisions[i].first);
        }
      }
    }
  });
}

TEST_P(PlanReportMatrix, EqualsTheEngineWithMessagesOf8Bits) {
  if (GetParam().second > 1) return;  // refused with replicas
  on_all_ranks([&](const Groups& groups) {
    for (const auto level : kAllLevels) {
      for (const auto partition : kPartitions) {
        SCOPED_TRACE(fmt::format("level {}", static_cast<int>(level)));
        ShardPlan plan{.level = level, .partition = partition, .unit_bytes = 400};
        plan.precision = {.reduce_dtype = at::kChar, .gather_dtype = at::kFloat8_e4m3fn};
        expect_plan_is_measured(groups, plan, at::kFloat);
        plan.bucket_bytes = 1000;
        plan.precision = {.param_dtype = at::kBFloat16,
                          .reduce_dtype = at::kFloat8_e4m3fn,
                          .error_feedback = false,
                          .gather_dtype = at::kChar};
        expect_plan_is_measured(groups, plan, at::kFloat);
      }
    }
  });
}

TEST_P(PlanReportMatrix, EqualsTheEngineWithEveryOptionOfUnitsAndResidency) {
  const std::vector<ShardPlan> plans = {
      {.unit_bytes = 0},
      {.unit_bytes = 0, .prefetch = 0},
      {.unit_bytes = std::nullopt},
      {.unit_bytes = 300, .resident_bytes = -1},
      {.unit_bytes = 0, .resident_bytes = 500, .prefetch = 2},
      {.unit_bytes = 0, .whole_numel = 50},
      {.unit_bytes = 500, .whole = {"tied", "out.bias"}},
      {.units = {{"norm.weight", "norm.bias"}, {"in.weight", "out.weight"}}},
      {.unit_bytes = 300, .ignored = {"square.weight"}},
      {.partition = Partition::kWholeParam, .unit_bytes = 300, .owners = {{"out.weight", 0}}},
      {.unit_bytes = 0, .bucket_bytes = 600},
      {.unit_bytes = 300, .predivide = 2, .bucket_bytes = 1 << 30},
      {.unit_bytes = 300, .precision = {.param_dtype = at::kBFloat16, .master_only = true}},
      {.unit_bytes = 300, .offload = Offload::kHost},
      {.unit_bytes = 300, .precision = {.param_dtype = at::kBFloat16}, .offload = Offload::kHost}};
  on_all_ranks([&](const Groups& groups) {
    for (size_t i = 0; i < plans.size(); ++i) {
      for (const auto level : {ShardLevel::kOptimizerState, ShardLevel::kParameters}) {
        SCOPED_TRACE(fmt::format("plan {}, level {}", i, static_cast<int>(level)));
        ShardPlan plan = plans[i];
        plan.level = level;
        expect_plan_is_measured(groups, plan);
      }
    }
  });
}

// Where ranks share memory: each counts its shard of the parameters, at every level but kNone.
TEST(PlanReport, EqualsTheMemoryOfRanksThatShareIt) {
  const std::vector<ShardPlan> plans = {
      {},
      {.partition = Partition::kWholeParam, .unit_bytes = 400},
      {.unit_bytes = 400, .precision = {.param_dtype = at::kBFloat16}},
      {.unit_bytes = 300, .precision = {.param_dtype = at::kBFloat16, .master_only = true}},
      {.unit_bytes = 400, .precision = {.gather_dtype = at::kBFloat16}},
      {.unit_bytes = 300, .offload = Offload::kHost},
      {.unit_bytes = 0, .whole_numel = 50}};
  for (const int ranks : {1, 2, 3, 4}) {
    run_arena(ranks, [&](World& world) {
      for (size_t i = 0; i < plans.size() * std::size(kAllLevels); ++i) {
        ShardPlan plan = plans[i / std::size(kAllLevels)];
        plan.level = kAllLevels[i % std::size(kAllLevels)];
        if (plan.whole_numel > 0 && plan.level != ShardLevel::kParameters) continue;
        if (plan.precision.master_only && plan.level != ShardLevel::kParameters) continue;
        SCOPED_TRACE(fmt::format("plan {}, {} ranks", i, ranks));
        const auto net = seeded(3, [] { return std::make_shared<PaperNet>(); });
        const auto sizes = parameter_sizes(*net);
        plan.process_group = counting_process_group(world.process_group());
        PaperJob<PaperNet> job(net, plan);
        for (int step = 0; step < 3; ++step) job.step(torch::ones({2, 13}));
        const PlanReport report =
            plan_report(sizes, plan, {.ranks = ranks, .rank = world.rank(), .shares_memory = true});
        expect_same_memory(report.rank.memory, job.optimizer->memory());
        EXPECT_EQ(report.rank.memory.peak_unsharded, job.optimizer->memory().peak_unsharded);
        EXPECT_EQ(report.rank.traffic.bytes_sent(), 0);
        EXPECT_EQ(report.units.size(), job.sharded.state()->units().size());
      }
    });
  }
}

// Matrices that ranks own, and state that differs by parameter: shards of different sizes.
TEST_P(PlanReportMatrix, EqualsTheEngineWithMuonOnWholeMatrices) {
  const std::vector<std::string> exceptions = {"in.*", "tied"};
  on_all_ranks([&](const Groups& groups) {
    for (const auto level : kAllLevels) {
      for (const auto& precision : {Precision(), Precision{.param_dtype = at::kBFloat16}}) {
        SCOPED_TRACE(fmt::format("level {}", static_cast<int>(level)));
        const auto net = seeded(3, [] { return std::make_shared<PaperNet>(); });
        const auto sizes = parameter_sizes(*net);
        ShardPlan plan{.level = level, .unit_bytes = 400, .precision = precision};
        plan.cuts = muon_cuts(*net, exceptions);
        EXPECT_EQ(muon_cuts(sizes, exceptions), plan.cuts);
        const PlanReportOptions options{
            .ranks = groups.shard->size(), .rank = groups.shard->rank(), .muon = exceptions};
        const PlanReport report = plan_report(sizes, plan, options);
        plan.process_group = groups.shard;
        plan.replicate_group = groups.replicate;
        Muon muon(muon_groups(*net, exceptions, MuonOptions(0.01), MuonOptions(0.01)));
        auto sharded = fully_shard(net, plan);
        ShardedOptimizer optimizer(sharded, muon);
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          net->forward(torch::ones({2, 13})).sum().backward();
          optimizer.step();
        }
        expect_same_memory(report.rank.memory, optimizer.memory());
        const auto& units = sharded.state()->units();
        const std::string table = sharded.describe();
        for (size_t i = 0; i < units.size(); ++i) {
          const PlannedUnit& unit = report.units[i];
          EXPECT_EQ(unit.shards[options.rank], units[i]->layout().shard_numel(options.rank));
          for (const PlannedCut& cut : unit.cuts) {
            EXPECT_GT(unit.shards[cut.owner], 0) << cut.name;
            EXPECT_NE(table.find(fmt::format("{}: whole, on rank {}\n", cut.name, cut.owner)),
                      std::string::npos)
                << table;
          }
        }
        int64_t most = 0;
        for (int rank = 0; rank < options.ranks; ++rank) {
          PlanReportOptions other = options;
          other.rank = rank;
          most = std::max(most, plan_report(sizes, plan, other).rank.kept());
        }
        EXPECT_EQ(report.fullest.kept(), most);
      }
    }
  });
}

TEST(PlanReport, ListsWhereParametersMayBeCut) {
  const std::vector<ParameterSize> sizes = {{{"a"}, {8, 8}}, {{"b"}, {6, 32}}, {{"c"}, {100}}};
  const ShardPlan plan{.cuts = {{"a"}, {"b", Cut::kRows, 2}}};
  const PlanReport report = plan_report(sizes, plan, {.ranks = 2});
  std::vector<std::string> texts;
  for (const PlannedUnit& unit : report.units)
    for (const PlannedCut& cut : unit.cuts) texts.push_back(cut.name + ": " + cut.text);
  EXPECT_EQ(texts, (std::vector<std::string>{"a: whole, on rank 0",
                                             "b: between blocks of 64 elements, which are rows"}));
}

TEST(PlanReport, RefusesWhatCantBeCounted) {
  const int64_t most = 1'000'000'000'000'000'000;
  expect_error([&] { plan_report({{{"a"}, {most, 4}}}, {}); }, {"counted in 64 bits"});
  expect_error([&] { plan_report({{{"a"}, {-1}}}, {}); }, {"0 or more; got -1"});
  expect_error(
      [&] {
        plan_report({{{"a"}, {most}}}, {.partition = Partition::kWholeParam}, {.ranks = 100'000});
      },
      {"counted in 64 bits"});
  expect_error(
      [&] {
        plan_report({{{"w"}, {4}}}, {.outer = OuterStep{.every = 1}});
      },
      {"[plan_report] plan.outer is not supported"});
  // As much as possible: the traffic to a million replicas exceeds 2^63 bytes in all.
  const auto report = plan_report({{{"a"}, {9'000'000'000'000'000}}}, {}, {.replicas = 1 << 20});
  EXPECT_GT(report.rank.traffic.replicate.bytes_sent, 0);
}

TEST(PlanReport, CountsWhatEachRankHasItsOwnOfOnce) {
  for (const int ranks : {1, 2, 3}) {
    run_gloo(ranks, [&](World& world) {
      for (const auto level : kAllLevels) {
        for (const auto partition : kPartitions) {
          expect_plan_is_measured(Groups(world, ranks),
                                  {.level = level,
                                   .partition = partition,
                                   .unit_bytes = 300,
                                   .unreplicated = {"square.weight", "out.bias"},
                                   .bucket_bytes = 600});
        }
      }
    });
  }
}

// A model whose operators use one unit each, in registration order and back, as the plan assumes.
TEST(PlanReport, EqualsThePeakAndTrafficOfALayeredModelWithoutBeingToldItsOrder) {
  for (const int ranks : {1, 2, 3}) {
    run_gloo(ranks, [&](World& world) {
      for (const int prefetch : {0, 1, 3}) {
        for (const int64_t resident : {0, 2000, -1}) {
          const auto counter = counting_process_group(world.process_group());
          const auto net = seeded(3, [] { return std::make_shared<BlockNet>(11, 5); });
          const ShardPlan plan{.units = net->units_of_blocks(),
                               .resident_bytes = resident,
                               .prefetch = prefetch,
                               .process_group = counter};
          const auto sizes = parameter_sizes(*net);
          PaperJob<BlockNet> job(net, plan);
          const auto x = torch::ones({2, 11}).requires_grad_();
          for (int step = 0; step < 3; ++step) job.step(x);
          counter->reset_counts();
          job.step(x);
          const PlanReport report =
              plan_report(sizes, plan, {.ranks = ranks, .rank = world.rank()});
          expect_same_counts(report.rank.traffic.over_ranks(), counter->counts());
          EXPECT_EQ(report.rank.memory.peak_unsharded, job.optimizer->memory().peak_unsharded)
              << "prefetch " << prefetch << ", resident " << resident;
        }
      }
    });
  }
}

TEST(PlanReport, EqualsTheStateOfEachOptimizer) {
  using namespace torch::optim;
  using Make = std::function<std::unique_ptr<Optimizer>(std::vector<torch::Tensor>)>;
  const std::vector<std::pair<int, Make>> makers = {
      {2, [](auto p) { return std::make_unique<Adam>(p); }},
      {3, [](auto p) { return std::make_unique<AdamW>(p, AdamWOptions().amsgrad(true)); }},
      {0, [](auto p) { return std::make_unique<SGD>(p, SGDOptions(0.1)); }},
      {1, [](auto p) { return std::make_unique<SGD>(p, SGDOptions(0.1).momentum(0.9)); }},
      {1, [](auto p) { return std::make_unique<Adagrad>(p); }},
      {2, [](auto p) { return std::make_unique<RMSprop>(p, RMSpropOptions().momentum(0.9)); }}};
  run_gloo(3, [&](World& world) {
    for (const auto& [tensors, make] : makers) {
      const auto net = seeded(3, [] { return std::make_shared<BlockNet>(11, 2); });
      const auto sizes = parameter_sizes(*net);
      auto sharded = fully_shard(net);
      const auto inner = make(net->parameters());
      EXPECT_EQ(state_tensors_of(*inner), tensors);
      ShardedOptimizer optimizer(sharded, *inner);
      net->forward(torch::ones({2, 11})).square().mean().backward();
      optimizer.step();
      const auto report =
          plan_report(sizes, {}, {.ranks = 3, .rank = world.rank(), .state_tensors = tensors});
      EXPECT_EQ(report.rank.memory.optimizer_state, optimizer.memory().optimizer_state);
    }
  });
}

TEST(PlanReport, EqualsTheSmallStateOfCPUAdam) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kByte}) {
    for (const Offload offload : {Offload::kNone, Offload::kHost}) {
      run_gloo(3, [&](World& world) {
        const auto net = seeded(3, [] { return std::make_shared<BlockNet>(37, 3); });
        net->to(at::kBFloat16);
        const auto sizes = parameter_sizes(*net);
        const ShardPlan plan{.unit_bytes = 3000,
                             .cuts = cpu_adam_cuts(),
                             .precision = {.master_dtype = at::kFloat},
                             .offload = offload};
        auto sharded = fully_shard(net, plan);
        CPUAdam inner(net->parameters(), CPUAdamOptions().state_dtype(dtype));
        EXPECT_EQ(state_tensors_of(inner), 2);
        ShardedOptimizer optimizer(sharded, inner);
        net->forward(torch::ones({2, 37}, at::kBFloat16)).square().mean().backward();
        optimizer.step();
        const auto report = plan_report(
            sizes, plan,
            {.ranks = 3, .rank = world.rank(), .state_tensors = 2, .state_dtype = dtype});
        EXPECT_EQ(report.rank.memory.optimizer_state, optimizer.memory().optimizer_state);
        EXPECT_EQ(report.rank.memory.offloaded, optimizer.memory().offloaded);
        EXPECT_GT(report.rank.memory.optimizer_state + report.rank.memory.offloaded, 0);
      });
    }
  }
}

TEST(PlanReport, FindsTheRankThatKeepsMost) {
  const std::vector<ParameterSize> sizes = {{{"small"}, {10}}, {{"large"}, {1000}}, {{"s"}, {10}}};
  const auto report = plan_report(
      sizes, {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam}, {.ranks = 3});
  EXPECT_EQ(report.fullest.rank, 1);
  EXPECT_EQ(report.busiest.rank, 1) << "all others get what it has updated";
  EXPECT_EQ(report.fullest.memory.optimizer_state, 2 * 1000 * 4);
  EXPECT_EQ(report.parameters, 1020);
  EXPECT_EQ(report.units[report.largest_unit].name, "small..s");
}

// The figure in the paper's introduction: 7.5 B parameters, 64 ranks, mixed precision Adam.
TEST(PlanReport, HasTheNumbersOfTheZeroPaper) {
  const auto sizes = made_up_parameter_sizes(7'500'000'000, 32, at::kHalf);
  const std::pair<ShardLevel, double> expected[] = {{ShardLevel::kNone, 120.0e9},
                                                    {ShardLevel::kOptimizerState, 31.40625e9},
                                                    {ShardLevel::kGradients, 16.640625e9},
                                                    {ShardLevel::kParameters, 1.875e9}};
  for (const auto& [level, bytes] : expected) {
    const auto report = plan_report(
        sizes, {.level = level, .precision = {.master_dtype = at::kFloat}}, {.ranks = 64});
    EXPECT_EQ(report.zero_paper_bytes, bytes);
    EXPECT_EQ(report.parameters, 7'500'000'000);
    EXPECT_EQ(report.units.size(), 32U);
  }
}

// Reduced gradients are kept in float; at `kOptimizerState`, too, 1/N of them.
TEST(PlanReport, KeepsWhatTheEngineKeepsBesideTheNumbersOfThePaper) {
  const auto sizes = made_up_parameter_sizes(7'500'000'000, 32, at::kHalf);
  const std::pair<ShardLevel, int64_t> expected[] = {
      {ShardLevel::kNone, int64_t{18} * 7'500'000'000},
      {ShardLevel::kOptimizerState, int64_t{2} * 7'500'000'000 + 16 * 7'500'000'000 / 64},
      {ShardLevel::kGradients, int64_t{2} * 7'500'000'000 + 16 * 7'500'000'000 / 64},
      {ShardLevel::kParameters, 18 * 7'500'000'000 / 64}};
  for (const auto& [level, bytes] : expected) {
    const auto report = plan_report(
        sizes, {.level = level, .precision = {.master_dtype = at::kFloat}}, {.ranks = 64});
    const int64_t padding = 32 * 64 * 64 * 18;  // at most 64 bytes for each unit and rank
    EXPECT_GE(report.rank.kept(), bytes);
    EXPECT_LE(report.rank.kept(), bytes + padding);
  }
}

TEST(PlanReport, RefusesWhatCantBeOrIsNotKnown) {
  const std::vector<ParameterSize> sizes = {{{"a"}, {10}}};
  const auto report = [&](ShardPlan plan, PlanReportOptions options) {
    return [=] { plan_report(sizes, plan, options); };
  };
  expect_error(report({}, {.ranks = 0}), {"options.ranks", "0"});
  expect_error(report({}, {.replicas = 0}), {"options.replicas", "0"});
  expect_error(report({}, {.ranks = 2, .rank = 2}), {"options.rank", "0 to 1", "2"});
  expect_error(report({}, {.state_tensors = -1}), {"state_tensors", "-1"});
  expect_error(report({}, {.forward_order = {1}}), {"forward_order", "0 to 0", "1"});
  expect_error(report({.unit_bytes = -1}, {}), {"unit_bytes", "-1"});
  expect_error(report({.ignored = {"b"}}, {}), {"ignored", "'b'"});
  expect_error(report({.ignored = {"a"}}, {}), {"must have parameters"});
  expect_error(report({.whole = {"b"}}, {}), {"whole", "'b'"});
  expect_error(report({.sync_buffers = true}, {}), {"sync_buffers"});
  expect_error(report({.mesh_dim = 0}, {}), {"mesh_dim"});
  expect_error(report({.memory_budget = 1 << 30}, {}), {"memory_budget", "resident_bytes"});
  expect_error(report({.level = ShardLevel::kNone, .reduce_gradients = false}, {}),
               {"reduce_gradients"});
  expect_error([] { plan_report({{{"a"}, {1}}, {{"a"}, {1}}}, {}); }, {"'a' twice"});
  expect_error([] { plan_report({}, {}); }, {"must have parameters"});
}

}  // namespace plan_report_test
}  // namespace tessera
