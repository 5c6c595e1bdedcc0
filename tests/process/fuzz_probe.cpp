// Reads files of one format that were damaged or made to do harm.
//
//     fuzz_probe FORMAT FIRST LAST DIRECTORY
//
// Inputs are numbered, and a number gives the same input always. The files of each are in
// DIRECTORY/input while it is read, and its number in DIRECTORY/number. At the end, one line tells
// how many reads were accepted and how many refused. The program ends with status 1 at an input
// that gives another error than a `c10::Error` that names a file, or takes more memory than 1 GiB;
// by SIGPROF at one that takes over 10 seconds of the processor, by SIGALRM at one that waits for
// ever, and by another signal where the library crashes.

#include <c10/util/Exception.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <new>

#include "fuzz/format.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

constexpr int kMostSeconds = 10;            // of the processor
constexpr unsigned kMostIdleSeconds = 100;  // for one that waits for something
constexpr int64_t kMostBytes = int64_t{1} << 30;

const std::map<std::string, FuzzFormat (*)()>& formats() {
  static const std::map<std::string, FuzzFormat (*)()> kFormats = {
      {"index", index_format},
      {"safetensors", safetensors_format},
      {"model", model_format},
      {"torch", torch_format},
      {"sizes", sizes_format}};
  return kFormats;
}

int64_t peak_bytes() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

// Allocations far beyond the present ones fail, before they make the machine slow.
void limit_memory() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose shadows are larger
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const auto bytes = static_cast<rlim_t>(pages * ::getpagesize() + kMostBytes);
  const rlimit limit{bytes, bytes};
  ::setrlimit(RLIMIT_AS, &limit);
#endif
}

// 0: no limit.
void limit_time(int seconds, unsigned idle_seconds) {
  const itimerval limit{{0, 0}, {seconds, 0}};
  ::setitimer(ITIMER_PROF, &limit, nullptr);
  ::alarm(idle_seconds);
}

struct Counts {
  int64_t accepted = 0, refused = 0;
};

// Returns the fault in how the input was refused; empty if there is none.
std::string read_once(const std::function<void(const fs::path&, const fs::path&)>& read,
                      const fs::path& input, const fs::path& made, Counts& counts) {
  try {
    read(input, made);
    ++counts.accepted;
    return "";
  } catch (const c10::Error& error) {
    ++counts.refused;
    const std::string text = error.what_without_backtrace();
    if (text.find(input.string()) == std::string::npos) return "the error names no file: " + text;
    if (text.size() > 10'000) return "the error is long: " + text.substr(0, 1000);
    return "";
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
}

void begin(const fs::path& directory, int64_t number) {
  for (const char* name : {"input", "made"}) {
    fs::remove_all(directory / name);
    fs::create_directories(directory / name);
  }
  std::ofstream(directory / "number") << number;
}

int run(const FuzzFormat& format, int64_t first, int64_t last, const fs::path& directory) {
  Counts counts;
  const int64_t before = peak_bytes();
  for (int64_t number = first; number < last; ++number) {
    begin(directory, number);
    Draw draw(static_cast<uint64_t>(number));
    format.write(draw, directory / "input");
    limit_time(kMostSeconds, kMostIdleSeconds);
    for (const auto& [name, read] : format.reads) {
      std::string wrong = read_once(read, directory / "input", directory / "made", counts);
      if (peak_bytes() - before > kMostBytes) wrong = "it takes more memory than 1 GiB";
      if (wrong.empty()) continue;
      std::fprintf(stderr, "input %ld: %s: %s\n", static_cast<long>(number), name.c_str(),
                   wrong.c_str());
      return 1;
    }
    limit_time(0, 0);
  }
  std::printf("inputs %ld accepted %ld refused %ld\n", static_cast<long>(last - first),
              static_cast<long>(counts.accepted), static_cast<long>(counts.refused));
  return 0;
}

}  // namespace
}  // namespace tessera::testing

int main(int argc, char** argv) {
  using namespace tessera::testing;
  const auto format = argc == 5 ? formats().find(argv[1]) : formats().end();
  if (format == formats().end()) {
    std::fputs("usage: fuzz_probe index|safetensors|model|torch|sizes FIRST LAST DIRECTORY\n",
               stderr);
    return 2;
  }
  const FuzzFormat made = format->second();
  limit_memory();
  return run(made, std::stol(argv[2]), std::stol(argv[3]), argv[4]);
}
