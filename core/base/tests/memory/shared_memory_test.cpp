#include "base/memory/shared_memory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <cstring>

#include "support/forked.h"

namespace tessera::shared_memory_test {

constexpr size_t kBytes = 64 * 4096;

std::shared_ptr<SharedMemory> filled(int value) {
  auto memory = SharedMemory::create("test", kBytes);
  std::memset(memory->data(), value, kBytes);
  return memory;
}

TEST(SharedMemory, AChildReadsIt) {
  const auto memory = filled(7);
  const std::byte* const seen = memory->read_only();
  EXPECT_EQ(status_of_child([&] {
              TORCH_CHECK(memory->data()[kBytes - 1] == std::byte{7});
              TORCH_CHECK(seen[0] == std::byte{7});
            }),
            0);
}

TEST(SharedMemory, WritesOfAChildStayItsOwn) {
  const auto memory = filled(7);
  EXPECT_EQ(status_of_child([&] {
              std::memset(memory->data(), 9, kBytes);
              TORCH_CHECK(memory->data()[1] == std::byte{9});
              TORCH_CHECK(memory->read_only()[1] == std::byte{7});
            }),
            0);
  for (size_t i = 0; i < kBytes; ++i) ASSERT_EQ(memory->data()[i], std::byte{7});
}

TEST(SharedMemory, WithoutADescriptorWritesEndAChild) {
  const auto memory = filled(7);
  memory->close_descriptor();
  EXPECT_EQ(status_of_child([&] { TORCH_CHECK(memory->data()[1] == std::byte{7}); }), 0);
  EXPECT_EQ(status_of_child([&] {
              ::signal(SIGSEGV, SIG_DFL);
              memory->data()[1] = std::byte{9};
            }),
            128 + SIGSEGV);
  EXPECT_EQ(memory->data()[1], std::byte{7});
}

TEST(SharedMemory, GoesInAChildAndStaysInTheParent) {
  auto memory = filled(7);
  EXPECT_EQ(status_of_child([&] { memory.reset(); }), 0);
  EXPECT_EQ(memory->data()[1], std::byte{7});
}

}  // namespace tessera::shared_memory_test
