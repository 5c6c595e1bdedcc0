// A training step of rank 0 of so many ranks, in fake worlds: the same model with next to no
// computation, and all the library's work around it except the messages. Milliseconds of processor
// time a step.

#include <tessera/comm/fake_world.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <ctime>
#include <memory>
#include <vector>

#include "rounds.h"

namespace tessera::micro {
namespace {

constexpr int kLayers = 48, kWidth = 128, kSteps = 10;

// Processor time, not wall-clock time: other programs don't count.
double processor_ms() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

/// Rank 0 of a number of ranks, in training.
class RankJob {
 public:
  RankJob(int ranks, ShardLevel level)
      : sharded_(fully_shard(
            net_,
            {.level = level, .unit_bytes = 0, .process_group = fake_process_group(0, ranks)})),
        sgd_(net_->parameters(), torch::optim::SGDOptions(1e-6)),
        optimizer_(sharded_, sgd_) {}

  /// Trains, and adds the times under names with `suffix`.
  void train(Numbers& numbers, const std::string& suffix) {
    double passes = 0, updates = 0;
    for (int i = 0; i < kSteps; ++i) {
      const double start = processor_ms();
      optimizer_.zero_grad();
      net_->forward(input_).sum().backward();
      const double middle = processor_ms();
      optimizer_.step();
      passes += middle - start;
      updates += processor_ms() - middle;
    }
    numbers["passes_ms" + suffix] = passes / kSteps;
    numbers["optimizer_ms" + suffix] = updates / kSteps;
  }

 private:
  static torch::nn::Sequential layers() {
    torch::nn::Sequential net;
    const auto options = torch::nn::LinearOptions(kWidth, kWidth).bias(false);
    for (int i = 0; i < kLayers; ++i) net->push_back(torch::nn::Linear(options));
    return net;
  }

  torch::nn::Sequential net_ = layers();
  Sharded<torch::nn::SequentialImpl> sharded_;
  torch::optim::SGD sgd_;
  ShardedOptimizer optimizer_;
  torch::Tensor input_ = torch::zeros({1, kWidth});
};

Round rounds_of(ShardLevel level) {
  at::set_num_threads(1);
  std::vector<std::pair<std::string, std::shared_ptr<RankJob>>> jobs;
  for (const int ranks : {2, 16, 128, 1024})
    jobs.emplace_back("_" + std::to_string(ranks), std::make_shared<RankJob>(ranks, level));
  return [jobs] {
    Numbers numbers;
    for (const auto& [suffix, job] : jobs) job->train(numbers, suffix);
    return numbers;
  };
}

}  // namespace

void add_ranks() {
  add_rounds("ranks/os_g", [] { return rounds_of(ShardLevel::kGradients); });
  add_rounds("ranks/p_g_os", [] { return rounds_of(ShardLevel::kParameters); });
}

}  // namespace tessera::micro
