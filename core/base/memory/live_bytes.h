#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace tessera {

/// Counts the bytes of CPU tensors made since its construction, less those freed. Exact for tensors
/// made after it, whichever thread frees them. Freeing an older tensor subtracts its whole block, a
/// little more than the tensor.
class LiveBytes {
 public:
  enum class Scope : uint8_t {
    kProcess,  ///< tensors of all threads
    kThread,   ///< tensors that the calling thread makes: where ranks are threads
  };

  /// Returns null if LibTorch's allocator for the CPU is neither Tessera's nor its own.
  static std::unique_ptr<LiveBytes> start(Scope scope);
  ~LiveBytes();
  LiveBytes(const LiveBytes&) = delete;
  LiveBytes& operator=(const LiveBytes&) = delete;

  int64_t now() const;
  /// Returns the most since the last call of this, or since the start.
  int64_t take_peak();

 private:
  friend struct LiveBlocks;
  explicit LiveBytes(uint64_t thread) : thread_(thread) {}

  const uint64_t thread_;  // 0: all
  int64_t now_ = 0, peak_ = 0;
};

/// True while there is any counter.
extern std::atomic<bool> counting_live_bytes;

/// Called by the allocator, while there is a counter, for each block that it has allocated and
/// before it frees one. `block_bytes`: the block's size in the allocator's books.
void note_taken(const void* data, size_t nbytes);
void note_freed(const void* data, size_t block_bytes);

}  // namespace tessera
