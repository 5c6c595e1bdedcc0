#include "comm/group/interruption.h"

#include <gtest/gtest.h>
#include <tessera/comm/world.h>

#include <stdexcept>
#include <thread>

namespace tessera::testing::interruption_test {
namespace {

void raise_stop() { throw std::runtime_error("stop"); }

void fail() { C10_THROW_ERROR(DistBackendError, "failed"); }

void interrupt_and_fail() {
  interrupt_waits();
  fail();
}

// The functions of this file are the process's.
class Interruption : public ::testing::Test {
 protected:
  Interruption() { on_interruption(&raise_stop); }
  ~Interruption() override { on_interruption(nullptr); }
};

TEST_F(Interruption, ReplacesTheErrorOfAWaitOnce) {
  EXPECT_THROW(interruptible(interrupt_and_fail), std::runtime_error);
  EXPECT_THROW(interruptible(fail), c10::DistBackendError);
}

TEST_F(Interruption, EndsTheNextWaitBeforeItBegins) {
  interrupt_waits();
  EXPECT_THROW(interruptible([] { ADD_FAILURE(); }), std::runtime_error);
  EXPECT_EQ(interruptible([] { return 3; }), 3);
}

TEST_F(Interruption, ConcernsTheFirstThreadAlone) {
  std::thread([] {
    EXPECT_THROW(interruptible(interrupt_and_fail), c10::DistBackendError);
  }).join();
  EXPECT_THROW(raise_interruption(), std::runtime_error);
}

TEST(InterruptionOfNobody, LeavesTheError) {
  EXPECT_THROW(interruptible(interrupt_and_fail), c10::DistBackendError);
  EXPECT_NO_THROW(raise_interruption());
}

}  // namespace
}  // namespace tessera::testing::interruption_test
