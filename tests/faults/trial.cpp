#include "trial.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <set>
#include <stdexcept>

#include "job.h"
#include "leftovers.h"
#include "process/program_run.h"

namespace tessera {
namespace {

/// Whatever still runs after this is killed, and counts as hung.
constexpr double kLimit = 60;
/// For the last threads and children of a job that has ended.
constexpr double kGrace = 2;

/// Waits until the culprit has said `words`, and returns the time that it names.
double time_of(const FaultJob& job, const char* words) {
  const auto said = [&] { return job.culprit_process().announced(words); };
  const auto any_ended = [&] {
    return std::any_of(job.processes.begin(), job.processes.end(),
                       [](const auto& process) { return process->has_ended(); });
  };
  watch(job.processes, now_seconds() + kLimit, [&] { return said() || any_ended(); });
  if (!said())
    throw std::runtime_error("rank " + std::to_string(job.culprit) + " never said \"" + words +
                             '"');
  return *said();
}

void watch_for(const FaultJob& job, double seconds) {
  watch(job.processes, now_seconds() + seconds, [] { return false; });
}

/// Commits the fault, or sees that the culprit does; returns the time.
double commit(const FaultJob& job, int number) {
  std::mt19937 random(number);
  const auto up_to = [&](double seconds) {
    return std::uniform_real_distribution<double>(0, seconds)(random);
  };
  const auto signal = [&](int signal_number) {
    time_of(job, "ready");
    watch_for(job, up_to(0.03));  // a few steps: the signal comes anywhere in one
    const double now = now_seconds();
    job.culprit_process().signal(signal_number);
    return now;
  };
  switch (job.cell.fault->deed) {
    case Deed::kOwn:
      return time_of(job, "fault now");
    case Deed::kKill:
      return signal(SIGKILL);
    case Deed::kStop:
      return signal(SIGSTOP);
    case Deed::kKillInInit: {
      watch_for(job, up_to(1));
      const double now = now_seconds();
      job.culprit_process().signal(SIGKILL);
      return now;
    }
    case Deed::kLinkDown: {
      time_of(job, "ready");
      watch_for(job, up_to(0.03));
      const double now = now_seconds();
      job.hosts->cut(0);
      return now;
    }
    default:
      return now_seconds();  // it has been there from the start
  }
}

bool is_of_two_jobs(const FaultJob& job) {
  return job.cell.fault->deed == Deed::kTwoJobs || job.cell.fault->deed == Deed::kNamelessJobs;
}

/// Whether process `index` should report the fault.
bool should_report(const FaultJob& job, size_t index) {
  if (is_of_two_jobs(job)) {  // one of the jobs may have the port
    const WatchedProcess& process = *job.processes[index];
    return process.status() != 0 ||
           std::any_of(process.out().begin(), process.out().end(),
                       [](const Line& line) { return line.text == "mixed with another job"; });
  }
  if (job.cell.fault->deed == Deed::kLinkDown || job.stranger) return true;
  return job.ranks[index] != job.culprit;
}

std::vector<Line> since(const std::vector<Line>& lines, double begin) {
  std::vector<Line> later;
  std::copy_if(lines.begin(), lines.end(), std::back_inserter(later),
               [&](const Line& line) { return line.at >= begin; });
  return later;
}

void read_reports(const FaultJob& job, double fault, Outcome& outcome) {
  for (size_t i = 0; i < job.processes.size(); ++i) {
    const WatchedProcess& process = *job.processes[i];
    for (const Line& line : process.err()) {
      outcome.account +=
          fmt::format("  {}, {:.3f} s: {}\n", job.titles[i], line.at - fault, line.text);
    }
    if (!should_report(job, i)) continue;
    const double begin = std::max(fault, process.announced("init").value_or(fault));
    const Blame blame =
        find_blame(since(process.err(), fault), job.ranks[i], job.cause_for(job.ranks[i]));
    ++outcome.survivors;
    outcome.named += blame.names_culprit && !blame.blames_another;
    outcome.blamed_others += blame.blames_another;
    outcome.placed += blame.places;
    if (blame.names_culprit) outcome.seconds.push_back(std::max(0.0, blame.at - begin));
  }
}

std::set<pid_t> own_children(const FaultJob& job) {
  std::set<pid_t> children;
  for (const auto& process : job.processes) {
    if (const auto child = process->announced("child")) children.insert(static_cast<pid_t>(*child));
  }
  return children;
}

/// Waits until the ranks have ended, and kills those that don't.
void end_ranks(const FaultJob& job, Outcome& outcome) {
  const bool is_stopped = job.cell.fault->deed == Deed::kStop;
  const auto have_ended = [&] {
    return std::all_of(job.processes.begin(), job.processes.end(), [&](const auto& process) {
      return process->has_ended() || (is_stopped && process.get() == &job.culprit_process());
    });
  };
  watch(job.processes, now_seconds() + kLimit, have_ended);
  if (is_stopped) job.culprit_process().signal(SIGKILL);
  for (size_t i = 0; i < job.processes.size(); ++i) {
    if (job.processes[i]->has_ended() || (is_stopped && job.ranks[i] == job.culprit)) continue;
    outcome.leftovers.push_back(job.titles[i] + " hangs");
    job.processes[i]->signal(SIGKILL);
  }
  watch(job.processes, now_seconds() + kGrace, [&] {
    return std::all_of(job.processes.begin(), job.processes.end(),
                       [](const auto& process) { return process->has_ended(); });
  });
}

}  // namespace

Outcome try_fault(const Cell& cell, int number) {
  static int trials = 0;
  const std::string mark =
      "FAULT_TRIAL=" + std::to_string(::getpid()) + "-" + std::to_string(++trials);
  const TemporaryDirectory scratch;
  const Leftovers leftovers(mark);
  FaultJob job(cell, number, mark);
  const bool has_names = cell.fault->deed == Deed::kTwoJobs;
  const int jobs = is_of_two_jobs(job) ? 2 : 1;
  for (int i = 0; i < jobs; ++i)
    job.start(scratch.path("saved"), has_names ? "job-" + std::to_string(i) : "",
              jobs > 1 ? 1 + i : 0);
  const double fault = commit(job, number);
  Outcome outcome;
  end_ranks(job, outcome);
  read_reports(job, fault, outcome);
  for (const std::string& left : leftovers.after(kGrace, own_children(job)))
    outcome.leftovers.push_back(left);
  leftovers.kill();
  return outcome;
}

std::string obstacle_to(const Cell& cell) {
  if (cell.hosts == 1) return "";
  if (!tools::LinkedHosts::can_be_made()) return "network namespaces can't be made here";
  if (cell.transport == "arena" && cell.ranks == cell.hosts)
    return "each host has one rank, which shares no memory";
  const Deed deed = cell.fault->deed;
  const bool has_stranger = deed == Deed::kSilentPort || deed == Deed::kWebPort;
  if (has_stranger) return "the stranger on the port is on no host";
  return "";
}

}  // namespace tessera
