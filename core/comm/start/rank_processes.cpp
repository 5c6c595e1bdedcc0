#include "comm/start/rank_processes.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "comm/group/environment.h"
#include "comm/start/process_stat.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Empty if the process has ended, or is another user's.
std::string text_of(int64_t pid, const char* name) {
  std::ifstream file(fs::path("/proc") / std::to_string(pid) / name);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <typename Number>
std::optional<Number> number_in(std::string_view text) {
  Number number = 0;
  const auto end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

// Returns 0 for a process that has ended.
int64_t parent_of(int64_t pid) { return process_stat(pid).value_or(ProcessStat()).parent; }

// The variables that a process was started with, by which it is a rank of a job.
struct Variables {
  std::optional<int> rank;
  std::array<std::string, 3> of_job;

  bool operator==(const Variables&) const = default;
};

Variables variables_of(int64_t pid) {
  static constexpr std::array<std::string_view, 3> kOfJob = {
      "WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT="};
  Variables found;
  const std::string text = text_of(pid, "environ");
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\0', begin), text.size());
    const std::string_view entry = std::string_view(text).substr(begin, end - begin);
    if (entry.starts_with("RANK=")) found.rank = number_in<int>(entry.substr(5));
    for (size_t i = 0; i < kOfJob.size(); ++i)
      if (entry.starts_with(kOfJob[i])) found.of_job[i] = entry.substr(kOfJob[i].size());
  }
  return found;
}

std::vector<RankProcess> children_of(int64_t launcher, const Variables& wanted) {
  std::vector<RankProcess> found;
  std::error_code failed;
  for (fs::directory_iterator entry("/proc", failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const auto pid = number_in<int64_t>(entry->path().filename().native());
    if (!pid || parent_of(*pid) != launcher) continue;
    const Variables variables = variables_of(*pid);
    if (variables.rank && variables.of_job == wanted.of_job)
      found.push_back({*variables.rank, *pid, std::hash<std::string>()(text_of(*pid, "cmdline"))});
  }
  return found;
}

// The ranks of `tessera run` on several hosts have its address for a name: another job may, too.
bool has_name_of_its_own(const RankInfo& info) {
  return environment("TESSERA_JOB") &&
         (info.source != "tessera run" || info.local_size == info.size);
}

}  // namespace

RankProcesses processes_of_launcher(const RankInfo& info) {
  const int64_t self = ::getpid();
  const Variables variables = variables_of(self);
  if (has_name_of_its_own(info) || variables.rank != info.rank) return {};
  int64_t own = self, launcher = parent_of(self);
  while (launcher > 1 && variables_of(launcher) == variables)  // a shell around this rank
    own = std::exchange(launcher, parent_of(launcher));
  if (launcher <= 1) return {};  // process 1 also has the children of launchers that have ended
  return {own, children_of(launcher, variables)};
}

std::string contradiction_of(const RankProcesses& known, int other, int64_t pid) {
  const auto find = [&](int64_t wanted) {
    return std::ranges::find(known.all, wanted, &RankProcess::pid);
  };
  const auto own = find(known.own);
  std::vector<RankProcess> started;
  std::ranges::copy_if(known.all, std::back_inserter(started),
                       [&](const RankProcess& process) { return process.rank == other; });
  // If several programs have the variables of that rank, takes the one that this rank runs.
  const auto is_other_command = [&](const RankProcess& process) {
    return own == known.all.end() || process.command != own->command;
  };
  if (!std::ranges::all_of(started, is_other_command)) std::erase_if(started, is_other_command);
  const auto found = std::ranges::find(started, pid, &RankProcess::pid);
  if (found == started.end())
    return started.empty() ? ""
                           : fmt::format("its launcher has started process {} as rank {}",
                                         started.front().pid, other);
  for (const RankProcess& process : started) {
    if (process.pid != pid && process.command == found->command)
      return fmt::format("their launcher has started processes {} and {} as rank {}", pid,
                         process.pid, other);
  }
  return "";
}

}  // namespace tessera
