#include "launcher/job_report.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "launcher/cause.h"

namespace tessera::tools {
namespace {

constexpr size_t kLinesOfOthers = 2;
constexpr size_t kOthersShown = 8;

void say_lines(Terminal& terminal, const std::vector<std::string>& lines, size_t most) {
  for (size_t i = lines.size() - std::min(lines.size(), most); i < lines.size(); ++i)
    terminal.write_from(nullptr, STDERR_FILENO, fmt::format("    {}\n", lines[i]));
}

void say_cause(Terminal& terminal, const Cause& cause) {
  const bool hidden = cause.rank && !cause.rank->ends_the_output;
  if (hidden && !cause.rank->last_lines.empty()) {
    say(terminal, fmt::format("the last lines that rank {} wrote to stderr:", cause.rank->rank));
    say_lines(terminal, cause.rank->last_lines, cause.rank->last_lines.size());
  }
  say(terminal, cause.text);
}

std::string how_it_ended(const RankEnd& rank, const Cause& cause) {
  if (&rank == cause.first) return "failed first: " + describe(rank);
  return rank.by_launcher ? "was ended then" : "failed, too: " + describe(rank);
}

/// The last words of the other ranks: how they noticed the failure.
void say_others(Terminal& terminal, const JobEnd& end, const Cause& cause) {
  size_t others = 0;
  for (const RankEnd& rank : end.ranks) {
    const bool speaks = rank.failed() && rank.has_last_words && !rank.last_lines.empty();
    if ((!speaks && &rank != cause.first) || &rank == cause.rank) continue;
    if (++others > kOthersShown) continue;
    say(terminal, fmt::format("rank {} {}{}", rank.rank, how_it_ended(rank, cause),
                              rank.last_lines.empty() ? "" : ":"));
    say_lines(terminal, rank.last_lines, kLinesOfOthers);
  }
  if (others > kOthersShown)
    say(terminal, fmt::format("{} more ranks failed", others - kOthersShown));
}

}  // namespace

void say(Terminal& terminal, const std::string& text) {
  terminal.write_from(nullptr, STDERR_FILENO, fmt::format("tessera run: {}\n", text));
}

void JobReport::on_asked_flight(const std::vector<int>& ranks) {
  if (ranks.empty()) say(terminal_, "no rank wrote a flight record; they do so after init()");
  folder_.show(ranks, attempt_, terminal_);
}

int JobReport::on_end(const JobEnd& end, const std::vector<FlightReport>& flights) {
  const std::optional<Cause> cause = cause_of(end, flights);
  std::vector<int> ranks;
  for (const FlightReport& flight : flights) ranks.push_back(flight.rank);
  if (cause) folder_.show(ranks, attempt_, terminal_);
  for (const pid_t pid : end.immortal) {
    say(terminal_, fmt::format("process {} is still there after SIGKILL", pid));
  }
  if (end.interrupted_by != 0 && end.interrupted_by != SIGPIPE) {
    say(terminal_, fmt::format("interrupted by {}", signal_text(end.interrupted_by)));
  }
  if (!cause) return end.immortal.empty() ? 0 : 1;
  if (cause->rank != nullptr && cause->rank->after_interrupt && cause->rank->killed)
    return 128 + end.interrupted_by;
  say_cause(terminal_, *cause);
  say_others(terminal_, end, *cause);
  return cause->status;
}

}  // namespace tessera::tools
