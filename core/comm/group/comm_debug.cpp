#include <fmt/format.h>
#include <tessera/comm/comm_debug.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/device/scoped_value.h"
#include "comm/group/module_of_operators.h"

namespace tessera {
namespace {

constexpr std::string_view kCountName = "tessera count of collectives";
const ScopedValue<CommDebug*> kInnermost(&kCountName, 202);

CommDebug* innermost() {
  CommDebug* const* const found = kInnermost.find();
  return found ? *found : nullptr;
}

// Threads of several devices may count in one backward.
std::mutex counting;

std::atomic<std::string (*)()> module_of_operators = nullptr;

bool is_meant(const CommDebug::Entry& entry, const std::string& kind, const std::string& subject) {
  return (kind.empty() || entry.kind == kind) && (subject.empty() || entry.subject == subject);
}

}  // namespace

void CommDebug::count(const Collective& collective) {
  CommDebug* const first = innermost();
  if (!first || std::holds_alternative<Barrier>(collective.call)) return;
  const std::string_view whole = collective.tag.subject,
                         subject = whole.substr(0, whole.find(" ("));
  const auto find_module = module_of_operators.load();
  const std::string module = find_module ? find_module() : "";
  const std::lock_guard lock(counting);
  for (CommDebug* scope = first; scope; scope = scope->outer_)
    scope->add(collective.name(), collective.nbytes(), subject, module);
}

CommDebug::CommDebug() : outer_(innermost()), scope_(kInnermost.scope(this)) {}
CommDebug::~CommDebug() = default;

void set_module_of_operators(std::string (*module)()) { module_of_operators = module; }

void CommDebug::add(const char* kind, int64_t bytes, std::string_view subject,
                    const std::string& module) {
  for (Entry& entry : entries_) {
    if (entry.kind != kind || entry.subject != subject || entry.module != module) continue;
    ++entry.calls;
    entry.bytes += bytes;
    return;
  }
  entries_.push_back({kind, std::string(subject), 1, bytes, module});
}

int64_t CommDebug::calls(const std::string& kind, const std::string& subject) const {
  int64_t calls = 0;
  for (const Entry& entry : entries_) calls += is_meant(entry, kind, subject) ? entry.calls : 0;
  return calls;
}

int64_t CommDebug::bytes(const std::string& kind, const std::string& subject) const {
  int64_t bytes = 0;
  for (const Entry& entry : entries_) bytes += is_meant(entry, kind, subject) ? entry.bytes : 0;
  return bytes;
}

std::string CommDebug::describe() const {
  std::string text =
      fmt::format("{:<14}  {:<44}  {:>6}  {:>14}\n", "collective", "for", "calls", "bytes");
  std::vector<std::string> modules;  // in the order of their first calls
  for (const Entry& entry : entries_) {
    if (std::ranges::find(modules, entry.module) == modules.end()) modules.push_back(entry.module);
  }
  const bool has_names = modules.size() > 1 || (modules.size() == 1 && !modules[0].empty());
  for (const std::string& module : modules) {
    if (has_names) text += fmt::format("{}\n", module.empty() ? "(no module)" : module);
    for (const Entry& entry : entries_) {
      if (entry.module != module) continue;
      text += fmt::format("{:<14}  {:<44}  {:>6}  {:>14}\n", (has_names ? "  " : "") + entry.kind,
                          entry.subject, entry.calls, entry.bytes);
    }
  }
  return text;
}

}  // namespace tessera
