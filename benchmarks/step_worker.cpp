#include <sys/resource.h>
#include <tessera/base/page_heap.h>
#include <tessera/base/process_memory.h>
#include <tessera/comm/world.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>

#include "benchmarks/step_bench.h"
#include "benchmarks/trainer.h"
#include "benchmarks/worker_process.h"
#include "launcher/cores.h"

namespace tessera::tools {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

const std::map<std::string, Transport> kTransports = {
    {"auto", Transport::kAuto}, {"gloo", Transport::kGloo}, {"arena", Transport::kArena}};

int64_t minor_faults() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

/// Samples `pss_bytes()` in a thread of its own. That disturbs timings: not for timed steps.
class PeakPss {
 public:
  /// Ends the watch and returns the largest value.
  int64_t stop() {
    thread_ = {};
    return std::max(peak_, pss_bytes());
  }

 private:
  int64_t peak_ = pss_bytes();
  std::jthread thread_{[this](const std::stop_token& stop) {
    for (; !stop.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(4)))
      peak_ = std::max(peak_, pss_bytes());
  }};
};

class StepWorker {
 public:
  explicit StepWorker(const StepWorkerOptions& options)
      : options_(options),
        plan_(step_bench_plan(options.bench)),
        switches_(loop_switches(options.bench.loop)) {
    const bool is_one = options.role == StepRole::kThreads;
    const int ranks = is_one ? options.bench.ranks : 1;  // ranks that it trains for
    at::set_num_threads(ranks);
    for (int i = 0; i < ranks; ++i) streams_.emplace_back(options.bench.size, options.rank + i);
    use_page_heap();  // the local reference gets it, too
    if (options.role == StepRole::kLocal || is_one) return;
    world_.emplace(init({.transport = kTransports.at(options.bench.transport)}));
  }

  json prepare(int steps) {
    pss_before_ = pss_bytes();
    PeakPss peak;
    auto model = make_bench_model(options_.bench.size, switches_);
    int64_t numel = 0;
    for (const auto& parameter : model->parameters()) numel += parameter.numel();
    if (options_.role == StepRole::kSharded) {
      plan_.process_group = world_->process_group();
      const bool is_native = options_.bench.dialect == "native";
      trainer_ = is_native ? make_sharded_trainer(std::move(model), options_.bench.optimizer,
                                                  switches_, plan_)
                           : make_fairscale_trainer(std::move(model), plan_);
    } else {
      trainer_ = make_local_trainer(std::move(model), options_.bench.optimizer, switches_,
                                    world_ ? world_->process_group() : nullptr);
    }
    for (int i = 0; i < steps; ++i) trainer_->step(next_batch());
    return {{"parameters", numel},
            {"peak_pss", peak.stop() - pss_before_},
            {"transport", world_ ? world_->process_group()->backend_name() : "none"}};
  }

  // The batches are made before the clock starts and the losses are read after it stops, and a step
  // begins where the last one ended: the next step pays for work left to the background.
  json train(int steps) {
    std::vector<Batch> batches;
    for (int i = 0; i < steps; ++i) batches.push_back(next_batch());
    std::vector<double> seconds(steps);
    std::vector<StepParts> parts(steps);
    torch::Tensor loss;
    const auto faults = minor_faults();
    const auto sent = trainer_->bytes_sent();
    auto start = Clock::now();
    for (int i = 0; i < steps; ++i) {
      auto trained = trainer_->step(batches[i]);
      loss = std::move(trained.loss);
      parts[i] = trained.seconds;
      const auto end = Clock::now();
      seconds[i] = std::chrono::duration<double>(end - start).count();
      start = end;
    }
    json of_parts;
    for (const StepParts& step : parts) {
      for (size_t i = 0; i < step.size(); ++i) of_parts[kStepParts[i]].push_back(step[i]);
    }
    return {{"seconds", seconds},
            {"parts", of_parts},
            {"page_faults", minor_faults() - faults},
            {"bytes_sent", trainer_->bytes_sent() - sent},
            {"loss", loss.item<double>()}};
  }

  json memory(int steps) {
    PeakPss peak;
    for (int i = 0; i < steps; ++i) trainer_->step(next_batch());
    const auto kept = trainer_->kept();
    return {{"peak_pss", peak.stop() - pss_before_}, {"parameters", kept.parameters},
            {"gradients", kept.gradients},           {"optimizer_state", kept.optimizer_state},
            {"peak_unsharded", kept.peak_unsharded}, {"peak_in_flight", kept.peak_in_flight}};
  }

 private:
  Batch next_batch() {
    std::vector<torch::Tensor> inputs, targets;
    for (auto& stream : streams_) {
      const Batch batch = stream.next();
      inputs.push_back(batch.inputs);
      targets.push_back(batch.targets);
    }
    return {torch::cat(inputs), torch::cat(targets)};
  }

  StepWorkerOptions options_;
  ShardPlan plan_;
  LoopSwitches switches_;
  std::optional<World> world_;        // destroyed last: the trainer communicates
  std::vector<BatchStream> streams_;  // of one rank, or of all
  std::unique_ptr<Trainer> trainer_;
  int64_t pss_before_ = 0;
};

}  // namespace

int bench_step_worker(const StepWorkerOptions& options) {
  TORCH_CHECK(options.core < 0 || stay_on_core(options.core), "[bench_step_worker] core ",
              options.core, " must be one that this process may use");
  std::optional<StepWorker> worker;
  return serve_commands([&](const std::string& verb, int64_t steps) {
    if (!worker) worker.emplace(options);
    const int count = static_cast<int>(steps);
    if (verb == "prepare") return worker->prepare(count);
    if (verb == "train") return worker->train(count);
    TORCH_CHECK_VALUE(verb == "memory",
                      "[bench_step_worker] a command must be prepare, train or memory, got '", verb,
                      "'");
    return worker->memory(count);
  });
}

}  // namespace tessera::tools
