#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/checkpoint/async_checkpoint.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <future>
#include <new>
#include <thread>
#include <utility>

#include "checkpoint/save.h"
#include "comm/group/collective_name.h"

namespace tessera {
namespace {

constexpr size_t kAlignment = 64;  // bytes, of each copy

// Bytes to prefetch ahead of the copy.
[[maybe_unused]] constexpr size_t kAhead = 1024;

// Writes past the caches: the copy is not read soon, and its memory need not be read before it is
// overwritten. (memcpy does so only for pieces that are larger than most shards.) `to` is aligned.
void copy_past_caches(char* to, const char* from, size_t nbytes) {
  size_t done = 0;
#ifdef __SSE2__
  for (; done + kAlignment <= nbytes; done += kAlignment) {
    const auto* source = reinterpret_cast<const __m128i*>(from + done);
    _mm_prefetch(from + done + kAhead, _MM_HINT_NTA);
    auto* target = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1),
                  c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();
#endif
  std::memcpy(to + done, from + done, nbytes - done);
}

// Returns a function that keeps writing below a number of bytes per second; 0: no bound.
BeforeWrite paced(double bytes_per_second) {
  using Clock = std::chrono::steady_clock;
  if (bytes_per_second <= 0) return {};
  return [bytes_per_second, next = Clock::now()](size_t nbytes) mutable {
    std::this_thread::sleep_until(next);
    // Unused time is not saved up: there is no burst after a pause.
    next = std::max(next, Clock::now()) +
           std::chrono::duration_cast<Clock::duration>(
               std::chrono::duration<double>(static_cast<double>(nbytes) / bytes_per_second));
  };
}

}  // namespace

// Host memory that each save reuses: touching new memory for the first time costs more than the
// copy into it.
class HostCopy {
 public:
  // Copies the chunks and makes `contents` refer to the copies. Overwrites earlier copies.
  void take(RankContents& contents) {
    size_t nbytes = 0;
    visit_contents(contents, [&](const RankContents& part) {
      for (const ChunkData& chunk : part.chunks) nbytes += room_for(chunk);
    });
    if (nbytes > nbytes_) {
      memory_.reset();  // before more is allocated
      memory_.reset(new (std::align_val_t(kAlignment)) char[nbytes]);
      nbytes_ = nbytes;
    }
    char* next = memory_.get();
    visit_contents(contents, [&](RankContents& part) {
      for (ChunkData& chunk : part.chunks) {
        chunk = copied_to(next, chunk);
        next += room_for(chunk);
      }
    });
  }

 private:
  static ChunkData copied_to(char* place, const ChunkData& chunk) {
    const at::Tensor data = chunk.get();
    const at::Tensor copy = at::from_blob(place, {chunk.numel}, at::dtype(chunk.dtype));
    if (data.is_cpu() && data.is_contiguous()) {
      copy_past_caches(place, static_cast<const char*>(data.const_data_ptr()), data.nbytes());
    } else {
      copy.copy_(data);
    }
    return chunk_of(chunk.key, copy);
  }

  static size_t room_for(const ChunkData& chunk) {
    return (static_cast<size_t>(chunk.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
  }

  struct Delete {
    void operator()(char* memory) const {
      ::operator delete[](memory, std::align_val_t(kAlignment));
    }
  };
  std::unique_ptr<char[], Delete> memory_;
  size_t nbytes_ = 0;
};

// One save that is being written. Its thread communicates with other ranks through the file system
// only, so that training may use the process groups meanwhile.
class PendingSave {
 public:
  PendingSave(const SaveJob& job, BegunSave begun, double bytes_per_second)
      : ranks_(job.ranks),
        owner_(job.owner),
        progress_(job.progress),
        begun_(std::move(begun)),
        thread_([this, bytes_per_second] { run(paced(bytes_per_second)); }) {}
  ~PendingSave() {
    if (thread_.joinable()) thread_.join();
  }

  bool is_done() const { return done_; }

  /// Waits until the checkpoint is published. Collective; if a rank fails, all ranks throw.
  void finish() {
    const PhaseScope phase(progress_, Phase::kSave);
    try {
      ranks_.check([&] { written_.get_future().get(); }, "checkpoint");
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
  void run(const BeforeWrite& before_write) {
    try {
      begun_.writer->write(begun_.contents, before_write);
      written_.set_value();
    } catch (...) {
      error_ = std::current_exception();
      written_.set_exception(error_);
      done_ = true;
      return;
    }
    try {
      if (ranks_.rank() == 0) begun_.writer->commit(ranks_.timeout(), &stop_);
    } catch (...) {
      error_ = std::current_exception();
    }
    done_ = true;
  }

  Ranks ranks_;
  std::shared_ptr<const void> owner_;
  Progress*
      progress_;  // for the calls that wait; not for the thread, beside which training goes on
  BegunSave begun_;
  std::atomic<bool> stop_ = false, done_ = false;
  std::exception_ptr error_;
  std::promise<void> written_;
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
    const auto answers = ranks.all_gather_bytes(busy ? "busy" : "", kCheckpointTag);
    const auto rank = std::find(answers.begin(), answers.end(), "busy") - answers.begin();
    TORCH_CHECK(rank == std::ssize(answers), "[AsyncCheckpointer] rank ", rank, " of ",
                answers.size(),
                " is still writing the checkpoint before; call wait(), save less often, or let "
                "saves wait (WhenBusy::kWait)");
  }

  void save(const std::filesystem::path& path, SaveJob job) {
    at::NoGradGuard no_grad;
    const PhaseScope phase(job.progress, Phase::kSave);
    // Checked inside `collect`, whose errors reach all ranks: throwing here would leave them
    // waiting.
    const bool is_whole = job.whole || std::ranges::any_of(job.models, [](const SaveJob& model) {
                            return model.whole;
                          });
    job.collect = [collect = std::move(job.collect), is_whole](ChunkCollector& contents) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !is_whole,
          "[AsyncCheckpointer] options.whole_parameters can't be saved while training goes on, as "
          "all ranks gather for it: use save_checkpoint(), or export_checkpoint() of the "
          "checkpoint that is saved without it");
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
  if (const std::exception_ptr error = impl_->pending->join())
    fmt::print(stderr, "AsyncCheckpointer: {}\n", exception_text(error));
}

void AsyncCheckpointer::save(const std::filesystem::path& path, const ShardedModule& module,
                             const ShardedOptimizer* optimizer, const SaveOptions& options) {
  impl_->save(path, job_of(module, optimizer, options));
}

void AsyncCheckpointer::save(const std::filesystem::path& path, torch::nn::Module& module,
                             torch::optim::Optimizer* optimizer, const SaveOptions& options) {
  impl_->save(path, job_of(module, optimizer, options));
}

void AsyncCheckpointer::save(const std::filesystem::path& path,
                             const std::vector<CheckpointModel>& models,
                             const SaveOptions& options) {
  impl_->save(path, job_of(models, options));
}

void AsyncCheckpointer::save(const std::filesystem::path& path, const StateDict& state) {
  impl_->save(path, job_of(state));
}

void AsyncCheckpointer::wait() { impl_->finish(); }

bool AsyncCheckpointer::is_busy() const { return impl_->pending && !impl_->pending->is_done(); }

}  // namespace tessera
