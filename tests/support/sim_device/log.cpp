#include "support/sim_device/log.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

struct Entries {
  std::mutex mutex;
  bool is_recording = false;
  std::vector<std::shared_ptr<LoggedOperation>> all;

  static Entries& get() {
    static Entries& entries = *new Entries;
    return entries;
  }
};

}  // namespace

Log::Log() {
  Entries& entries = Entries::get();
  std::lock_guard lock(entries.mutex);
  TORCH_CHECK(!entries.is_recording, "[sim::Log] one log at a time");
  entries.is_recording = true;
}

Log::~Log() {
  Entries& entries = Entries::get();
  std::lock_guard lock(entries.mutex);
  entries.is_recording = false;
  entries.all.clear();
}

std::vector<LoggedOperation> Log::operations() const {
  for (int device = 0; device < kDeviceCount; ++device) drain(device);
  Entries& entries = Entries::get();
  std::lock_guard lock(entries.mutex);
  std::vector<LoggedOperation> all;
  for (const auto& entry : entries.all) all.push_back(*entry);
  return all;
}

std::shared_ptr<LoggedOperation> log_operation(int device, int64_t stream, std::string name) {
  Entries& entries = Entries::get();
  std::lock_guard lock(entries.mutex);
  if (!entries.is_recording) return nullptr;
  LoggedOperation operation{device, stream, std::move(name), std::chrono::steady_clock::now()};
  entries.all.push_back(std::make_shared<LoggedOperation>(std::move(operation)));
  return entries.all.back();
}

void log_run(LoggedOperation& operation, std::chrono::steady_clock::time_point begin,
             std::chrono::steady_clock::time_point end) {
  std::lock_guard lock(Entries::get().mutex);
  operation.begin = begin;
  operation.end = end;
}

}  // namespace tessera::testing::sim
