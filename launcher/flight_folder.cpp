#include "launcher/flight_folder.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "launcher/child.h"
#include "launcher/job_report.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// Most bytes of one record; the library's are bounded far below.
constexpr uintmax_t kMostBytes = 16 << 20;
constexpr auto kKept = std::chrono::days(7);

/// Reads the record of `rank`. One that can't be read, or is no plain file, blames nobody.
FlightReport read_report(const std::string& path, int rank) try {
  if (!fs::is_regular_file(fs::symlink_status(path)) || fs::file_size(path) > kMostBytes)
    return {.rank = rank};
  std::ifstream file(path);
  const json record = json::parse(file);
  if (record.at("rank") != rank || !record.at("records").is_array()) return {.rank = rank};
  FlightReport report{.rank = rank,
                      .size = record.at("size"),
                      .culprit = record.value("culprit", -1),
                      .was_asked_for = record.value("reason", "") == "SIGUSR1",
                      .step = record.value("step", int64_t{0})};
  for (const json& entry : record.at("records")) {
    if (entry.value("group", "") != "world") continue;
    report.issued.emplace(std::pair(entry.value("channel", ""), entry.at("number").get<int64_t>()),
                          entry.value("text", ""));
  }
  return report;
} catch (const std::exception&) {
  return {.rank = rank};
}

/// Passes on what the program that shows records writes: a table, and lines of the launcher.
void pass_on(const UniqueFd& from, Terminal& terminal) {
  std::ifstream lines(fmt::format("/dev/fd/{}", from.get()));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("  ")) {
      terminal.write_from(nullptr, STDERR_FILENO, line + "\n");
    } else {
      say(terminal, line);
    }
  }
}

/// Runs a program to its end. Returns its exit status.
int run(const std::vector<std::string>& command, Terminal& terminal) try {
  ChildOptions options{.command = command};
  for (char** entry = environ; *entry != nullptr; ++entry) options.environment.emplace_back(*entry);
  const Child child = start_child(options);
  pass_on(child.out, terminal);
  pass_on(child.err, terminal);
  int status = 0;
  while (::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
} catch (const std::exception& error) {
  say(terminal, error.what());
  return 127;
}

/// Removes what was kept more than a week ago.
void remove_old(const fs::path& folder) {
  const auto now = fs::file_time_type::clock::now();
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (now - entry.last_write_time(ignored) > kKept) fs::remove_all(entry.path(), ignored);
}

/// Returns the folder of all of this user's jobs in the state directory of the XDG specification;
/// empty if there can be none.
fs::path folder_of_user() {
  const char* const state = std::getenv("XDG_STATE_HOME");
  const char* const home = std::getenv("HOME");
  fs::path folder;
  if (state != nullptr && *state == '/') {
    folder = state;
  } else if (home != nullptr && *home == '/') {
    folder = fs::path(home) / ".local/state";
  }
  if (folder.empty()) return {};
  folder /= "tessera/flight";
  std::error_code error;
  fs::create_directories(folder, error);
  if (error || ::access(folder.c_str(), W_OK | X_OK) != 0) return {};
  remove_old(folder);
  return folder;
}

/// Returns the only rank with its key, if all others, at least two, have another one. -1: there is
/// none.
template <class Key>
int odd_one_out(const std::map<Key, std::vector<int>>& ranks_of) {
  if (ranks_of.size() != 2) return -1;
  const auto& a = ranks_of.begin()->second;
  const auto& b = ranks_of.rbegin()->second;
  if (a.size() == 1 && b.size() > 1) return a.front();
  return b.size() == 1 && a.size() > 1 ? b.front() : -1;
}

/// Returns the rank that alone issued another collective than the others at one position. -1: there
/// is none, or several ranks did so.
int rank_with_another_collective(const std::vector<FlightReport>& reports) {
  std::map<std::pair<std::string, int64_t>, std::map<std::string, std::vector<int>>> ranks_of;
  for (const FlightReport& report : reports)
    for (const auto& [position, text] : report.issued)
      ranks_of[position][text].push_back(report.rank);
  int odd = -1;
  for (const auto& [position, by_text] : ranks_of) {
    if (by_text.size() == 1) continue;
    const int here = odd_one_out(by_text);
    if (here < 0 || (odd >= 0 && odd != here)) return -1;
    odd = here;
  }
  return odd;
}

}  // namespace

int blamed_rank(const std::vector<FlightReport>& reports) {
  if (const int odd = rank_with_another_collective(reports); odd >= 0) return odd;
  std::map<int, int> votes;
  int size = 1;
  for (const FlightReport& report : reports) {
    size = std::max(size, report.size);
    if (report.culprit >= 0 && report.culprit < report.size && report.culprit != report.rank)
      ++votes[report.culprit];
  }
  int blamed = -1, most = 0;
  for (const auto& [rank, count] : votes) {
    if (count == most) blamed = -1;  // no agreement
    if (count <= most) continue;
    blamed = rank;
    most = count;
  }
  return most >= std::min(2, size - 1) ? blamed : -1;
}

int rank_in_another_step(const std::vector<FlightReport>& reports) {
  std::map<int64_t, std::vector<int>> ranks_of;
  for (const FlightReport& report : reports) ranks_of[report.step].push_back(report.rank);
  return odd_one_out(ranks_of);
}

FlightFolder::FlightFolder(const std::string& log_dir, std::string trace)
    : trace_(std::move(trace)), is_kept_(!log_dir.empty()) {
  try {
    if (log_dir.empty()) {
      const fs::path of_user = folder_of_user();
      std::string pattern = of_user.empty() ? fs::temp_directory_path() / "tessera-flight-XXXXXX"
                                            : of_user / "XXXXXX";
      if (::mkdtemp(pattern.data()) == nullptr)
        throw std::system_error(errno, std::generic_category(), pattern);
      path_ = pattern;
    } else {
      const fs::path path = fs::absolute(log_dir) / "flight";  // ranks may change their directory
      fs::create_directories(path);
      path_ = path;
    }
  } catch (const std::exception& error) {  // the job runs without the records
    problem_ = error.what();
  }
}

FlightFolder::~FlightFolder() {
  std::error_code ignored;
  if (!is_kept_ && !path_.empty()) fs::remove_all(path_, ignored);
}

void FlightFolder::remove_records(const std::vector<int>& ranks) {
  taken_.clear();
  for (const int rank : ranks) {
    std::error_code ignored;
    if (!path_.empty()) fs::remove(record_path(rank), ignored);
  }
}

std::vector<int> FlightFolder::new_records(const std::vector<int>& ranks) const {
  std::vector<int> result;
  for (const int rank : ranks) {
    const Version version = version_of(rank);
    const auto before = taken_.find(rank);
    if (version != Version() && (before == taken_.end() || before->second != version))
      result.push_back(rank);
  }
  return result;
}

std::vector<int> FlightFolder::take_asked(const std::vector<int>& ranks) {
  std::vector<int> asked = new_records(ranks);
  for (const int rank : asked) taken_[rank] = version_of(rank);
  return asked;
}

std::vector<FlightReport> FlightFolder::read_failed(const std::vector<int>& ranks) const {
  const std::vector<int> added = new_records(ranks);
  std::vector<FlightReport> reports;
  for (const int rank : ranks) {
    if (version_of(rank) == Version()) continue;
    const FlightReport report = read_report(record_path(rank), rank);
    // A rank that was killed later must not be shown as it was when somebody asked.
    if (!report.was_asked_for || std::ranges::binary_search(added, rank)) reports.push_back(report);
  }
  return reports;
}

void FlightFolder::show(const std::vector<int>& ranks, int attempt, Terminal& terminal) {
  if (ranks.empty()) return;
  std::error_code error;
  const fs::path tool = fs::read_symlink("/proc/self/exe", error).parent_path() / "tessera-flight";
  const std::string trace = attempt == 0 ? trace_ : fmt::format("{}_restart_{}", trace_, attempt);
  std::vector<std::string> command = {tool, "--trace", trace, path_};
  for (const int rank : ranks) command.push_back(std::to_string(rank));
  const int status = run(command, terminal);
  if (status > 1) {
    say(terminal, fmt::format("the flight records could not be shown; `tessera flight {}` does so "
                              "where there is Python 3",
                              path_));
  }
  is_kept_ = is_kept_ || status != 1;
}

std::string FlightFolder::record_path(int rank) const {
  return fmt::format("{}/rank_{}.json", path_, rank);
}

FlightFolder::Version FlightFolder::version_of(int rank) const {
  struct stat status {};
  if (path_.empty() || ::lstat(record_path(rank).c_str(), &status) != 0) return {};
  return {status.st_ino, status.st_mtim.tv_sec, status.st_mtim.tv_nsec, status.st_size};
}

}  // namespace tessera::tools
