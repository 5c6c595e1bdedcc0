#include "launcher/terminal.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace tessera::tools {
namespace {

/// Returns the number of bytes that a ready file descriptor takes without blocking.
size_t atomic_bytes(int fd) {
  struct stat status {};
  const bool is_file = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  return is_file ? 1 << 20 : 4096;  // PIPE_BUF: as much as POLLOUT promises of a pipe
}

}  // namespace

void Terminal::write(int fd, std::string_view text) {
  if (broken_ || text.empty()) return;
  queued_bytes_ += text.size();
  if (!queue_.empty() && queue_.back().fd == fd && queue_.back().text.size() < 64 << 10) {
    queue_.back().text.append(text);
  } else {
    queue_.push_back({fd, std::string(text)});
  }
}

void Terminal::write_from(const void* source, int fd, std::string_view text) {
  if (text.empty()) return;
  if (open_line_ != nullptr && open_line_ != source) write(open_line_fd_, "\n");
  write(fd, text);
  last_source_ = source;
  open_line_ = text.back() == '\r' ? source : nullptr;
  open_line_fd_ = fd;
}

void Terminal::write_some() {
  Chunk& front = queue_.front();
  const size_t size = std::min(front.text.size() - written_of_front_, atomic_bytes(front.fd));
  const ssize_t count = ::write(front.fd, front.text.data() + written_of_front_, size);
  if (count < 0) {
    if (errno != EINTR && errno != EAGAIN) fail(errno);
    return;
  }
  queued_bytes_ -= count;
  written_of_front_ += count;
  if (written_of_front_ == front.text.size()) pop_front();
}

void Terminal::fail(int error) {
  if (error == EPIPE || error == ECONNRESET) {  // the reader has ended
    broken_ = true;
    queue_.clear();
    queued_bytes_ = written_of_front_ = 0;
    return;
  }
  const int fd = next_fd();
  const size_t lost = queue_.front().text.size() - written_of_front_;
  queued_bytes_ -= lost;
  pop_front();
  if (std::exchange(lost_bytes_, lost_bytes_ + lost) > 0 || fd == STDERR_FILENO) return;
  std::string text = fmt::format(
      "tessera run: cannot write to stdout: {}; the ranks go on, and their output is lost until it "
      "can be written again\n",
      std::strerror(error));
  queued_bytes_ += text.size();
  queue_.push_front({STDERR_FILENO, std::move(text)});
}

void Terminal::pop_front() {
  queue_.pop_front();
  written_of_front_ = 0;
}

}  // namespace tessera::tools
