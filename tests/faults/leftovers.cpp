#include "leftovers.h"

#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "process/program_run.h"
#include "watched_process.h"

namespace tessera {
namespace {

std::set<std::string> files_in_memory() {
  std::set<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored))
    names.insert(entry.path().string());
  return names;
}

std::set<std::string> memory_mounts() {
  std::set<std::string> lines;
  std::ifstream mounts("/proc/self/mounts");
  for (std::string line; std::getline(mounts, line);) {
    const bool is_memory = line.starts_with("tmpfs ") || line.find(" tmpfs ") != std::string::npos;
    if (is_memory && line.find(" /run/netns") == std::string::npos) lines.insert(line);
  }
  return lines;
}

std::vector<pid_t> processes_with(const std::string& mark) {
  std::vector<pid_t> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0 || !is_running(pid)) continue;
    const std::string variables = '\0' + read_file(entry.path() / "environ");
    if (variables.find('\0' + mark + '\0') != std::string::npos) found.push_back(pid);
  }
  return found;
}

void add_new(std::vector<std::string>& to, const char* kind, const std::set<std::string>& now,
             const std::set<std::string>& before) {
  for (const std::string& text : now) {
    if (!before.contains(text)) to.push_back(kind + text);
  }
}

}  // namespace

Leftovers::Leftovers(std::string mark)
    : mark_(std::move(mark)), files_(files_in_memory()), mounts_(memory_mounts()) {}

std::vector<std::string> Leftovers::left_now(const std::set<pid_t>& expected) const {
  std::vector<std::string> left;
  for (const pid_t pid : processes_with(mark_)) {
    if (!expected.contains(pid)) left.push_back("process " + std::to_string(pid));
  }
  add_new(left, "file ", files_in_memory(), files_);
  add_new(left, "mount ", memory_mounts(), mounts_);
  return left;
}

std::vector<std::string> Leftovers::after(double seconds, const std::set<pid_t>& expected) const {
  const double until = now_seconds() + seconds;
  while (true) {
    auto left = left_now(expected);
    if (left.empty() || now_seconds() > until) return left;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void Leftovers::kill() const {
  for (const pid_t pid : processes_with(mark_)) ::kill(pid, SIGKILL);
}

}  // namespace tessera
