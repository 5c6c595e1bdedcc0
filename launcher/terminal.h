#pragma once

#include <deque>
#include <string>
#include <string_view>

namespace tessera::tools {

/// The launcher's own stdout and stderr: one queue, so that lines keep their order and stay whole
/// if both lead to the same place, and no blocking writes, so that signals and deadlines are
/// handled while no reader reads.
class Terminal {
 public:
  /// Queues `text` for the file descriptor.
  void write(int fd, std::string_view text);

  /// Queues text that no other source may continue: ends a line that `source` did not begin.
  void write_from(const void* source, int fd, std::string_view text);

  /// Returns the source of the text that was queued last; null if it was none.
  const void* last_source() const { return last_source_; }

  bool pending() const { return !queue_.empty(); }
  /// Returns true if so much is queued that the ranks should wait.
  bool full() const { return queued_bytes_ >= 1 << 20; }
  /// Returns true if the reader has closed its end.
  bool broken() const { return broken_; }
  /// Returns how much could not be written although there is a reader: the disk may be full.
  size_t lost_bytes() const { return lost_bytes_; }
  /// Returns the destination of the next bytes.
  int next_fd() const { return queue_.front().fd; }

  /// Writes as much as one write takes without blocking; to be called when `next_fd()` is writable.
  void write_some();

 private:
  struct Chunk {
    int fd;
    std::string text;
  };
  void fail(int error);
  void pop_front();

  std::deque<Chunk> queue_;
  size_t written_of_front_ = 0;
  size_t queued_bytes_ = 0;
  size_t lost_bytes_ = 0;
  bool broken_ = false;
  const void* open_line_ = nullptr;  ///< the source whose last text ended with a carriage return
  int open_line_fd_ = -1;
  const void* last_source_ = nullptr;
};

}  // namespace tessera::tools
