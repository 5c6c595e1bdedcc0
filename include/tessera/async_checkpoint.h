#pragma once

#include <tessera/checkpoint.h>
#include <tessera/export.h>

#include <cstdint>
#include <filesystem>
#include <memory>

namespace tessera {

/// What a save does that is asked for while the one before it is being written.
enum class WhenBusy : uint8_t {
  kWait,    ///< waits until that is done
  kRefuse,  ///< throws, on all ranks if any is busy; nothing changes
};

struct AsyncCheckpointOptions {
  WhenBusy when_busy = WhenBusy::kWait;
  /// The most that each rank writes; 0: as fast as it goes.
  double bytes_per_second = 0;
};

/// Saves checkpoints while training goes on.
///
///     AsyncCheckpointer checkpointer;
///     while (...) {
///       train();
///       checkpointer.save("runs/one/step-100", sharded, &optimizer, {.keep_last = 3});
///     }
///     checkpointer.wait();
///
/// A save blocks for as long as it takes to copy what the rank stores to host memory, which the
/// next save uses again; a thread then writes it. What is saved is as of the call. The checkpoint
/// is in its place when all ranks have written, even if none of them asks.
///
/// **Memory**: that of what the rank stores.
/// An error that comes later is thrown by the next `save()` or `wait()`, on all ranks; the
/// destructor, which waits for what is being written, prints one that nobody has seen.
/// `save()` and `wait()` are collective over the ranks that save. Not for
/// `options.whole_parameters`, for which ranks would have to gather at the same time as they train.
class TESSERA_API AsyncCheckpointer {
 public:
  explicit AsyncCheckpointer(const AsyncCheckpointOptions& options = {});
  ~AsyncCheckpointer();
  AsyncCheckpointer(const AsyncCheckpointer&) = delete;
  AsyncCheckpointer& operator=(const AsyncCheckpointer&) = delete;

  /// See `save_checkpoint()` and `save_state_dict()`. Throws what they throw before they write, and
  /// errors of the save before; in this case nothing is begun.
  void save(const std::filesystem::path& path, const ShardedModule& module,
            const ShardedOptimizer* optimizer, const SaveOptions& options = {});
  void save(const std::filesystem::path& path, torch::nn::Module& module,
            torch::optim::Optimizer* optimizer, const SaveOptions& options = {});
  void save(const std::filesystem::path& path, const StateDict& state);

  /// Returns when the last checkpoint is in its place, or throws why it is not. At once if there is
  /// none.
  void wait();

  /// True while this rank writes. Not collective.
  bool is_busy() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
