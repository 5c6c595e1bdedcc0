#include <fmt/format.h>
#include <tessera/dist_debug.h>

namespace tessera {
namespace {

thread_local CommDebug* innermost = nullptr;

bool is_meant(const CommDebug::Entry& entry, const std::string& kind, const std::string& subject) {
  return (kind.empty() || entry.kind == kind) && (subject.empty() || entry.subject == subject);
}

}  // namespace

void CommDebug::count(const Collective& collective) {
  if (!innermost || std::holds_alternative<Barrier>(collective.call)) return;
  const std::string_view whole = collective.tag.subject,
                         subject = whole.substr(0, whole.find(" ("));
  for (CommDebug* scope = innermost; scope; scope = scope->outer_)
    scope->add(collective.name(), collective.nbytes(), subject);
}

CommDebug::CommDebug() : outer_(innermost) { innermost = this; }
CommDebug::~CommDebug() { innermost = outer_; }

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
