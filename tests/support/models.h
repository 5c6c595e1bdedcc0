#pragma once

#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "support/run_world.h"
#include "support/test_device.h"

namespace tessera::testing {

using State = std::vector<NamedTensor>;

constexpr ShardLevel kAllLevels[] = {ShardLevel::kNone, ShardLevel::kOptimizerState,
                                     ShardLevel::kGradients, ShardLevel::kParameters};
constexpr Partition kPartitions[] = {Partition::kFlatEven, Partition::kWholeParam};

/// The same plan at every level and, in `with_each_partition()`, with each partition.
std::vector<ShardPlan> at_each_level(const ShardPlan& plan = {});
std::vector<ShardPlan> with_each_partition(const ShardPlan& plan = {});

/// How `plan` shards over `ranks` ranks, for the messages of failures.
std::string describe(int ranks, const ShardPlan& plan);

/// A model from rows to rows. `rank` and `step` are set before each forward, for models that use
/// them.
struct Net : torch::nn::Module {
  virtual torch::Tensor forward(torch::Tensor x) = 0;
  /// That of the rows it takes, to which `rank_loss()` converts.
  virtual torch::Dtype dtype() const { return torch::kFloat; }
  int rank = 0, step = 0;
};

/// A multi-layer perceptron of odd sizes, with a LayerNorm.
struct Mlp : Net {
  explicit Mlp(int64_t width = 37, int64_t layers = 3, int64_t out = 5);
  torch::Tensor forward(torch::Tensor x) override;
  torch::Dtype dtype() const override { return head->weight.scalar_type(); }
  std::vector<torch::nn::Linear> fcs;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};

/// The rows of a global batch that one rank of `size` sees.
torch::Tensor rows_of(const torch::Tensor& batch, int rank, int size);

/// Inputs and targets of step `step`, on the `test_device()`: the same on every rank and in every
/// world.
struct Batch {
  torch::Tensor x, y;
};
Batch global_batch(int64_t step, int64_t rows, int64_t in, int64_t out);

/// Names and values of everything a model holds, in host memory, for comparisons.
State plain_state(torch::nn::Module& module);

/// Expects the same names, and calls `compare` with the tensors of each.
void for_each_pair(
    const State& actual, const State& expected, const std::string& what,
    const std::function<void(const NamedTensor& want, const torch::Tensor& got)>& compare);

/// Expects the same names in the same order with equal values; `tolerance` 0 means bit for bit.
void expect_same_state(const State& actual, const State& expected, double tolerance,
                       const std::string& what);

/// Makes a module or a tensor from random values that depend on `seed` alone, and moves it to the
/// `test_device()`.
template <class F>
auto seeded(uint64_t seed, F&& make) {
  manual_seed(seed);
  if constexpr (requires { on_test_device(make()); }) {
    return on_test_device(make());
  } else {
    return make();
  }
}

/// A training run that can be done by one process or by a world: `steps` steps on `global_batch`es,
/// with the mean squared error, from equal start values.
struct TrainingRun {
  std::function<std::shared_ptr<Net>()> make_net;
  std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)> make_optimizer;
  int steps = 4;
  int64_t rows = 12, in = 37, out = 5;
};
/// A run of `N` (made with the arguments) by an optimizer of all its parameters.
template <class N, class Optimizer, class Options, class... Args>
TrainingRun run_by(const Options& options, Args... args) {
  return {.make_net = [=] { return seeded(7, [&] { return std::make_shared<N>(args...); }); },
          .make_optimizer =
              [=](Net& net) { return std::make_unique<Optimizer>(net.parameters(), options); }};
}
/// The same by SGD with momentum.
template <class N, class... Args>
TrainingRun sgd_run(Args... args) {
  return run_by<N, torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9), args...);
}

/// The same run of the model converted to `dtype`.
TrainingRun in_dtype(TrainingRun run, torch::Dtype dtype);

/// The loss of one rank's rows of a batch.
torch::Tensor rank_loss(Net& net, const Batch& batch, int rank, int size, int step);

/// The state after training in one process that sees the rows of `ranks` ranks one after another.
/// Sums are in the order of the ranks, so that 1, 2 and 4 ranks give the same bits.
State train_alone(const TrainingRun& run, int ranks);

/// The state after training on a world.
State train_sharded(const TrainingRun& run, World& world, const ShardPlan& plan,
                    const ShardedOptimizerOptions& options = {.fused = false});

/// Expects `expected` of the first rank, and the same bits of all.
void expect_same_states(const std::vector<State>& of_ranks, const State& expected, double tolerance,
                        const std::string& what);

/// Expects that a world of `ranks` gives the result of one process, and the same on all ranks.
void expect_parity(const TrainingRun& run, int ranks, const ShardPlan& plan,
                   const std::string& what,
                   const ShardedOptimizerOptions& options = {.fused = false},
                   double tolerance = -1);

/// A way to shard a run, and what failures say of it.
struct ParityCase {
  ShardPlan plan;
  std::string what = "";  // besides `describe()`
  ShardedOptimizerOptions options = {.fused = false};
  double tolerance = -1;  // `tolerance_of()` the ranks
};

/// As `expect_parity()` for each of `cases`, one after another in one world: the start of a world
/// takes longer than a short training.
void expect_parity_of_each(const TrainingRun& run, int ranks, const std::vector<ParityCase>& cases,
                           std::optional<Transport> transport = std::nullopt);
std::vector<ParityCase> cases_of(const std::vector<ShardPlan>& plans, double tolerance = -1);
/// The same where the result of one process is known.
void expect_each_has(const State& expected, const TrainingRun& run, int ranks,
                     const std::vector<ParityCase>& cases,
                     std::optional<Transport> transport = std::nullopt);

/// The results of `fn` on the ranks of a world.
template <class F>
auto results_of(int ranks, const F& fn, std::optional<Transport> transport = std::nullopt) {
  std::vector<std::invoke_result_t<F, World&>> results(ranks);
  run_world(
      ranks, [&](World& world) { results[world.rank()] = fn(world); }, std::chrono::seconds(30),
      transport);
  return results;
}

/// Calls `f` with each of `plans`, one after another in a world of each of `sizes`.
void on_worlds(const std::vector<int>& sizes, const std::vector<ShardPlan>& plans,
               const std::function<void(World&, const ShardPlan&)>& f,
               std::optional<Transport> transport = std::nullopt);

/// 0 (bit for bit) where averaging over `ranks` is exact.
double tolerance_of(int ranks);

/// Expects that `f` throws a `c10::Error` whose message has all of `parts`.
void expect_error(const std::function<void()>& f, const std::vector<std::string>& parts);

}  // namespace tessera::testing
