#include "comm/watch/flight_file.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>

#include "comm/group/collective_name.h"
#include "comm/group/environment.h"
#include "comm/group/process_time.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

std::atomic<int> requests = 0;
static_assert(std::atomic<int>::is_always_lock_free);

// Touches nothing of a world: another thread may destroy it meanwhile.
extern "C" void count_flight_request(int /*signal*/) { requests.fetch_add(1); }

int64_t unix_us() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

Json json_of(const std::string& group, const FlightEntry& entry, int64_t offset_us) {
  Json completed;
  if (entry.completed_us >= 0) completed = entry.completed_us + offset_us;
  return {{"group", group},
          {"channel", channel_name(entry.channel)},
          {"number", entry.number},
          {"collective", entry.name},
          {"subject", entry.subject},
          {"text", entry.text},
          {"bytes", entry.bytes},
          {"step", entry.step},
          {"phase", phase_name(entry.phase)},
          {"issued_us", entry.issued_us + offset_us},
          {"completed_us", completed}};
}

}  // namespace

std::string flight_folder() { return environment("TESSERA_FLIGHT_DIR").value_or(""); }

void write_flight_file(const std::string& folder, const FlightFile& file) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const int64_t now = unix_us();
  const int64_t offset = now - process_time_us();
  Json json{{"rank", file.rank},          {"size", file.size},
            {"host", host.data()},        {"pid", ::getpid()},
            {"reason", file.reason},      {"culprit", file.culprit},
            {"step", file.progress.step}, {"phase", phase_name(file.progress.phase)},
            {"written_us", now},          {"dropped_messages", file.dropped_messages},
            {"records", Json::array()}};
  for (const auto& [group, entry] : file.records)
    json["records"].push_back(json_of(group, entry, offset));
  // Waits of several threads may fail at once, and SIGUSR1 come meanwhile.
  static std::mutex writing;
  const std::lock_guard lock(writing);
  std::filesystem::create_directories(folder);
  const auto path = std::filesystem::path(folder) / ("rank_" + std::to_string(file.rank) + ".json");
  auto unfinished = path;
  unfinished += ".part";
  {
    std::ofstream out(unfinished);
    out.exceptions(std::ios::failbit | std::ios::badbit);
    out << json.dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  std::filesystem::rename(unfinished, path);
}

void count_flight_requests() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction present {};
    if (::sigaction(SIGUSR1, nullptr, &present) != 0 || present.sa_handler != SIG_DFL) return;
    struct sigaction action {};
    action.sa_handler = count_flight_request;
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGUSR1, &action, nullptr);
  });
}

int flight_requests() { return requests.load(); }

}  // namespace tessera
