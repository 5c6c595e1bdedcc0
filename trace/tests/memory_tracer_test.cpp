// The samples of real steps, compared with the library's own books and with formulas.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/trace/memory_tracer.h>

#include <chrono>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "base/memory/live_bytes.h"
#include "engine/model/memory_count.h"
#include "engine/model/sharded_state.h"
#include "support/even_stack.h"
#include "support/models.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"
#include "support/well_formed.h"

namespace tessera {
namespace memory_tracer_test {

using namespace testing;
using enum MemoryEvent;

constexpr int64_t kWidth = 40, kRows = 6;

struct Traced {
  explicit Traced(World& world, ShardPlan plan = {}, int64_t layers = 4) : world(world) {
    if (!plan.unit_bytes) plan.unit_bytes = 0;
    net = seeded(3, [&] { return std::make_shared<EvenStack>(kWidth, layers); });
    inner =
        std::make_unique<torch::optim::AdamW>(net->parameters(), torch::optim::AdamWOptions(1e-3));
    sharded = std::make_unique<Sharded<EvenStack>>(fully_shard(net, plan));
    optimizer = std::make_unique<ShardedOptimizer>(*sharded, *inner);
  }
  static torch::Tensor input(int i, int64_t rows) { return global_batch(i, rows, kWidth, 1).x; }
  void step(int i) {
    optimizer->zero_grad();
    sharded->forward(input(i, kRows)).square().mean().backward();
    optimizer->step();
  }
  const std::vector<std::unique_ptr<Unit>>& units() const { return sharded->state()->units(); }
  int64_t bytes() const {
    int64_t total = 0;
    for (const auto& unit : units()) total += unit->layout().nbytes();
    return total;
  }

  World& world;
  std::shared_ptr<EvenStack> net;
  std::unique_ptr<torch::optim::AdamW> inner;
  std::unique_ptr<Sharded<EvenStack>> sharded;
  std::unique_ptr<ShardedOptimizer> optimizer;
};

// Compares the tracer's newest sample with the books at every event.
class Auditor final : public MemoryListener {
 public:
  Auditor(Traced& job, const MemoryTracer& tracer) : job_(job), tracer_(tracer) {
    job.sharded->state()->context().watch.add(*this);
  }
  ~Auditor() override { job_.sharded->state()->context().watch.remove(*this); }
  void before_change() override {}
  void on_memory(MemoryEvent event, const std::string& unit) override {
    const MemorySample& sample = tracer_.samples().back();
    const ShardMemory memory = job_.optimizer->memory();
    EXPECT_EQ(sample.event, event);
    EXPECT_EQ(sample.unit, unit);
    EXPECT_EQ(sample.bytes.parameters, memory.parameters);
    EXPECT_EQ(sample.bytes.gradients, memory.gradients);
    EXPECT_EQ(sample.bytes.optimizer_state, memory.optimizer_state);
    EXPECT_EQ(sample.bytes.master_weights, memory.master_weights);
    EXPECT_EQ(sample.bytes.offloaded, memory.offloaded);
    int64_t gathered = 0;
    for (const auto& each : job_.units()) {
      if (each->frees() && each->state() != Unit::State::kSharded)
        gathered += each->layout().nbytes();
    }
    EXPECT_EQ(sample.bytes.gathered, gathered);
    EXPECT_GE(sample.bytes.gradients_in_flight, 0);
    EXPECT_LE(sample.bytes.gradients_in_flight, job_.bytes());
    EXPECT_GE(sample.peak_other, sample.bytes.other);
    EXPECT_GE(sample.peak_total, sample.bytes.total());
    ++events;
  }
  int events = 0;

 private:
  Traced& job_;
  const MemoryTracer& tracer_;
};

class MemoryTracing : public ::testing::TestWithParam<int> {
 protected:
  int ranks() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, MemoryTracing, ::testing::Values(1, 2, 3));

TEST_P(MemoryTracing, EachEventHasWhatTheBooksSayAndStepsHaveWhatFormulasSay) {
  for (const ShardLevel level : kAllLevels) {
    for (const auto dtype : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
      run_world(ranks(), [&](World& world) {
        ShardPlan plan{.level = level};
        plan.precision.param_dtype = dtype;
        Traced job(world, plan);
        const MemoryTracer tracer(*job.sharded);
        ASSERT_TRUE(tracer.knows_other());
        const Auditor auditor(job, tracer);
        for (int i = 0; i < 3; ++i) job.step(i);
        EXPECT_EQ(static_cast<int>(tracer.samples().size()), auditor.events + 1);
        const int64_t p = job.bytes(), n = world.size();
        const int64_t part = level == ShardLevel::kNone ? p : p / n;
        // Layers of 1600 elements: shards of 2 and 3 ranks have padding in the last one alone.
        const MemoryBytes& last = tracer.samples().back().bytes;
        // Where ranks share memory, each rank counts its shard, and nothing is freed.
        const bool is_shared = job.units().front()->is_shared();
        if (level < ShardLevel::kParameters || n == 1 || is_shared) {
          EXPECT_EQ(last.gathered, 0);
          EXPECT_EQ(last.parameters, is_shared ? p / n : p);
        } else {
          EXPECT_EQ(last.parameters, p / n);
        }
        EXPECT_EQ(last.gradients, dtype ? 2 * part : part) << "masters have gradients in float";
        EXPECT_EQ(last.master_weights, dtype ? 2 * part : 0);
        EXPECT_EQ(tracer.samples().back().step, 2 + (tracer.samples().back().event != kStepEnd));
      });
    }
  }
}

// A gradient that the model has taken over counts once, and so does a unit that was freed.
TEST_P(MemoryTracing, ThePeakIsTheMostThatTensorsHad) {
  TESSERA_ON_HOST_ONLY("LiveBytes counts host memory");
  for (const ShardLevel level : kAllLevels) {
    run_world(ranks(), [&](World& world) {
      Traced job(world, {.level = level});
      for (int i = 0; i < 2; ++i) job.step(i);
      const MemoryTracer tracer(*job.sharded);
      const auto live = LiveBytes::start(LiveBytes::Scope::kThread);
      for (int i = 2; i < 5; ++i) job.step(i);
      EXPECT_NEAR(tracer.peak().peak_total,
                  tracer.samples().front().bytes.model() + live->take_peak(), 1024)
          << memory_event_name(tracer.peak().event);
    });
  }
}

TEST_P(MemoryTracing, OptimizerStateBelongsToTheModelFromTheStartOfATracer) {
  run_world(ranks(), [&](World& world) {
    Traced job(world);
    job.step(0);
    const MemoryTracer tracer(*job.sharded);
    EXPECT_GT(job.optimizer->memory().optimizer_state, 0);
    EXPECT_EQ(tracer.samples().front().bytes.optimizer_state,
              job.optimizer->memory().optimizer_state);
    EXPECT_EQ(tracer.samples().front().bytes.other, 0);
    EXPECT_EQ(tracer.samples().front().event, kStart);
  });
}

// Counts the events of each unit in a step.
std::map<std::pair<MemoryEvent, std::string>, int> count_events(const MemoryTracer& tracer,
                                                                int64_t step) {
  std::map<std::pair<MemoryEvent, std::string>, int> counts;
  for (const MemorySample& sample : tracer.samples()) {
    if (sample.step == step) ++counts[{sample.event, sample.unit}];
  }
  return counts;
}

TEST_P(MemoryTracing, EventsAreThoseOfTheUnits) {
  run_world(ranks(), [&](World& world) {
    Traced job(world, {.prefetch = 0});
    const MemoryTracer tracer(*job.sharded);
    for (int i = 0; i < 4; ++i) job.step(i);
    auto counts = count_events(tracer, 3);
    const bool gathers = world.size() > 1, frees = job.units().front()->frees();
    for (const MemoryEvent once :
         {kForwardBegin, kBackwardBegin, kBackwardEnd, kStepBegin, kStepEnd})
      EXPECT_EQ((counts[{once, ""}]), 1) << memory_event_name(once);
    for (size_t i = 0; i < job.units().size(); ++i) {
      const std::string& unit = job.units()[i]->layout().name;
      // The last unit stays from forward to backward, and backward does not read the first one.
      const bool twice = i > 0 && i + 1 < job.units().size();
      EXPECT_EQ((counts[{kUnitUsed, unit}]), twice ? 2 : 1) << unit;
      // The first gather of a step happens at the end of the previous one.
      const int stays = frees && twice ? 2 : 1;
      EXPECT_EQ((counts[{kUnitGathered, unit}]), gathers ? stays : 0) << unit;
      EXPECT_EQ((counts[{kUnitFreed, unit}]), frees ? stays : 0) << unit;
      for (const MemoryEvent once :
           {kGradientMade, kReductionStarted, kUnitReduced, kGradientsCleared})
        EXPECT_EQ((counts[{once, unit}]), 1) << memory_event_name(once) << " " << unit;
    }
  });
}

// Messages to slow peers are in memory of this rank, too: waits until they are sent.
int64_t other_in_the_end(MemoryCount& count) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  int64_t other = count.take().bytes.other;
  while (other != 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    other = count.take().bytes.other;
  }
  return other;
}

TEST_P(MemoryTracing, ActivationsRiseInForwardFallInBackwardAndReturnToTheStart) {
  for (const ShardLevel level : {ShardLevel::kGradients, ShardLevel::kParameters}) {
    run_world(ranks(), [&](World& world) {
      Traced job(world, {.level = level, .prefetch = 0});
      const MemoryTracer tracer(*job.sharded);
      MemoryCount count(*job.sharded->state());
      for (int i = 0; i < 5; ++i) {
        job.step(i);
        EXPECT_EQ(other_in_the_end(count), 0);
        job.optimizer->zero_grad();
        EXPECT_EQ(other_in_the_end(count), 0);
      }
      // A thread that gathers may hold on to a unit for a moment after it was freed.
      const bool is_exact = world.size() == 1 || level == ShardLevel::kGradients;
      std::vector<int64_t> at_begin;
      for (int64_t step = 2; step < 5; ++step) {
        std::vector<int64_t> forward, backward;
        bool turned = false;
        for (const MemorySample& sample : tracer.samples()) {
          if (sample.step != step) continue;
          if (sample.event == kForwardBegin) at_begin.push_back(sample.bytes.other);
          turned |= sample.event == kBackwardBegin;
          if (sample.event != kUnitUsed) continue;
          (turned ? backward : forward).push_back(sample.bytes.other);
        }
        ASSERT_EQ(forward.size(), 4);
        // The input of the activation, and its output.
        for (size_t i = 1; is_exact && i < forward.size(); ++i)
          EXPECT_EQ(forward[i] - forward[i - 1], 2 * kRows * kWidth * 4) << "step " << step;
        ASSERT_EQ(backward.size(), 2);
        if (is_exact) {
          EXPECT_LT(backward[1], backward[0]);
        }
      }
      for (const int64_t other : at_begin) EXPECT_EQ(other, kRows * kWidth * 4) << "the input";
      EXPECT_GE(tracer.peak_other_bytes(), at_begin[0] + 8 * kRows * kWidth * 4);
      EXPECT_EQ(tracer.peak().peak_total,
                std::ranges::max(tracer.samples(), {}, &MemorySample::peak_total).peak_total);
    });
  }
}

TEST(MemoryTracing, TensorsOfTheUserAreOther) {
  run_world(1, [&](World& world) {
    Traced job(world, {.level = ShardLevel::kGradients});
    job.step(0);
    MemoryTracer tracer(*job.sharded);
    job.step(1);
    const int64_t before = tracer.samples().back().bytes.other;
    const auto mine = torch::empty({12345}, torch::dtype(torch::kByte).device(test_device()));
    job.optimizer->zero_grad();
    EXPECT_EQ(tracer.samples().back().event, kGradientsCleared);
    EXPECT_EQ(tracer.samples().back().bytes.other - before, 12345);
    EXPECT_EQ(tracer.samples().back().bytes.gradients, 0);
  });
}

TEST(MemoryTracing, MadeAndDroppedInTheMiddleOfAStepItChangesNothing) {
  const TrainingRun run = sgd_run<Mlp>(37, 3, 5);
  const auto expected = train_alone(run, 2);
  run_world(2, [&](World& world) {
    const auto net = run.make_net();
    const auto inner = run.make_optimizer(*net);
    auto sharded = fully_shard(net, {.unit_bytes = 6000});
    ShardedOptimizer optimizer(sharded, *inner, {.fused = false});
    std::optional<MemoryTracer> tracer;
    for (int step = 0; step < run.steps; ++step) {
      optimizer.zero_grad();
      if (step == 1) tracer.emplace(sharded);
      const auto loss = rank_loss(*net, global_batch(step, run.rows, run.in, run.out), world.rank(),
                                  world.size(), step);
      if (step == 2) tracer.reset();
      loss.backward();
      if (step == 2) tracer.emplace(sharded, MemoryTracerOptions{.pss = true});
      optimizer.step();
      if (step == 3) {
        EXPECT_TRUE(tracer->samples().back().bytes.model() > 0);
        tracer.reset();
      }
    }
    EXPECT_FALSE(sharded.state()->context().watch.is_active());
    expect_same_state(sharded.full_state(), expected, tolerance_of(2), "traced");
  });
}

TEST(MemoryTracing, TwoModelsAreTracedApartAndEachIsOtherForTheOther) {
  run_world(2, [&](World& world) {
    Traced a(world, {}, 3), b(world, {}, 5);
    const MemoryTracer of_a(*a.sharded), of_b(*b.sharded);
    const Auditor audit_a(a, of_a), audit_b(b, of_b);
    for (int i = 0; i < 3; ++i) {
      a.step(i);
      b.step(i);
    }
    EXPECT_GT(audit_b.events, audit_a.events);
    for (const MemorySample& sample : of_a.samples()) EXPECT_NE(sample.unit, "fc4.weight");
    // The state of b's optimizer was made under a's tracer.
    EXPECT_GE(of_a.peak_other_bytes(), b.optimizer->memory().optimizer_state);
  });
}

TEST(MemoryTracing, KeepsTheLastStepsAndThePeakOfAll) {
  run_world(1, [&](World& world) {
    Traced job(world);
    MemoryTracer tracer(*job.sharded, {.steps = 2});
    MemoryTracer all(*job.sharded, {.steps = 0});
    for (int i = 0; i < 3; ++i) job.step(i);
    auto big = torch::empty({10 << 20}, torch::dtype(torch::kByte).device(test_device()));
    job.step(3);
    EXPECT_GE(tracer.peak().bytes.other, 10 << 20);
    const int64_t peak_step = tracer.peak().step;
    big.reset();
    for (int i = 4; i < 9; ++i) job.step(i);
    EXPECT_EQ(tracer.samples().front().step, 7);
    EXPECT_EQ(all.samples().front().step, 0);
    EXPECT_EQ(tracer.peak().step, peak_step);
    tracer.start_step();
    EXPECT_EQ(tracer.samples().front().step, 8);
    EXPECT_THROW(MemoryTracer(*job.sharded, {.steps = -1}), c10::ValueError);
  });
}

TEST(MemoryTracing, PssIsReadAtTheBoundsOfPhases) {
  run_world(1, [&](World& world) {
    Traced job(world);
    const MemoryTracer tracer(*job.sharded, {.pss = true});
    job.step(0);
    for (const MemorySample& sample : tracer.samples()) {
      const bool is_bound = sample.unit.empty();
      ASSERT_EQ(sample.pss.has_value(), is_bound) << memory_event_name(sample.event);
      if (sample.pss) {
        EXPECT_GT(*sample.pss, 1 << 20);
      }
    }
  });
}

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST_P(MemoryTracing, FilesOfEachRankAndOfAllTogether) {
  const ScratchDirectory directory;
  std::vector<size_t> samples(ranks());
  run_world(ranks(), [&](World& world) {
    Traced job(world);
    const MemoryTracer tracer(*job.sharded, {.pss = true});
    for (int i = 0; i < 3; ++i) job.step(i);
    const std::string name = directory / std::to_string(world.rank());
    samples[world.rank()] = tracer.samples().size();
    tracer.write_chrome_trace(name + ".json");
    tracer.write_svg(name + ".svg");
    tracer.dump_memory_stats(name + ".txt");
    tracer.write_merged_chrome_trace(directory / "all.json");
    const std::string svg = contents(name + ".svg");
    EXPECT_EQ(xml_error(svg), "");
    EXPECT_NE(svg.find("fc2.weight"), std::string::npos);
    EXPECT_NE(svg.find(fmt::format("rank {}, step 2", world.rank())), std::string::npos);
    EXPECT_NE(contents(name + ".txt").find("unit used"), std::string::npos);
    const auto missing = directory / "missing" / "x.json";
    expect_error([&] { tracer.write_chrome_trace(missing); }, {"write_chrome_trace", "missing"});
    expect_error([&] { tracer.write_merged_chrome_trace(missing); }, {"missing"});
  });
  const auto all = nlohmann::json::parse(contents(directory / "all.json"));
  std::map<int, size_t> instants;
  for (const auto& event : all.at("traceEvents")) {
    if (event.at("ph") == "i") ++instants[event.at("pid").get<int>()];
  }
  ASSERT_EQ(static_cast<int>(instants.size()), ranks());
  for (int rank = 0; rank < ranks(); ++rank) {
    EXPECT_EQ(instants[rank], samples[rank]);
    const auto one = nlohmann::json::parse(contents(directory / (std::to_string(rank) + ".json")));
    EXPECT_TRUE(one.at("traceEvents").is_array());
  }
}

}  // namespace memory_tracer_test
}  // namespace tessera
