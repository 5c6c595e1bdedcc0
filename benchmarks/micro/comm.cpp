// Tessera's collectives (over Gloo with TESSERA_TRANSPORT=gloo), c10d's own over Gloo, and memcpy,
// with a process per rank: milliseconds of the slowest rank. `busbw` is the buffer's bytes per
// second, in GB, times the part of them that each rank must send: comparable with the bandwidth of
// what carries them.

#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "core/comm/message/gloo_backend.h"
#include "rounds.h"

namespace tessera::micro {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr CollectiveTag kTag{.subject = "bench", .channel = Channel::kGrads};
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

/// The buffers of one size and the operations on them, by two process groups of the same ranks.
class Buffers {
 public:
  Buffers(ProcessGroupPtr ours, BackendPtr theirs, int64_t bytes)
      : ours_(std::move(ours)), theirs_(std::move(theirs)), size_(ours_->size()) {
    const int64_t shard_numel = std::max<int64_t>(bytes / 4 / size_, 1);
    const auto own = static_cast<float>(ours_->rank() + 1);
    shard_ = torch::full(shard_numel, own);
    input_ = torch::full(shard_numel * size_, own);
    flat_ = torch::zeros(shard_numel * size_);
    out_ = torch::zeros(shard_numel);
    for (int r = 0; r <= size_; ++r) bounds_.push_back(shard_numel * r);
  }

  /// Measures an operation by both in turns; each of them but c10d's broadcast has both.
  Numbers measure(const std::string& operation) {
    const bool is_copy = operation == "memcpy" || operation == "broadcast";
    const auto nbytes = static_cast<double>(flat_.nbytes());
    Numbers numbers;
    const auto add = [&](const std::string& by, const std::function<void()>& run) {
      const double seconds = slowest(run);
      numbers[by + "_ms"] = 1e3 * seconds;
      numbers[by + "_busbw"] = 1e-9 * nbytes / seconds * (is_copy ? 1 : (size_ - 1.0) / size_);
      check(operation);
    };
    if (!is_copy) add("tessera", [&] { run_ours(operation); });
    if (operation == "memcpy") {
      add("memcpy",
          [&] { std::memcpy(flat_.mutable_data_ptr(), input_.const_data_ptr(), flat_.nbytes()); });
    } else {
      add("c10d", [&] { run_theirs(operation)->wait(ours_->timeout()); });
    }
    is_checked_ = true;
    if (!is_copy) numbers["of_c10d"] = numbers["tessera_ms"] / numbers["c10d_ms"];
    return numbers;
  }

 private:
  void run_ours(const std::string& operation) {
    const auto work =
        operation == "all_gather" ? ours_->all_gather(flat_, shard_, bounds_, kTag)
        : operation == "reduce_scatter"
            ? ours_->reduce_scatter(out_, {{0, input_, input_.numel()}}, bounds_, {}, kTag)
            : ours_->all_to_all(flat_.chunk(size_), input_.chunk(size_), kTag);
    work->wait_inputs();
  }

  c10::intrusive_ptr<c10d::Work> run_theirs(const std::string& operation) {
    if (operation == "all_gather") return theirs_->_allgather_base(flat_, shard_);
    if (operation == "reduce_scatter") return theirs_->_reduce_scatter_base(out_, input_);
    std::vector<torch::Tensor> tensors{flat_};
    std::vector<int64_t> even;
    return operation == "broadcast" ? theirs_->broadcast(tensors)
                                    : theirs_->alltoall_base(flat_, input_, even, even);
  }

  // Returns the seconds of one of some calls, of the slowest rank.
  double slowest(const std::function<void()>& run) {
    const auto calls = std::clamp<int64_t>(16 * kMiB / static_cast<int64_t>(flat_.nbytes()), 1, 16);
    const double all = slowest_seconds_of(*ours_, [&] {
      for (int64_t i = 0; i < calls; ++i) run();
    });
    return all / static_cast<double>(calls);
  }

  // A benchmark of wrong results would be worthless. The results are overwritten afterwards, so
  // that the next operation can't pass with those of this one.
  void check(const std::string& operation) {
    if (is_checked_) return;
    if (operation == "all_gather" || operation == "all_to_all") {
      for (int r = 0; r < size_; ++r) {
        const auto part = flat_.slice(0, bounds_[r], bounds_[r + 1]);
        TORCH_CHECK((part == r + 1).all().item<bool>(), "[comm] wrong shard of rank ", r);
      }
      flat_.zero_();
    } else if (operation == "reduce_scatter") {
      TORCH_CHECK((out_ == size_ * (size_ + 1) / 2).all().item<bool>(), "[comm] wrong sum");
      out_.zero_();
    }
  }

  const ProcessGroupPtr ours_;
  const BackendPtr theirs_;
  const int size_;
  torch::Tensor shard_, input_, flat_, out_;
  std::vector<int64_t> bounds_;
  bool is_checked_ = false;
};

Round rounds_of(const std::string& operation, int64_t bytes) {
  at::set_num_threads(1);
  const auto& ours = world().process_group();
  static const BackendPtr theirs =
      gloo_backend(c10::make_intrusive<c10d::PrefixStore>("c10d", world().store()), world().rank(),
                   world().size(), ours->timeout(), "127.0.0.1");
  return [=, buffers = std::make_shared<Buffers>(ours, theirs, bytes)] {
    return buffers->measure(operation);
  };
}

}  // namespace

void add_comm() {
  for (const int64_t mib : {1, 4, 16, 64}) {
    for (const std::string operation :
         {"all_gather", "reduce_scatter", "broadcast", "all_to_all", "memcpy"})
      add_rounds("comm/" + operation + "/" + std::to_string(mib) + "MiB",
                 [=] { return rounds_of(operation, mib * kMiB); });
  }
}

}  // namespace tessera::micro
