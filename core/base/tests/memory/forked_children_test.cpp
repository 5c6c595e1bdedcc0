#include "base/memory/forked_children.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <memory>
#include <thread>

#include "support/forked.h"

namespace tessera::forked_children_test {

// Forks as the heaps do.
std::unique_ptr<Forked> fork_with(ForkedChildren& children, const std::function<void()>& fn) {
  children.before_fork();
  auto child = std::make_unique<Forked>([&] {
    children.after_fork_in_child();
    fn();
  });
  children.after_fork_in_parent();
  return child;
}

bool soon(ForkedChildren& children, int64_t fork) {
  for (int i = 0; i < 1000 && children.last_seeing() != fork; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return children.last_seeing() == fork;
}

TEST(ForkedChildren, SeeTheMemoryUntilTheyEnd) {
  ForkedChildren children;
  EXPECT_EQ(children.last_seeing(), 0);
  auto first = fork_with(children, [] { ::pause(); });
  auto second = fork_with(children, [] { ::pause(); });
  EXPECT_EQ(children.forks(), 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(children.last_seeing(), 2);
  second.reset();
  EXPECT_TRUE(soon(children, 1));
  first.reset();
  EXPECT_TRUE(soon(children, 0));
}

TEST(ForkedChildren, SeeTheMemoryUntilTheyStartAProgram) {
  ForkedChildren children;
  const auto child = fork_with(children, [] { ::execlp("sleep", "sleep", "20", nullptr); });
  EXPECT_TRUE(soon(children, 0));
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), 0) << "the program has ended";
}

TEST(ForkedChildren, TheirOwnChildrenCountAsTheyDo) {
  ForkedChildren children;
  auto child = fork_with(children, [&] {
    const auto grandchild = fork_with(children, [] { ::sleep(1); });
    static_cast<void>(children.last_seeing());
    ::_exit(0);  // does not wait for it
  });
  EXPECT_EQ(child->wait(), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(children.last_seeing(), 1);
  EXPECT_TRUE(soon(children, 0));
}

}  // namespace tessera::forked_children_test
