#pragma once

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/export.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

namespace tessera {

/// How a save behaves that is requested while the previous save is still being written.
enum class WhenBusy : uint8_t {
  kWait,    ///< waits until the previous save is done
  kRefuse,  ///< throws on all ranks if any rank is still writing; changes nothing
};

struct AsyncCheckpointOptions {
  WhenBusy when_busy = WhenBusy::kWait;
  /// Maximum number of bytes that each rank writes per second; 0: unlimited.
  double bytes_per_second = 0;
};

/// Saves checkpoints in the background while training goes on.
///
///     AsyncCheckpointer checkpointer;
///     while (...) {
///       train();
///       checkpointer.save("runs/one/step-100", sharded, &optimizer, {.keep_last = 3});
///     }
///     checkpointer.wait();
///
/// A save blocks while this rank's data is copied to a buffer in host memory (later saves reuse
/// it); a thread then writes the copy. The checkpoint holds the values at the time of the call. It
/// appears at its path when all ranks have written their files, even if no rank calls `wait()`.
///
/// **Memory**: a copy of the data that this rank stores.
/// A later error is thrown on all ranks by the next `save()` or `wait()`. The destructor waits for
/// the save in progress, and prints an error that no call has thrown.
/// `save()` and `wait()` are collective over the ranks that save. Does not support
/// `options.whole_parameters`, for which ranks would have to gather while they train.
class TESSERA_API AsyncCheckpointer {
 public:
  explicit AsyncCheckpointer(const AsyncCheckpointOptions& options = {});
  ~AsyncCheckpointer();
  AsyncCheckpointer(const AsyncCheckpointer&) = delete;
  AsyncCheckpointer& operator=(const AsyncCheckpointer&) = delete;

  /// Starts a save; see `save_checkpoint()` and `save_state_dict()`. Throws the errors that these
  /// throw before they write, and those of the previous save; in both cases no save is started.
  void save(const std::filesystem::path& path, const ShardedModule& module,
            const ShardedOptimizer* optimizer, const SaveOptions& options = {});
  void save(const std::filesystem::path& path, torch::nn::Module& module,
            torch::optim::Optimizer* optimizer, const SaveOptions& options = {});
  void save(const std::filesystem::path& path, const std::vector<CheckpointModel>& models,
            const SaveOptions& options = {});
  void save(const std::filesystem::path& path, const StateDict& state);

  /// Waits until the last checkpoint is in its place, or throws the error that prevented it.
  /// Returns at once if no save was started.
  void wait();

  /// Returns true while this rank is writing. Not collective.
  bool is_busy() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
