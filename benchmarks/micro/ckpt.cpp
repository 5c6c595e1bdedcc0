// Saves and loads of a model with AdamW state that is spread over the ranks, beside files that are
// written and read as dd does, and the time that an asynchronous save blocks beside a copy of the
// same bytes in memory. Seconds of the slowest rank, and GB/s of all ranks.

#include <fcntl.h>
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>
#include <vector>

#include "launcher/unique_fd.h"
#include "rounds.h"

namespace tessera::micro {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBlock = size_t{1} << 20;

tools::UniqueFd open_file(const std::string& file, int flags) {
  tools::UniqueFd fd(::open(file.c_str(), flags | O_CLOEXEC, 0666));
  if (!fd.is_open()) throw std::system_error(errno, std::generic_category(), file);
  return fd;
}

// Transfers all bytes by `call`, `::write` or `::read`, in blocks.
template <class Call>
void transfer(const std::string& file, Call call, int fd, std::vector<char>& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t count = call(fd, &bytes[done], std::min(kBlock, bytes.size() - done));
    if (count <= 0) throw std::system_error(errno, std::generic_category(), file);
    done += static_cast<size_t>(count);
  }
}

// `dd bs=1M conv=fsync` and `mv`.
void write_to_disk(const std::string& file, std::vector<char>& bytes) {
  const std::string draft = file + ".new";
  const auto fd = open_file(draft, O_WRONLY | O_CREAT | O_EXCL);
  transfer(draft, ::write, fd.get(), bytes);
  if (::fsync(fd.get()) != 0) throw std::system_error(errno, std::generic_category(), draft);
  fs::rename(draft, file);
}

void read_from_disk(const std::string& file, std::vector<char>& bytes) {
  transfer(file, ::read, open_file(file, O_RDONLY).get(), bytes);
}

// Contents that are not on the disk yet stay.
void drop_from_cache(const fs::path& directory) {
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file())
      ::posix_fadvise(open_file(entry.path(), O_RDONLY).get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

torch::nn::Sequential layers(int64_t bytes) {
  constexpr int64_t kWidth = 1024;
  torch::nn::Sequential net;
  for (int64_t i = 0; i * kWidth * kWidth * 4 < bytes; ++i)
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  return net;
}

/// This rank's part of the job. The folder goes with it.
class SavedJob {
 public:
  explicit SavedJob(const Options& options)
      : directory_(fs::absolute(options.directory) / "tessera-bench-ckpt"),
        net_(layers(options.megabytes * 1'000'000 / 3)),
        sharded_(fully_shard(net_)),
        adamw_(net_->parameters(), torch::optim::AdamWOptions(1e-4)),
        optimizer_(sharded_, adamw_) {
    fs::create_directories(directory_);
    torch::Tensor sum = torch::zeros({});
    for (const auto& parameter : net_->parameters()) sum = sum + parameter.sum();
    sum.backward();
    optimizer_.step();
    const auto memory = optimizer_.memory();
    bytes_.assign(static_cast<size_t>(memory.parameters + memory.optimizer_state), 2);
    other_.assign(bytes_.size(), 1);
  }

  ~SavedJob() {
    ranks_->barrier({"end of ckpt"});
    std::error_code ignored;
    if (ranks_->rank() == 0) fs::remove_all(directory_, ignored);
  }

  /// Two kinds that are compared take turns in going first: a disk may be faster after a rest.
  Numbers round() {
    const std::string file = directory_ / fmt::format("disk-{}", ranks_->rank());
    const fs::path saved = directory_ / "saved", later = directory_ / "later";
    Numbers seconds;
    const auto measure = [&](const char* kind, const std::function<void()>& run) {
      seconds[kind] = slowest(run);
    };
    const bool is_even = rounds_++ % 2 == 0;
    const auto in_turn = [&](const std::function<void()>& a, const std::function<void()>& b) {
      is_even ? (a(), b()) : (b(), a());
    };
    in_turn([&] { measure("disk_write", [&] { write_to_disk(file, bytes_); }); },
            [&] { measure("save", [&] { save_checkpoint(saved, sharded_, &optimizer_); }); });
    if (ranks_->rank() == 0) drop_from_cache(directory_);
    in_turn([&] { measure("disk_read", [&] { read_from_disk(file, bytes_); }); },
            [&] { measure("load", [&] { load_checkpoint(saved, sharded_, &optimizer_); }); });
    in_turn(
        [&] {
          measure("memcpy", [&] { std::memcpy(other_.data(), bytes_.data(), bytes_.size()); });
        },
        [&] {
          measure("async_save", [&] { checkpointer_.save(later, sharded_, &optimizer_); });
          measure("async_rest", [&] { checkpointer_.wait(); });
        });
    return with_ratios(std::move(seconds));
  }

 private:
  // All ranks begin together, once the disk is idle.
  double slowest(const std::function<void()>& run) {
    if (ranks_->rank() == 0) ::sync();
    return slowest_seconds_of(*ranks_, run);
  }

  Numbers with_ratios(Numbers seconds) const {
    const auto all = static_cast<double>(bytes_.size()) * ranks_->size();
    Numbers numbers = seconds;
    for (const char* kind : {"disk_write", "save", "disk_read", "load"})
      numbers[fmt::format("{}_gb_per_s", kind)] = 1e-9 * all / seconds[kind];
    numbers["save_of_disk"] = seconds["disk_write"] / seconds["save"];
    numbers["load_of_disk"] = seconds["disk_read"] / seconds["load"];
    numbers["async_blocks_of_memcpy"] = seconds["async_save"] / seconds["memcpy"];
    return numbers;
  }

  const ProcessGroupPtr ranks_ = default_process_group();
  const fs::path directory_;
  torch::nn::Sequential net_;
  Sharded<torch::nn::SequentialImpl> sharded_;
  torch::optim::AdamW adamw_;
  ShardedOptimizer optimizer_;
  std::vector<char> bytes_, other_;
  AsyncCheckpointer checkpointer_;
  int rounds_ = 0;
};

}  // namespace

void add_ckpt(const Options& options) {
  add_rounds("ckpt", [options] {
    at::set_num_threads(1);
    world();
    return [job = std::make_shared<SavedJob>(options)] { return job->round(); };
  });
}

}  // namespace tessera::micro
