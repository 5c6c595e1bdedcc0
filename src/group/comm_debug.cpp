#include <fmt/format.h>
#include <tessera/dist_debug.h>

#include <mutex>
#include <string_view>

#include "device/scoped_value.h"

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

bool is_meant(const CommDebug::Entry& entry, const std::string& kind, const std::string& subject) {
  return (kind.empty() || entry.kind == kind) && (subject.empty() || entry.subject == subject);
}

}  // namespace

void CommDebug::count(const Collective& collective) {
  CommDebug* const first = innermost();
  if (!first || std::holds_alternative<Barrier>(collective.call)) return;
  const std::string_view whole = collective.tag.subject,
                         subject = whole.substr(0, whole.find(" ("));
  const std::lock_guard lock(counting);
  for (CommDebug* scope = first; scope; scope = scope->outer_)
    scope->add(collective.name(), collective.nbytes(), subject);
}

CommDebug::CommDebug() : outer_(innermost()), scope_(kInnermost.scope(this)) {}
CommDebug::~CommDebug() = default;

void CommDebug::add(const char* kind, int64_t bytes, std::string_view subject) {
  for (Entry& entry : entries_) {
    if (entry.kind != kind || entry.subject != subject) continue;
    ++entry.calls;
    entry.bytes += bytes;
    return;
  }
  entries_.push_back({kind, std::string(subject), 1, bytes});
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
  for (const Entry& entry : entries_)
    text += fmt::format("{:<14}  {:<44}  {:>6}  {:>14}\n", entry.kind, entry.subject, entry.calls,
                        entry.bytes);
  return text;
}

}  // namespace tessera
