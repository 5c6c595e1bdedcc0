// A rank that follows its flags, in their order. It needs no LibTorch, so it starts at once.
//
//   --on-rank R      the flags behind it are for rank R only
//   --on-restart K   the flags behind it are for the K-th start only (0: the first)
//   --env NAME       prints "NAME=value"
//   --print TEXT     prints TEXT and a newline; --print-err to stderr; --print-raw without newline
//   --long-line N    prints a line of N letters, rank 0 'a', rank 1 'b', ...
//   --lines N        prints N lines "line I of rank R", piece by piece
//   --binary         prints the bytes 0 to 255 and a newline
//   --echo-input     copies stdin to stdout
//   --cores          prints the cores that it may use
//   --pid            prints "pid P"
//   --child          starts a process that sleeps in the same process group, prints "pid P"
//   --ignore N       ignores signal N
//   --tell N         prints "got N" when signal N comes, and goes on
//   --sleep S        sleeps S seconds in all, despite signals
//   --wait-signal S  waits for a signal of --tell, at most S seconds; the second time for a second
//   one
//   --kill N         kills itself with signal N
//   --exit S         exits with status S

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

namespace {

volatile sig_atomic_t signals_seen = 0;

void on_signal(int number) {
  char text[] = "got ??\n";
  text[4] = static_cast<char>('0' + number / 10);
  text[5] = static_cast<char>('0' + number % 10);
  [[maybe_unused]] const ssize_t written = ::write(STDOUT_FILENO, text, sizeof(text) - 1);
  signals_seen = signals_seen + 1;
}

int environment_number(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}

void sleep_for(double seconds, bool until_signal) {
  static int awaited = 0;
  if (until_signal) ++awaited;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end && !(until_signal && signals_seen >= awaited)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void print_lines(int count, int rank) {
  for (int i = 0; i < count; ++i) {
    std::printf("line %d ", i);
    if (i % 7 == 0) std::fflush(stdout);  // so that the launcher also sees halves of lines
    std::printf("of rank %d\n", rank);
  }
}

void print_cores() {
  cpu_set_t set;
  ::sched_getaffinity(0, sizeof(set), &set);
  std::printf("cores");
  for (int id = 0; id < CPU_SETSIZE; ++id) {
    if (CPU_ISSET(id, &set)) std::printf(" %d", id);
  }
  std::printf("\n");
}

void start_child() {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::execlp("sleep", "sleep", "100", nullptr);
    ::_exit(127);
  }
  std::printf("pid %d\n", pid);
}

void echo_input() {
  for (int byte = std::getchar(); byte != EOF; byte = std::getchar()) std::putchar(byte);
}

/// Flags without a value; false if `flag` is none of them.
bool do_flag(const std::string& flag) {
  if (flag == "--binary") {
    for (int byte = 0; byte < 256; ++byte) std::putchar(byte);
    std::putchar('\n');
  } else if (flag == "--echo-input") {
    echo_input();
  } else if (flag == "--cores") {
    print_cores();
  } else if (flag == "--pid") {
    std::printf("pid %d\n", ::getpid());
  } else if (flag == "--child") {
    start_child();
  } else {
    return false;
  }
  return true;
}

bool do_with_text(const std::string& flag, const char* value) {
  if (flag == "--env") {
    const char* text = std::getenv(value);
    std::printf("%s=%s\n", value, text == nullptr ? "(unset)" : text);
  } else if (flag == "--print") {
    std::printf("%s\n", value);
  } else if (flag == "--print-err") {
    std::fprintf(stderr, "%s\n", value);
  } else if (flag == "--print-raw") {
    std::printf("%s", value);
  } else {
    return false;
  }
  return true;
}

void do_with_number(const std::string& flag, double value, int rank) {
  const int number = static_cast<int>(value);
  if (flag == "--long-line") {
    std::printf("%s\n", std::string(number, static_cast<char>('a' + rank)).c_str());
  } else if (flag == "--lines") {
    print_lines(number, rank);
  } else if (flag == "--ignore") {
    ::signal(number, SIG_IGN);
  } else if (flag == "--tell") {
    ::signal(number, on_signal);
  } else if (flag == "--sleep" || flag == "--wait-signal") {
    sleep_for(value, flag == "--wait-signal");
  } else if (flag == "--kill") {
    ::raise(number);
  } else if (flag == "--exit") {
    std::exit(number);
  } else {
    std::fprintf(stderr, "rank_probe: unknown flag %s\n", flag.c_str());
    std::exit(99);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int rank = environment_number("RANK");
  bool active = true;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--on-rank" || flag == "--on-restart") {
      const int wanted = std::atoi(value);
      active = wanted == (flag == "--on-rank" ? rank : environment_number("TESSERA_RESTART"));
      ++i;
      continue;
    }
    if (!active) {
      const bool has_value = value[0] != '\0' && std::strncmp(value, "--", 2) != 0;
      i += has_value ? 1 : 0;
      continue;
    }
    if (!do_flag(flag)) {
      if (!do_with_text(flag, value)) do_with_number(flag, std::atof(value), rank);
      ++i;
    }
    std::fflush(stdout);
  }
  return 0;
}
