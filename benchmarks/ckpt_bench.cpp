#include "benchmarks/ckpt_bench.h"

#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "benchmarks/disk_files.h"
#include "benchmarks/median.h"
#include "command/exit_code.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Times = std::map<std::string, std::vector<double>>;  // seconds of each round

struct SavedLayers : torch::nn::Module {
  explicit SavedLayers(int64_t bytes) {
    constexpr int64_t kWidth = 1024;
    const auto options = torch::nn::LinearOptions(kWidth, kWidth).bias(false);
    for (int64_t i = 0; i * kWidth * kWidth * 4 < bytes; ++i)
      register_module("layer" + std::to_string(i), torch::nn::Linear(options));
  }
};

/// One rank's job: a model whose parameters and AdamW state are spread over the ranks.
class SavedJob {
 public:
  SavedJob(const World& world, const CkptBenchOptions& options, const fs::path& directory)
      : world_(world),
        directory_(directory),
        net_(std::make_shared<SavedLayers>(options.megabytes * 1'000'000 / 3)),
        sharded_(fully_shard(net_)),
        adamw_(net_->parameters(), torch::optim::AdamWOptions(1e-4)),
        optimizer_(sharded_, adamw_) {
    torch::Tensor sum = torch::zeros({});
    for (const auto& parameter : net_->parameters()) sum = sum + parameter.sum();
    sum.backward();
    optimizer_.step();
    const auto memory = optimizer_.memory();
    bytes_.resize(static_cast<size_t>(memory.parameters + memory.optimizer_state));
    other_.assign(bytes_.size(), 1);
    std::fill(bytes_.begin(), bytes_.end(), 2);
  }

  int64_t nbytes() const { return std::ssize(bytes_); }

  /// Runs a round and, if it counts (from 0), adds the seconds of each kind. Of two kinds that are
  /// compared, each goes first in every other round: a disk may be faster after a rest.
  void round(int round, Times& times) {
    const std::string file = directory_ / fmt::format("disk-{}", world_.rank());
    const fs::path saved = directory_ / "saved", later = directory_ / "later";
    const auto measure = [&](const char* kind, const std::function<void()>& run) {
      const double seconds = seconds_of(run);
      if (round >= 0) times[kind].push_back(seconds);
    };
    const auto in_turn = [&](const std::function<void()>& a, const std::function<void()>& b) {
      round % 2 == 0 ? (a(), b()) : (b(), a());
    };
    in_turn([&] { measure("disk write", [&] { write_to_disk(file, bytes_); }); },
            [&] { measure("save", [&] { save_checkpoint(saved, sharded_, &optimizer_); }); });
    drop();
    in_turn([&] { measure("disk read", [&] { read_from_disk(file, bytes_); }); },
            [&] { measure("load", [&] { load_checkpoint(saved, sharded_, &optimizer_); }); });
    in_turn(
        [&] {
          measure("memcpy", [&] { std::memcpy(other_.data(), bytes_.data(), bytes_.size()); });
        },
        [&] {
          measure("async save", [&] { checkpointer_.save(later, sharded_, &optimizer_); });
          measure("async rest", [&] { checkpointer_.wait(); });
        });
  }

 private:
  // All ranks begin together, once the disk is idle; the time is that of the slowest.
  double seconds_of(const std::function<void()>& run) {
    if (world_.rank() == 0) ::sync();
    world_.process_group()->barrier({"bench ckpt"});
    const auto start = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    const torch::Tensor longest = torch::full({1}, taken.count(), torch::kDouble);
    world_.process_group()->all_reduce(longest, ReduceOp::kMax, {"bench ckpt"})->wait();
    return longest.item<double>();
  }

  void drop() {
    if (world_.rank() == 0) drop_from_cache(directory_);
  }

  const World& world_;
  fs::path directory_;
  std::shared_ptr<SavedLayers> net_;
  Sharded<SavedLayers> sharded_;
  torch::optim::AdamW adamw_;
  ShardedOptimizer optimizer_;
  std::vector<char> bytes_, other_;
  AsyncCheckpointer checkpointer_;
};

Json report_of(const CkptBenchOptions& options, int64_t nbytes, const Times& times) {
  // The ratio of sums over all rounds: the two orders give different ones.
  const auto ratio = [&](const char* a, const char* b) {
    const auto sum = [&](const char* kind) {
      return std::accumulate(times.at(kind).begin(), times.at(kind).end(), 0.0);
    };
    return sum(a) / sum(b);
  };
  Json report = {{"bench", "ckpt"},
                 {"ranks", options.ranks},
                 {"bytes_per_rank", nbytes},
                 {"rounds", options.rounds}};
  for (const auto& [kind, seconds] : times) report["seconds"][kind] = median_of(seconds);
  const auto all = static_cast<double>(nbytes * options.ranks);
  for (const auto& [kind, seconds] : times)
    report["gb_per_s"][kind] = all / median_of(seconds) / 1e9;
  report["save_of_disk"] = ratio("disk write", "save");
  report["load_of_disk"] = ratio("disk read", "load");
  report["async_blocks_of_memcpy"] = ratio("async save", "memcpy");
  report["versions"] = {{"torch", TORCH_VERSION}};
  return report;
}

std::string ckpt_table(const Json& report) {
  std::string text = fmt::format("{} ranks, {:.1f} MB each\n", report["ranks"].get<int>(),
                                 report["bytes_per_rank"].get<double>() / 1e6);
  for (const auto& [kind, seconds] : report["seconds"].items())
    text += fmt::format("{:<12}{:>9.4f} s{:>8.2f} GB/s\n", kind, seconds.get<double>(),
                        report["gb_per_s"][kind].get<double>());
  return text +
         fmt::format(
             "save: {:.2f} of the disk's speed; load: {:.2f}; an async save blocks {:.2f} of a "
             "memcpy\n",
             report["save_of_disk"].get<double>(), report["load_of_disk"].get<double>(),
             report["async_blocks_of_memcpy"].get<double>());
}

}  // namespace

int bench_ckpt(const CkptBenchOptions& options) {
  TORCH_CHECK_VALUE(options.ranks >= 1 && options.rounds >= 1 && options.megabytes >= 1,
                    "[bench ckpt] --ranks, --rounds and --megabytes must be at least 1; got ",
                    options.ranks, ", ", options.rounds, " and ", options.megabytes);
  const fs::path directory = fs::absolute(options.directory) / "tessera-bench-ckpt";
  fs::create_directories(directory);
  Times times;
  int64_t nbytes = 0;
  at::set_num_threads(1);
  spawn(options.ranks, [&] {
    const World world = init();
    SavedJob job(world, options, directory);
    Times own;
    for (int round = -2; round < options.rounds; ++round) job.round(round, own);
    if (world.rank() == 0) times = own, nbytes = job.nbytes();
  });
  fs::remove_all(directory);
  const Json report = report_of(options, nbytes, times);
  fmt::print("{}", options.json ? report.dump() + "\n" : ckpt_table(report));
  return 0;
}

void add_ckpt_bench(CLI::App& bench, int& exit_code) {
  auto options = std::make_shared<CkptBenchOptions>();
  auto* ckpt = bench.add_subcommand("ckpt", "saving and loading against the disk and the memory");
  ckpt->option_defaults()->always_capture_default();
  ckpt->add_option("--ranks", options->ranks, "threads of this process");
  ckpt->add_option("--megabytes", options->megabytes, "that all ranks store together");
  ckpt->add_option("--rounds", options->rounds, "turns of each kind");
  ckpt->add_option("--directory", options->directory,
                   "on the disk to measure (default: the current one); a folder in it is made and "
                   "removed");
  ckpt->add_flag("--json", options->json, "print one line of JSON");
  ckpt->callback([options, &exit_code] {
    exit_code = exit_code_of("tessera bench ckpt", [&] { return bench_ckpt(*options); });
  });
}

}  // namespace tessera::tools
