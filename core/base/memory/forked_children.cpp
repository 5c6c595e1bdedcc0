#include "base/memory/forked_children.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <utility>

namespace tessera {
namespace {

// Each check takes a system call per child.
constexpr auto kLookEvery = std::chrono::milliseconds(10);

void close_end(int& end) {
  if (end >= 0) ::close(std::exchange(end, -1));
}

bool has_gone(int pipe) {
  pollfd entry{.fd = pipe, .events = 0, .revents = 0};
  return ::poll(&entry, 1, 0) > 0;
}

}  // namespace

ForkedChildren::~ForkedChildren() {
  for (Child& child : children_) close_end(child.pipe);
}

void ForkedChildren::before_fork() {
  // Without descriptors the child's lifetime is unknown: then nothing waits for it.
  if (::pipe2(pipe_, O_CLOEXEC) != 0) pipe_[0] = pipe_[1] = -1;
}

void ForkedChildren::after_fork_in_parent() {
  ++forks_;
  close_end(pipe_[1]);
  forget_gone();
  if (pipe_[0] >= 0) children_.push_back({forks_, std::exchange(pipe_[0], -1)});
}

// The child keeps its end of the pipe open, but forgets its number.
void ForkedChildren::after_fork_in_child() {
  close_end(pipe_[0]);
  pipe_[1] = -1;
  for (Child& child : children_) close_end(child.pipe);
  children_.clear();
}

int64_t ForkedChildren::last_seeing() {
  if (children_.empty()) return 0;
  if (Clock::now() - looked_ >= kLookEvery) forget_gone();
  return children_.empty() ? 0 : children_.back().fork;
}

void ForkedChildren::forget_gone() {
  std::erase_if(children_, [](Child& child) {
    if (!has_gone(child.pipe)) return false;
    close_end(child.pipe);
    return true;
  });
  looked_ = Clock::now();
}

}  // namespace tessera
