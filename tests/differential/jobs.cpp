#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <tuple>

#include "differential/outcome.h"
#include "differential/worlds.h"
#include "support/test_device.h"

namespace tessera::differential {
namespace {

using Programs = std::vector<const Program*>;
using Clock = std::chrono::steady_clock;

constexpr auto kDeadline = std::chrono::seconds(90);  // of each program
constexpr size_t kMostOfChild = 200;

// Lets the ranks, threads of this process, agree whether all have ended a program without an error.
// A rank that has had one does not wait for the others, who may be waiting for it.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}

  bool all_are_well(bool is_well) {
    std::unique_lock lock(mutex_);
    all_well_ = all_well_ && is_well;
    const int round = round_;
    if (++come_ == ranks_) {
      come_ = 0;
      ++round_;
    }
    changed_.notify_all();
    changed_.wait(lock, [&] { return round_ != round || !all_well_; });
    return all_well_;
  }

 private:
  const int ranks_;
  int come_ = 0, round_ = 0;
  bool all_well_ = true;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// A child process: runs programs, and writes a line to `pipe` when it begins with one and when it
// has ended it.
class Child {
 public:
  Child(Programs programs, int pipe) : programs_(std::move(programs)), pipe_(pipe) {}

  void run() {
    at::set_num_threads(1);
    std::map<std::tuple<int, Transport>, std::vector<size_t>> worlds;
    std::map<size_t, Traces> of_processes;  // which are forked before there are threads
    for (size_t i = 0; i < programs_.size(); ++i) {
      if (programs_[i]->processes) {
        tell("begin", i);
        of_processes[i] = train_in_processes(*programs_[i]);
      } else {
        worlds[{programs_[i]->ranks, programs_[i]->transport}].push_back(i);
      }
    }
    for (const auto& [number, traces] : of_processes) tell_outcome(number, traces);
    for (auto& [kind, own] : worlds) {
      while (!own.empty()) {
        const std::vector<Traces> traces = train_in_world(own);
        for (size_t i = 0; i < traces.size(); ++i) tell_outcome(own[i], traces[i]);
        own.erase(own.begin(), own.begin() + static_cast<int64_t>(traces.size()));
      }
    }
  }

 private:
  // Trains programs, by number, one after another in one world until one of them fails.
  std::vector<Traces> train_in_world(const std::vector<size_t>& numbers) {
    const Program& first = *programs_[numbers[0]];
    std::vector<Traces> traces;
    Meeting meeting(first.ranks);
    run_threads(first.ranks, first.transport, [&](int rank, const World& world) {
      for (size_t i = 0; i < numbers.size(); ++i) {
        if (rank == 0) {
          tell("begin", numbers[i]);
          traces.emplace_back(first.ranks);
        }
        if (!meeting.all_are_well(true)) return;
        traces[i][rank] = train_sharded(*programs_[numbers[i]], world);
        if (!meeting.all_are_well(traces[i][rank].error.empty())) return;
        // What such ranks still wait for would be the next program's.
        const Program& ended = *programs_[numbers[i]];
        if (may_disagree(ended, static_cast<int>(ended.ops.size()) - 1)) return;
      }
    });
    return traces;
  }

  // Judges also what another world reads of it.
  void tell_outcome(size_t number, const Traces& traces) {
    tell("begin", number);
    const Program& program = *programs_[number];
    Outcome outcome = judge(program, traces);
    if (outcome.verdict == Verdict::kEqual && program.reload_ranks > 0) {
      const Traces loaded = reload(program);
      for (size_t rank = 0; rank < loaded.size(); ++rank) {
        // Buffers are each rank's own, or those of rank 0.
        const Trace& saved = traces[loaded.size() == traces.size() ? rank : 0];
        const std::string& error = loaded[rank].error;
        const bool has_optimizer = program.optimizers.size() == 1;
        const std::string text =
            error.empty() ? difference_of(saved, loaded[rank], has_optimizer) : error;
        if (!text.empty()) outcome = {Verdict::kFinding, "loaded again: " + text};
      }
    }
    std::filesystem::remove_all(directory_of(program));
    tell("end", number, outcome);
  }

  void tell(const char* what, size_t number, const Outcome& outcome = {}) {
    std::string line =
        c10::str(what, " ", number, " ", static_cast<int>(outcome.verdict), " ", outcome.text);
    std::replace(line.begin(), line.end(), '\n', ' ');
    line += '\n';
    TORCH_CHECK(::write(pipe_, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
  }

  const Programs programs_;
  const int pipe_;
};

// The parent's view of a child.
struct Running {
  Programs programs;
  pid_t pid = 0;
  int pipe = 0;
  std::FILE* errors = nullptr;  // its stderr
  std::string text;             // of an unfinished line
  std::vector<bool> ended;      // by program
  size_t current = 0;
  Clock::time_point since = Clock::now();
  bool was_late = false;
};

Running start(Programs programs) {
  Running child{.programs = std::move(programs), .errors = std::tmpfile()};
  child.ended.assign(child.programs.size(), false);
  int ends[2];
  TORCH_CHECK(::pipe(ends) == 0);
  child.pid = ::fork();
  TORCH_CHECK(child.pid >= 0);
  if (child.pid == 0) {
    ::close(ends[0]);
    ::dup2(::fileno(child.errors), STDERR_FILENO);
    if (child.programs[0]->simulated) ::setenv("TESSERA_TEST_DEVICE", "sim", 1);
    int status = 0;
    try {
      Child(child.programs, ends[1]).run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      status = 3;
    }
    std::fflush(stderr);
    std::_Exit(status);
  }
  ::close(ends[1]);
  child.pipe = ends[0];
  return child;
}

// How a child has ended, with the end of what it wrote to stderr.
std::string last_words(Running& child, int status) {
  std::fseek(child.errors, 0, SEEK_END);
  std::fseek(child.errors, std::max(0L, std::ftell(child.errors) - 600), SEEK_SET);
  std::string text(600, ' ');
  text.resize(std::fread(text.data(), 1, text.size(), child.errors));
  const std::string how = child.was_late        ? "hangs"
                          : WIFSIGNALED(status) ? c10::str("ends by signal ", WTERMSIG(status))
                                                : c10::str("exits with ", WEXITSTATUS(status));
  return how + "; stderr: " + text;
}

// Reads what a child has written; returns false at its end.
bool read_lines(Running& child, const std::function<void(const Program&, const Outcome&)>& report) {
  char buffer[4096];
  const ssize_t size = ::read(child.pipe, buffer, sizeof(buffer));
  if (size <= 0) return false;
  child.text.append(buffer, size);
  child.since = Clock::now();
  for (size_t end; (end = child.text.find('\n')) != std::string::npos;
       child.text.erase(0, end + 1)) {
    const std::string line = child.text.substr(0, end);
    char what[8];
    int verdict = 0, begin = 0;
    TORCH_CHECK(
        std::sscanf(line.c_str(), "%7s %zu %d %n", what, &child.current, &verdict, &begin) == 3,
        line);
    if (what[0] != 'e') continue;
    child.ended[child.current] = true;
    report(*child.programs[child.current], {static_cast<Verdict>(verdict), line.substr(begin)});
  }
  return true;
}

}  // namespace

void run(const std::vector<Program>& programs, int jobs,
         const std::function<void(const Program&, const Outcome&)>& report) {
  std::vector<Programs> lists;
  const size_t most = std::min(kMostOfChild, (programs.size() + jobs - 1) / jobs);
  for (const bool simulated : {false, true}) {
    Programs list;
    for (const Program& program : programs) {
      if (program.simulated != simulated) continue;
      list.push_back(&program);
      if (list.size() == most) lists.push_back(std::exchange(list, {}));
    }
    if (!list.empty()) lists.push_back(list);
  }
  std::vector<Running> running;
  while (!lists.empty() || !running.empty()) {
    while (static_cast<int>(running.size()) < jobs && !lists.empty()) {
      running.push_back(start(std::move(lists.back())));
      lists.pop_back();
    }
    std::vector<pollfd> waits;
    for (const Running& child : running) waits.push_back({child.pipe, POLLIN, 0});
    ::poll(waits.data(), waits.size(), 1000);
    for (size_t i = running.size(); i-- > 0;) {
      Running& child = running[i];
      if (!child.was_late && Clock::now() - child.since > kDeadline) {
        child.was_late = true;
        ::kill(child.pid, SIGKILL);
      }
      if (waits[i].revents == 0 || read_lines(child, report)) continue;
      int status = 0;
      ::waitpid(child.pid, &status, 0);
      if (status != 0) {
        child.ended[child.current] = true;
        report(*child.programs[child.current], {Verdict::kFinding, last_words(child, status)});
      }
      Programs rest;
      for (size_t k = 0; k < child.ended.size(); ++k)
        if (!child.ended[k]) rest.push_back(child.programs[k]);
      if (!rest.empty()) lists.push_back(std::move(rest));
      std::fclose(child.errors);
      ::close(child.pipe);
      running.erase(running.begin() + static_cast<int64_t>(i));
    }
  }
}

}  // namespace tessera::differential
