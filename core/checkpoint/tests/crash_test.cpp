// Power fails at any moment: a disk keeps what was synced, and of the rest whatever it likes. Saves
// and exports are recorded, call by call, and the disk is put together as it may be after each.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <stdio.h>
#include <sys/stat.h>
#include <tessera/interop/exchange.h>

#include <array>
#include <atomic>
#include <cstdarg>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/tests/saved_model.h"
#include "support/run_world.h"

namespace tessera::testing::crash_test {

namespace fs = std::filesystem;

// A call that changes files below the root, with paths as they are then.
struct Call {
  enum Kind : uint8_t {
    kCreate,
    kWrite,
    kResize,
    kSync,
    kRename,
    kExchange,
    kMakeDirectory,
    kRemove,
    kPromise
  };
  Kind kind;
  std::string path, to;
  int64_t offset = 0;
  std::string data = {};
};

// The calls of this process below a directory, while it lives. One at a time.
class Recording {
 public:
  explicit Recording(const fs::path& root) : root_(root.string() + "/") { current_ = this; }
  ~Recording() { current_ = nullptr; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // From here on, `text` must hold after a crash.
  void promise(const std::string& text) {
    const std::lock_guard lock(mutex_);
    calls_.push_back({Call::kPromise, text, ""});
  }
  const std::vector<Call>& calls() const { return calls_; }

  // Calls `real`, and adds the call that `describe` returns if that succeeds.
  template <class Describe, class Real>
  static auto around(Describe describe, Real real) {
    Recording* const recording = current_;
    if (!recording) return real();
    Call call = describe();
    const auto is_below = [&](const std::string& path) {
      return (path + "/").starts_with(recording->root_);
    };
    if (!is_below(call.path)) return real();
    const std::lock_guard lock(recording->mutex_);
    const auto result = real();
    for (std::string* const path : {&call.path, &call.to})
      if (is_below(*path)) path->erase(0, recording->root_.size());  // empty: the root itself
    if (call.kind == Call::kWrite && result > 0) call.data.resize(static_cast<size_t>(result));
    if (result >= 0) recording->calls_.push_back(std::move(call));
    return result;
  }

 private:
  static std::atomic<Recording*> current_;
  const std::string root_;
  std::mutex mutex_;
  std::vector<Call> calls_;
};
std::atomic<Recording*> Recording::current_ = nullptr;

std::string path_of(int fd) {
  std::array<char, 4096> path{};
  const ssize_t length =
      ::readlink(fmt::format("/proc/self/fd/{}", fd).c_str(), path.data(), path.size());
  return length > 0 ? std::string(path.data(), static_cast<size_t>(length)) : "";
}

std::string absolute(const char* path) { return fs::absolute(path).lexically_normal().string(); }

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace tessera::testing::crash_test

// These stand in the way of libc's functions for the whole program.
using tessera::testing::crash_test::absolute;
using tessera::testing::crash_test::Call;
using tessera::testing::crash_test::next;
using tessera::testing::crash_test::path_of;
using tessera::testing::crash_test::Recording;

extern "C" {

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  static auto* const real = next<int(const char*, int, ...)>("open");
  if ((flags & O_CREAT) == 0) return real(path, flags, mode);
  return Recording::around(
      [&] {
        return Call{Call::kCreate, absolute(path), "", (flags & O_TRUNC) != 0};
      },
      [&] { return real(path, flags, mode); });
}
ssize_t pwrite(int fd, const void* data, size_t nbytes, off_t offset) {
  static auto* const real = next<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return Recording::around(
      [&] {
        return Call{
            Call::kWrite, path_of(fd), "", offset, {static_cast<const char*>(data), nbytes}};
      },
      [&] { return real(fd, data, nbytes, offset); });
}
int ftruncate(int fd, off_t size) noexcept {
  static auto* const real = next<int(int, off_t)>("ftruncate");
  return Recording::around(
      [&] {
        return Call{Call::kResize, path_of(fd), "", size};
      },
      [&] { return real(fd, size); });
}
int fsync(int fd) {
  static auto* const real = next<int(int)>("fsync");
  return Recording::around(
      [&] {
        return Call{Call::kSync, path_of(fd), ""};
      },
      [&] { return real(fd); });
}
int rename(const char* from, const char* to) noexcept {
  static auto* const real = next<int(const char*, const char*)>("rename");
  return Recording::around(
      [&] {
        return Call{Call::kRename, absolute(from), absolute(to)};
      },
      [&] { return real(from, to); });
}
int renameat2(int at, const char* from, int at_to, const char* to, unsigned flags) noexcept {
  static auto* const real = next<int(int, const char*, int, const char*, unsigned)>("renameat2");
  return Recording::around(
      [&] {
        return Call{Call::kExchange, absolute(from), absolute(to)};
      },
      [&] { return real(at, from, at_to, to, flags); });
}
int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const real = next<int(const char*, mode_t)>("mkdir");
  return Recording::around(
      [&] {
        return Call{Call::kMakeDirectory, absolute(path), ""};
      },
      [&] { return real(path, mode); });
}
int remove(const char* path) noexcept {
  static auto* const real = next<int(const char*)>("remove");
  return Recording::around(
      [&] {
        return Call{Call::kRemove, absolute(path), ""};
      },
      [&] { return real(path); });
}

}  // extern "C"

namespace tessera::testing::crash_test {

// A disk: what programs see of it, and what of that is safe.
class Disk {
 public:
  Disk() { nodes_.push_back({.is_directory = true}); }

  void apply(const Call& call) {
    switch (call.kind) {
      case Call::kCreate: {
        if (find(call.path) < 0) link(call.path, add({}));
        Node& file = nodes_[find(call.path)];
        if (call.offset != 0) file.pending.push_back({.is_resize = true});
        return;
      }
      case Call::kWrite:
        return nodes_[at(call.path)].pending.push_back({false, call.offset, call.data});
      case Call::kResize:
        return nodes_[at(call.path)].pending.push_back({true, call.offset, ""});
      case Call::kSync:
        return sync(nodes_[call.path.empty() ? 0 : at(call.path)]);
      case Call::kRename:
        link(call.to, at(call.path));
        return unlink(call.path);
      case Call::kExchange: {
        const int one = at(call.path), other = at(call.to);
        link(call.path, other);
        return link(call.to, one);
      }
      case Call::kMakeDirectory:
        return link(call.path, add({.is_directory = true}));
      case Call::kRemove:
        return unlink(call.path);
      case Call::kPromise:
        return;
    }
  }

  // Writes the disk as it may be after a crash. Without `random`, all is lost that may be.
  void write(const fs::path& to, std::mt19937_64* random) const { write(0, to, random); }

 private:
  struct Write {
    bool is_resize = false;
    int64_t offset = 0;
    std::string data = {};
  };
  using Entries = std::map<std::string, int>;
  struct Node {
    bool is_directory = false;
    std::string safe = {};            // of a file
    std::vector<Write> pending = {};  // since
    Entries entries = {}, safe_entries = {};
    std::vector<Entries> since = {};  // the entries after each change of them
  };

  int add(Node node) {
    nodes_.push_back(std::move(node));
    return static_cast<int>(nodes_.size()) - 1;
  }
  int find(const std::string& path) const {
    int node = 0;
    for (const auto& part : fs::path(path)) {
      const auto found = nodes_[node].entries.find(part.string());
      if (found == nodes_[node].entries.end()) return -1;
      node = found->second;
    }
    return node;
  }
  int at(const std::string& path) const {
    const int node = find(path);
    TORCH_CHECK(node >= 0, "there is no ", path);
    return node;
  }
  Node& directory_of(const std::string& path) {
    return nodes_[at(fs::path(path).parent_path().string())];
  }
  void link(const std::string& path, int node) {
    Node& directory = directory_of(path);
    directory.entries[fs::path(path).filename().string()] = node;
    directory.since.push_back(directory.entries);
  }
  void unlink(const std::string& path) {
    Node& directory = directory_of(path);
    directory.entries.erase(fs::path(path).filename().string());
    directory.since.push_back(directory.entries);
  }
  static void apply(const Write& write, std::string& data) {
    const size_t end = static_cast<size_t>(write.offset) + write.data.size();
    if (write.is_resize || data.size() < end) data.resize(end);
    data.replace(static_cast<size_t>(write.offset), write.data.size(), write.data);
  }
  static void sync(Node& node) {
    for (const Write& write : node.pending) apply(write, node.safe);
    node.pending.clear();
    node.safe_entries = node.entries;
    node.since.clear();
  }
  void write(int number, const fs::path& to, std::mt19937_64* random) const {
    const Node& node = nodes_[number];
    if (!node.is_directory) {
      std::string data = node.safe;
      for (const Write& write : node.pending)
        if (random && (*random)() % 2 == 0) apply(write, data);
      std::ofstream(to, std::ios::binary) << data;
      return;
    }
    fs::create_directory(to);
    const size_t choice = random ? (*random)() % (node.since.size() + 1) : 0;
    for (const auto& [name, entry] : choice == 0 ? node.safe_entries : node.since[choice - 1])
      write(entry, to / name, random);
  }

  std::vector<Node> nodes_;
};

// Looks at the disk after a crash; `promised` is the last promise.
using Look = std::function<void(const fs::path& disk, const std::string& promised)>;

// Records what `work` does in a new directory, and looks at the disk as it may be after each call:
// as little as that may be, and `draws` times as much as may be. Returns the number of crashes.
int crash_everywhere(const fs::path& scratch, int draws,
                     const std::function<void(const fs::path& root, Recording&)>& work,
                     const Look& look) {
  const fs::path root = scratch / "root", crashed = scratch / "crashed";
  fs::create_directory(root);
  std::vector<Call> calls;
  {
    Recording recording(root);
    work(root, recording);
    calls = recording.calls();
  }
  fs::remove_all(root);
  std::mt19937_64 random(1);
  Disk disk;
  std::string promised;
  int crashes = 0;
  for (const Call& call : calls) {
    if (call.kind == Call::kPromise) promised = call.path;
    disk.apply(call);
    for (int draw = 0; draw <= draws; ++draw, ++crashes) {
      fs::remove_all(crashed);
      disk.write(crashed, draw == 0 ? nullptr : &random);
      look(crashed, promised);
      if (!::testing::Test::HasFailure()) continue;
      ADD_FAILURE() << "crash " << crashes << ", after call " << static_cast<int>(call.kind)
                    << " of " << call.path;
      return crashes;
    }
  }
  fs::remove_all(crashed);
  return crashes;
}

void save(const fs::path& path, double number, SaveOptions options = {}) {
  options.numbers["save"] = number;
  save_checkpoint(path, *Filled(number).sharded, nullptr, options);
}

// Expects a whole checkpoint, of the promised save or a later one.
void expect_whole(const std::optional<fs::path>& path, const std::string& promised) {
  if (promised.empty() && !path) return;
  ASSERT_TRUE(path) << "save " << promised << " is lost";
  try {
    EXPECT_EQ(verify_checkpoint(*path), std::vector<std::string>());
    EXPECT_GE(inspect_checkpoint(*path).numbers.at("save"),
              promised.empty() ? 0 : std::stod(promised));
  } catch (const std::exception& error) {
    ADD_FAILURE() << *path << " after save " << promised << ": " << error.what();
  }
}

// Saves of a series, some in the background, of which the last two are kept.
int crash_in_series(int ranks, int draws) {
  const ScratchDirectory scratch;
  const auto work = [&](const fs::path& root, Recording& recording) {
    run_world(ranks, [&](World& world) {
      AsyncCheckpointer checkpointer;
      for (int step = 8; step < 13; ++step) {
        const fs::path path = root / "runs" / "one" / fmt::format("step-{}", step);
        SaveOptions options{.keep_last = 2};
        if (step % 2 == 0) {
          save(path, step, options);
        } else {
          options.numbers["save"] = step;
          checkpointer.save(path, *Filled(step).sharded, nullptr, options);
          checkpointer.wait();
        }
        if (world.rank() == 0) recording.promise(std::to_string(step));
      }
    });
  };
  return crash_everywhere(scratch.path(), draws, work, [](const auto& disk, const auto& promised) {
    const fs::path directory = disk / "runs" / "one";
    expect_whole(fs::exists(directory) ? latest_checkpoint(directory) : std::nullopt, promised);
  });
}

// Saves in the place of others.
int crash_in_replacements(int draws) {
  const ScratchDirectory scratch;
  const auto work = [&](const fs::path& root, Recording& recording) {
    run_world(2, [&](World& world) {
      for (int number = 1; number < 5; ++number) {
        save(root / "same", number);
        if (world.rank() == 0) recording.promise(std::to_string(number));
      }
    });
  };
  return crash_everywhere(scratch.path(), draws, work, [](const auto& disk, const auto& promised) {
    const fs::path path = disk / "same";
    expect_whole(fs::exists(path) ? std::optional(path) : std::nullopt, promised);
  });
}

// A file that is replaced, and a directory of several.
int crash_in_exports(int draws) {
  const ScratchDirectory scratch;
  const fs::path source = scratch / "source";
  run_world(2, [&](World&) {
    for (const int number : {1, 2}) save(source / std::to_string(number), number);
  });
  std::vector<std::string> contents;  // of the file, after each export
  std::map<std::string, std::string> several;
  const auto work = [&](const fs::path& root, Recording& recording) {
    for (const char* const number : {"1", "2"}) {
      export_checkpoint(source / number, root / "model.safetensors");
      contents.push_back(read_text(root / "model.safetensors"));
      recording.promise(number);
    }
    export_checkpoint(source / "1", root / "several" / "", {.max_shard_bytes = 400});
    recording.promise("3");
    for (const std::string& name : names_in(root / "several"))
      several[name] = read_text(root / "several" / name);
  };
  const int crashes =
      crash_everywhere(scratch.path(), draws, work, [&](const auto& disk, const auto& promised) {
        const int done = promised.empty() ? 0 : std::stoi(promised);
        const fs::path file = disk / "model.safetensors", directory = disk / "several";
        EXPECT_TRUE(done == 0 || fs::exists(file)) << promised;
        if (fs::exists(file)) {
          EXPECT_TRUE((done < 2 && read_text(file) == contents[0]) ||
                      read_text(file) == contents[1]);
        }
        EXPECT_TRUE(done < 3 || fs::exists(directory));
        for (const auto& [name, content] : several)
          if (fs::exists(directory)) {
            EXPECT_EQ(read_text(directory / name), content) << name;
          }
      });
  EXPECT_GT(several.size(), 2u);
  return crashes;
}

TEST(CrashSlow, LosesNoCheckpointOfASeries) { EXPECT_GT(crash_in_series(2, 1), 400); }
TEST(CrashSlow, LosesNoCheckpointThatIsReplaced) { EXPECT_GT(crash_in_replacements(1), 200); }
TEST(CrashSlow, LosesNoExport) { EXPECT_GT(crash_in_exports(2), 50); }
TEST(CrashNightly, LosesNothingAtTenThousandPlaces) {
  int crashes = crash_in_replacements(12) + crash_in_exports(12);
  for (const int ranks : {1, 2, 3}) crashes += crash_in_series(ranks, 12);
  EXPECT_GT(crashes, 10'000);
}

}  // namespace tessera::testing::crash_test
