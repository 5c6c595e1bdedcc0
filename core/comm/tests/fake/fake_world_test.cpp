// A rank of a fake world does the same as that rank of a real one.
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <tessera/comm/fake_world.h>
#include <tessera/comm/process_group_decorators.h>

#include <fstream>

#include "support/models.h"
#include "support/paper_net.h"

namespace tessera::testing::fake_world_test {

const CollectiveTag kTag{"test", Channel::kControl};

// --- worlds
// ------------------------------------------------------------------------------------------------

TEST(FakeWorld, IsTheDefaultWorldAndHasPartsOfItsOwn) {
  const auto world = fake_world(1024, 17);
  EXPECT_EQ(default_process_group(), world.process_group());
  EXPECT_EQ(world.rank(), 17);
  EXPECT_EQ(world.size(), 1024);
  EXPECT_EQ(world.new_process_group({0, 1}), nullptr);
  const auto groups = world.hybrid_process_groups(8);
  EXPECT_EQ(groups.shard->rank(), 1);
  EXPECT_EQ(groups.shard->size(), 8);
  EXPECT_EQ(groups.replicate->rank(), 2);
  EXPECT_EQ(groups.replicate->size(), 128);
  const auto mesh = DeviceMesh::over_world({128, 8}, {"dp", "tp"});
  EXPECT_EQ(mesh.process_group(mesh.dim("dp"))->size(), 128);
  EXPECT_EQ(mesh.process_group(mesh.dim("tp"))->rank(), 1);
  EXPECT_EQ(all_gather_bytes(*world.process_group(), "same", kTag),
            std::vector<std::string>(1024, "same"));
}

TEST(FakeWorld, DistTensorsOfItAreCutAsInARealOne) {
  const auto world = fake_world(1024, 1023);
  const auto mesh = DeviceMesh::over_world();
  const auto rows = distribute(torch::ones({2048, 3}), mesh, {Shard{0}});
  EXPECT_EQ(to_local(rows).sizes(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(full_tensor(rows.sum()).item<double>(), 2048 * 3);
}

// The collectives of a rank's first steps: name, subject, channel and bytes, in order.
using Trace = std::vector<std::tuple<std::string, std::string, int, int64_t>>;

struct Observed {
  Trace trace;
  CollectiveCounts counts;
  ShardMemory memory;
};

bool same(const CollectiveCounts& a, const CollectiveCounts& b) {
  const auto same_entry = [](const auto& x, const auto& y) {
    return x.calls == y.calls && x.bytes_sent == y.bytes_sent;
  };
  return same_entry(a.all_gather, b.all_gather) && same_entry(a.reduce_scatter, b.reduce_scatter) &&
         same_entry(a.all_reduce, b.all_reduce) && same_entry(a.broadcast, b.broadcast) &&
         same_entry(a.barrier, b.barrier) && same_entry(a.all_to_all, b.all_to_all);
}

Observed observe(const ProcessGroupPtr& group, ShardPlan plan) {
  const auto counter = counting_process_group(group);
  const auto tracer = tracing_process_group(counter, 10'000);
  plan.process_group = tracer;
  PaperJob<PaperNet> job(seeded(3, [] { return std::make_shared<PaperNet>(); }), plan);
  for (int step = 0; step < 2; ++step) {
    job.step(torch::ones({2, 13}));
    job.optimizer->clip_grad_norm_(1.0);
  }
  Observed observed{.counts = counter->counts(), .memory = job.optimizer->memory()};
  for (const CollectiveRecord& record : tracer->records()) {
    observed.trace.emplace_back(record.name, record.subject, static_cast<int>(record.channel),
                                record.bytes);
  }
  return observed;
}

TEST(FakeWorld, ARankIssuesTheCollectivesOfThatRankOfARealWorldInTheirOrder) {
  const std::vector<ShardPlan> plans = {
      {.level = ShardLevel::kNone, .unit_bytes = 300},
      {.level = ShardLevel::kOptimizerState, .unit_bytes = 300},
      {.level = ShardLevel::kGradients, .partition = Partition::kWholeParam, .unit_bytes = 300},
      {.unit_bytes = 300},
      {.unit_bytes = 0, .resident_bytes = 1000, .prefetch = 2},
      {.unit_bytes = 300, .whole = {"out.bias"}, .precision = {.param_dtype = at::kBFloat16}}};
  for (const int size : {2, 3, 4}) {
    std::vector<std::vector<Observed>> real(size);
    run_over(
        Transport::kGloo, size,
        [&](World& world) {
          for (const ShardPlan& plan : plans)
            real[world.rank()].push_back(observe(world.process_group(), plan));
        },
        std::chrono::seconds(60));
    for (int rank = 0; rank < size; ++rank) {
      const auto world = fake_world(size, rank);
      for (size_t i = 0; i < plans.size(); ++i) {
        const Observed fake = observe(world.process_group(), plans[i]);
        SCOPED_TRACE(::testing::Message() << "rank " << rank << " of " << size << ", plan " << i);
        EXPECT_GT(fake.trace.size(), 10U);
        EXPECT_EQ(fake.trace, real[rank][i].trace);
        EXPECT_TRUE(same(fake.counts, real[rank][i].counts));
        EXPECT_EQ(fake.memory.parameters, real[rank][i].memory.parameters);
        EXPECT_EQ(fake.memory.gradients, real[rank][i].memory.gradients);
        EXPECT_EQ(fake.memory.optimizer_state, real[rank][i].memory.optimizer_state);
        EXPECT_EQ(fake.memory.peak_unsharded, real[rank][i].memory.peak_unsharded);
      }
    }
  }
}

// --- many ranks
// ------------------------------------------------------------------------------------------------

// Counts the allocations of tensors on this thread.
class AllocationCounter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t alloc_size, size_t, size_t, c10::Device) override {
    if (alloc_size > 0) ++count;
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t count = 0;
};

struct HostWork {
  int64_t operators = 0, allocations = 0, collectives = 0;
  bool operator==(const HostWork&) const = default;
};

std::ostream& operator<<(std::ostream& out, const HostWork& work) {
  return out << work.operators << " operators, " << work.allocations << " allocations, "
             << work.collectives << " collectives";
}

// Operators are counted on all threads: backward may use another.
std::atomic<int64_t> operators_seen = 0;
std::unique_ptr<at::ObserverContext> see_operator(const at::RecordFunction&) {
  ++operators_seen;
  return nullptr;
}

HostWork count_work(const std::function<void()>& run, const CountingProcessGroup& counter) {
  const auto allocations = std::make_shared<AllocationCounter>();
  const int64_t calls_before = counter.counts().calls();
  const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(see_operator).scopes({at::RecordScope::FUNCTION}));
  operators_seen = 0;
  {
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocations);
    run();
  }
  at::removeCallback(handle);
  return {operators_seen, allocations->count, counter.counts().calls() - calls_before};
}

HostWork work_of_a_step(int size, ShardPlan plan, bool replicated) {
  const auto world = fake_world(size);
  const auto groups = world.hybrid_process_groups(replicated ? size / 2 : size);
  const auto counter = counting_process_group(groups.shard);
  plan.process_group = counter;
  if (replicated) plan.replicate_group = groups.replicate;
  // Rank 0 has a part of each weight, even where 4,096 ranks share it.
  const auto net = seeded(3, [] { return std::make_shared<BlockNet>(128, 4, /*bias=*/false); });
  PaperJob<BlockNet> job(net, plan);
  const auto x = torch::ones({2, 128});
  for (int step = 0; step < 3; ++step) job.step(x);
  return count_work(
      [&] {
        job.step(x);
        job.optimizer->clip_grad_norm_(0.0);  // gradients of any norm are scaled
      },
      *counter);
}

TEST(FakeWorld, AStepTakesAsManyOperatorsAllocationsAndCollectivesOn4096RanksAsOn8) {
  for (const bool replicated : {false, true}) {
    for (const auto level : kAllLevels) {
      for (const auto partition : {Partition::kFlatEven, Partition::kWholeParam}) {
        const ShardPlan plan{.level = level, .partition = partition, .unit_bytes = 0};
        const HostWork few = work_of_a_step(8, plan, replicated);
        EXPECT_GT(few.operators, 50);
        EXPECT_GT(few.allocations, 10);
        EXPECT_GT(few.collectives, 5);
        for (const int size : {64, 512, 4096}) {
          EXPECT_EQ(work_of_a_step(size, plan, replicated), few)
              << size << " ranks, level " << static_cast<int>(level) << ", partition "
              << static_cast<int>(partition) << (replicated ? ", replicated" : "");
        }
      }
    }
  }
}

TEST(FakeWorld, ValuesStayFinite) {
  const auto world = fake_world(1024, 17);
  PaperJob<BlockNet> job(seeded(3, [] { return std::make_shared<BlockNet>(64, 2); }), {});
  for (int step = 0; step < 3; ++step) job.step(torch::ones({2, 64}));
  EXPECT_TRUE(job.net->forward(torch::ones({2, 64})).isfinite().all().item<bool>());
}

int64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

// 512 MiB of parameters; each rank keeps 512 KiB of them, and makes at most a unit at a time.
TEST(FakeWorld, HoldsTheShardOfAModelThatIsLargerThanItsMemory) {
  const auto world = fake_world(1024, 17);
  const int64_t before = peak_resident_bytes();
  std::shared_ptr<BlockNet> net;
  {
    const DeferredInit deferred;
    net = std::make_shared<BlockNet>(2048, 32, /*bias=*/false);
  }
  auto sharded = fully_shard(net);
  EXPECT_EQ(sharded.memory().parameters, int64_t{32} * 2048 * 2048 * 4 / 1024);
  EXPECT_LT(peak_resident_bytes() - before, int64_t{192} << 20);
}

}  // namespace tessera::testing::fake_world_test
