#include <fmt/format.h>
#include <tessera/comm/world.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "benchmarks/comm_bench.h"
#include "benchmarks/comm_report.h"
#include "benchmarks/median.h"
#include "core/comm/message/gloo_backend.h"

namespace tessera::tools {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr CollectiveTag kTag{.subject = "bench", .channel = Channel::kGrads};

struct Operation {
  std::string name;
  std::string by;
  std::function<void()> run;
  std::function<void()> check = [] {};
};

// The buffers of one size and the operations on them.
class Operations {
 public:
  Operations(ProcessGroup& ours, c10d::Backend& theirs, int64_t bytes)
      : ours_(ours), theirs_(theirs), rank_(ours.rank()), size_(ours.size()) {
    const int64_t shard_numel = std::max<int64_t>(bytes / 4 / size_, 1);
    shard_ = torch::full({shard_numel}, static_cast<float>(rank_ + 1));
    input_ = torch::full({shard_numel * size_}, static_cast<float>(rank_ + 1));
    flat_ = torch::zeros({shard_numel * size_});
    out_ = torch::zeros({shard_numel});
    for (int r = 0; r <= size_; ++r) {
      bounds_.push_back(shard_numel * r);
    }
  }

  int64_t bytes() const { return static_cast<int64_t>(flat_.nbytes()); }

  std::vector<Operation> all() {
    return {
        {"all_gather", "tessera",
         [this] { ours_.all_gather(flat_, shard_, bounds_, kTag)->wait_inputs(); },
         [this] { check_gathered(); }},
        {"all_gather", "c10d", [this] { wait(theirs_._allgather_base(flat_, shard_)); },
         [this] { check_gathered(); }},
        {"reduce_scatter", "tessera",
         [this] {
           ours_.reduce_scatter(out_, {{0, input_, input_.numel()}}, bounds_, {}, kTag)
               ->wait_inputs();
         },
         [this] { check_reduced(); }},
        {"reduce_scatter", "c10d", [this] { wait(theirs_._reduce_scatter_base(out_, input_)); },
         [this] { check_reduced(); }},
        {"broadcast", "c10d",
         [this] {
           std::vector<torch::Tensor> tensors{flat_};
           wait(theirs_.broadcast(tensors));
         }},
        {"all_to_all", "tessera",
         [this] { ours_.all_to_all(flat_.chunk(size_), input_.chunk(size_), kTag)->wait_inputs(); },
         [this] { check_gathered(); }},
        {"all_to_all", "c10d",
         [this] {
           std::vector<int64_t> even;
           wait(theirs_.alltoall_base(flat_, input_, even, even));
         }},
        {"memcpy", "memcpy",
         [this] { std::memcpy(flat_.mutable_data_ptr(), input_.const_data_ptr(), bytes()); }},
    };
  }

 private:
  void wait(const c10::intrusive_ptr<c10d::Work>& work) { work->wait(ours_.timeout()); }

  // A benchmark of wrong results would be worthless. The tensors are overwritten afterwards, so
  // that the next operation can't pass with the results of this one.
  void check_gathered() {
    for (int r = 0; r < size_; ++r) {
      const auto part = flat_.slice(0, bounds_[r], bounds_[r + 1]);
      TORCH_CHECK((part == r + 1).all().item<bool>(), "[bench comm] wrong shard of rank ", r);
    }
    flat_.zero_();
  }

  void check_reduced() {
    TORCH_CHECK((out_ == size_ * (size_ + 1) / 2).all().item<bool>(), "[bench comm] wrong sum");
    out_.zero_();
  }

  ProcessGroup& ours_;
  c10d::Backend& theirs_;
  const int rank_;
  const int size_;
  torch::Tensor shard_, input_, flat_, out_;
  std::vector<int64_t> bounds_;
};

// Returns the seconds per call of the slowest rank.
double time_operation(ProcessGroup& process_group, const Operation& operation, int calls) {
  process_group.barrier(kTag);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) {
    operation.run();
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  auto seconds = torch::full({1}, elapsed.count() / calls, torch::kDouble);
  process_group.all_reduce(seconds, ReduceOp::kMax, kTag)->wait();
  return seconds.item<double>();
}

void measure(ProcessGroup& ours, c10d::Backend& theirs, int64_t bytes, int rounds,
             nlohmann::json& results) {
  Operations buffers(ours, theirs, bytes);
  const auto operations = buffers.all();
  const int calls = static_cast<int>(std::clamp<int64_t>(16 * kMiB / bytes, 1, 16));
  std::vector<std::vector<double>> seconds(operations.size());
  for (int round = -1; round < rounds; ++round) {  // the first warms up and checks
    for (size_t i = 0; i < operations.size(); ++i) {
      const double time = time_operation(ours, operations[i], calls);
      if (round < 0) {
        operations[i].check();
      } else {
        seconds[i].push_back(time);
      }
    }
  }
  for (size_t i = 0; i < operations.size(); ++i) {
    results.push_back({{"operation", operations[i].name},
                       {"by", operations[i].by},
                       {"bytes", buffers.bytes()},
                       {"seconds", median_of(seconds[i])}});
  }
}

}  // namespace

int bench_comm_worker(const CommBenchOptions& options) {
  at::set_num_threads(1);
  World world = init({.timeout = std::chrono::seconds(60)});
  auto& ours = *world.process_group();
  const auto keys = c10::make_intrusive<c10d::PrefixStore>("c10d", world.store());
  const auto theirs = gloo_backend(keys, world.rank(), world.size(), ours.timeout(), "127.0.0.1");
  nlohmann::json results = nlohmann::json::array();
  for (const int size : options.sizes) {
    measure(ours, *theirs, size * kMiB, options.rounds, results);
  }
  ours.barrier(kTag);
  if (world.rank() == 0) {
    fmt::print("{}\n", results.dump());
  }
  return 0;
}

}  // namespace tessera::tools
