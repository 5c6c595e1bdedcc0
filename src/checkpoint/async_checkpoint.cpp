#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/async_checkpoint.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <future>
#include <thread>
#include <utility>

#include "checkpoint/host_copy.h"
#include "checkpoint/save.h"

namespace tessera {
namespace {

constexpr CollectiveTag kTag{"checkpoint", Channel::kControl};

}  // namespace

// One save that is being written. Its thread communicates with other ranks through the file system
// only, so that training may use the process groups meanwhile.
class PendingSave {
 public:
  PendingSave(const SaveJob& job, BegunSave begun, double bytes_per_second)
      : ranks_(job.ranks),
        owner_(job.owner),
        begun_(std::move(begun)),
        pace_(bytes_per_second),
        written_(written_promise_.get_future().share()),
        thread_([this] { run(); }) {}
  ~PendingSave() {
    if (thread_.joinable()) thread_.join();
  }

  bool is_done() const { return done_; }

  /// Waits until the checkpoint is published. Collective; if a rank fails, all ranks throw.
  void finish() {
    try {
      ranks_.check([&] { written_.get(); }, "checkpoint");
    } catch (...) {
      stop_ = true;  // rank 0 may be waiting for a part that will never come
      thread_.join();
      throw;
    }
    ranks_.check(
        [&] {
          thread_.join();
          if (error_) std::rethrow_exception(error_);
        },
        "checkpoint");
  }

  /// Waits for this rank's thread only, and returns its error; null if there was none.
  std::exception_ptr join() {
    thread_.join();
    return error_;
  }

 private:
  void run() {
    try {
      begun_.writer->write(begun_.contents, &pace_);
      written_promise_.set_value();
    } catch (...) {
      error_ = std::current_exception();
      written_promise_.set_exception(error_);
      done_ = true;
      return;
    }
    try {
      if (ranks_.rank() == 0) begun_.writer->commit(ranks_.timeout(), stop_);
    } catch (...) {
      error_ = std::current_exception();
    }
    done_ = true;
  }

  Ranks ranks_;
  std::shared_ptr<const void> owner_;
  BegunSave begun_;
  Pace pace_;
  std::atomic<bool> stop_ = false, done_ = false;
  std::exception_ptr error_;
  std::promise<void> written_promise_;
  std::shared_future<void> written_;
  std::thread thread_;  // last: it uses the other members
};

struct AsyncCheckpointer::Impl {
  explicit Impl(const AsyncCheckpointOptions& given) : options(given) {
    TORCH_CHECK_VALUE(options.bytes_per_second >= 0,
                      "[AsyncCheckpointer] options.bytes_per_second must be 0 or more; got ",
                      options.bytes_per_second);
  }

  void finish() {
    if (const auto save = std::move(pending)) save->finish();
  }

  void refuse_if_busy(const Ranks& ranks) const {
    const bool busy = pending && !pending->is_done();
    const auto answers = ranks.all_gather_bytes(busy ? "busy" : "", kTag);
    const auto rank = std::find(answers.begin(), answers.end(), "busy") - answers.begin();
    TORCH_CHECK(rank == std::ssize(answers), "[AsyncCheckpointer] rank ", rank, " of ",
                answers.size(), " is still writing the checkpoint before; call wait(), save less "
                "often, or let saves wait (WhenBusy::kWait)");
  }

  void save(const std::filesystem::path& path, SaveJob job) {
    at::NoGradGuard no_grad;
    // Checked inside `collect`, whose errors reach all ranks: throwing here would leave them
    // waiting.
    job.collect = [collect = std::move(job.collect), whole = job.whole](ChunkCollector& contents) {
      TORCH_CHECK_NOT_IMPLEMENTED(!whole,
                                  "[AsyncCheckpointer] options.whole_parameters can't be saved "
                                  "while training goes on, as all ranks gather for it: use "
                                  "save_checkpoint(), or export_checkpoint() of what this saves");
      collect(contents);
    };
    if (options.when_busy == WhenBusy::kRefuse) refuse_if_busy(job.ranks);
    finish();
    BegunSave begun = begin_save(path, job);
    job.ranks.check([&] { copy.take(begun.contents); }, "checkpoint");
    pending = std::make_unique<PendingSave>(job, std::move(begun), options.bytes_per_second);
  }

  AsyncCheckpointOptions options;
  HostCopy copy;
  std::unique_ptr<PendingSave> pending;
};

AsyncCheckpointer::AsyncCheckpointer(const AsyncCheckpointOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}

AsyncCheckpointer::~AsyncCheckpointer() {
  if (!impl_->pending) return;
  try {
    if (const auto error = impl_->pending->join()) std::rethrow_exception(error);
  } catch (const c10::Error& error) {
    fmt::print(stderr, "AsyncCheckpointer: {}\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fmt::print(stderr, "AsyncCheckpointer: {}\n", error.what());
  }
}

void AsyncCheckpointer::save(const std::filesystem::path& path, const ShardedModule& module,
                             const ShardedOptimizer* optimizer, const SaveOptions& options) {
  impl_->save(path, job_of(module, optimizer, options));
}

void AsyncCheckpointer::save(const std::filesystem::path& path, torch::nn::Module& module,
                             torch::optim::Optimizer* optimizer, const SaveOptions& options) {
  impl_->save(path, job_of(module, optimizer, options));
}

void AsyncCheckpointer::save(const std::filesystem::path& path, const StateDict& state) {
  impl_->save(path, job_of(state));
}

void AsyncCheckpointer::wait() { impl_->finish(); }

bool AsyncCheckpointer::is_busy() const { return impl_->pending && !impl_->pending->is_done(); }

}  // namespace tessera
