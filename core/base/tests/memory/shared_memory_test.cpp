#include "base/memory/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <torch/torch.h>

#include <array>
#include <cstring>
#include <optional>

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

// Another process with `kBytes` of memory, full of sevens, as long as this lives.
class Maker {
 public:
  explicit Maker(const std::function<void(SharedMemoryHandle&)>& change) {
    std::array<int, 2> pipe{};
    TORCH_CHECK(::pipe2(pipe.data(), O_CLOEXEC) == 0);
    process_.emplace([&] {
      const auto memory = filled(7);
      SharedMemoryHandle handle = memory->handle();
      change(handle);
      const std::string text = handle.to_text();
      TORCH_CHECK(::write(pipe[1], text.data(), text.size()) > 0);
      ::pause();
    });
    std::array<char, 256> text{};
    TORCH_CHECK(::read(pipe[0], text.data(), text.size() - 1) > 0);
    for (const int end : pipe) ::close(end);
    handle_ = SharedMemoryHandle::from_text(text.data());
  }
  std::shared_ptr<SharedMemory> opened() const { return SharedMemory::open(handle_); }

 private:
  std::optional<Forked> process_;
  SharedMemoryHandle handle_;
};

TEST(SharedMemory, IsOpenedByOtherProcesses) {
  EXPECT_EQ(Maker([](auto&) {}).opened()->data()[kBytes - 1], std::byte{7});
}

TEST(SharedMemory, IsOpenedAsItWasMadeAlone) {
  EXPECT_THROW(Maker([](auto& handle) { ++handle.id; }).opened(), std::runtime_error);
  EXPECT_THROW(Maker([](auto& handle) { handle.nbytes = 4096; }).opened(), std::runtime_error);
  const Maker zeros([](auto& handle) {
    handle = {.pid = ::getpid(), .fd = ::memfd_create("zeros", 0), .nbytes = kBytes};
    TORCH_CHECK(::ftruncate(static_cast<int>(handle.fd), 2 * kBytes) == 0);
  });
  EXPECT_THROW(zeros.opened(), std::runtime_error) << "memory of another program";
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const Maker stranger(
      [](auto& handle) { TORCH_CHECK(::fchown(static_cast<int>(handle.fd), 1, 1) == 0); });
  EXPECT_THROW(stranger.opened(), std::runtime_error) << "another user's";
}

}  // namespace tessera::shared_memory_test
