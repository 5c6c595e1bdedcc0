#pragma once

#include <ATen/core/Generator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <tessera/comm/world.h>

#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace tessera {

/// The store of ranks that are threads: its waits, and questions for keys, end when a rank fails,
/// instead of at the timeout.
class RankStore : public c10d::HashStore {
 public:
  /// Makes all waits for missing keys, also later ones, throw an error with `reason`.
  void fail(const std::string& reason);

  using c10d::HashStore::wait;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  bool check(const std::vector<std::string>& keys) override;
  std::vector<uint8_t> get(const std::string& key) override;

 private:
  std::string failure_;  // guarded by m_
};

/// The state that the ranks of one `spawn()` share.
struct SpawnedWorld {
  SpawnedWorld(int size, uint64_t sealed_seed) : size(size), sealed_seed(sealed_seed) {}

  const int size;
  const uint64_t sealed_seed;  ///< of the default generator while they run; see `GeneratorSeal`
  const c10::intrusive_ptr<RankStore> store = c10::make_intrusive<RankStore>();
  std::atomic<int> failures = 0;
};

/// A rank of `spawn()`. It is part of its thread's debug info, because LibTorch passes that on to
/// threads that work for this one: autograd's of a device, those of TorchScript's `fork`.
class SpawnedRank : public c10::DebugInfoBase {
 public:
  SpawnedRank(std::shared_ptr<SpawnedWorld> world, int rank, at::Generator generator);

  /// Returns the rank of the calling thread, or null.
  static SpawnedRank* current();
  /// The kind of debug info that holds the current rank; LibTorch has a fixed list of kinds and
  /// leaves this one free.
  static c10::DebugInfoKind kind() { return c10::DebugInfoKind::INFERENCE_CONTEXT; }

  RankInfo info() const;
  SpawnedWorld& world() const { return *world_; }
  at::Generator& generator() { return generator_; }

  /// Must be called before the rank's connections are closed: that makes the other ranks fail, too,
  /// and the error of the rank that failed first is to be reported.
  void note_closing();
  void fail(std::exception_ptr failure);

  /// Returns null if the rank has not failed.
  const std::exception_ptr& failure() const { return failure_; }
  /// Returns how many ranks failed before this one.
  int failed_after() const { return failed_after_; }

 private:
  std::shared_ptr<SpawnedWorld> world_;
  int rank_;
  at::Generator generator_;
  std::exception_ptr failure_;
  int failed_after_ = -1;
};

}  // namespace tessera
