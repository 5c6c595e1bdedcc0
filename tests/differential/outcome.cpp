#include "differential/outcome.h"

#include <algorithm>

namespace tessera::differential {
namespace {

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string text_of(const std::exception& error) {
  const auto* const own = dynamic_cast<const c10::Error*>(&error);
  return own ? own->what_without_backtrace() : error.what();
}

}  // namespace

Outcome judge(const Program& program, const std::vector<Trace>& ranks) {
  const auto is_earlier = [](const Trace& a, const Trace& b) {
    return std::pair(a.error.empty(), a.op) < std::pair(b.error.empty(), b.op);
  };
  const Trace& failed = *std::min_element(ranks.begin(), ranks.end(), is_earlier);
  const bool fails = !failed.error.empty();
  const int limit = fails ? failed.op : length_of(program);
  std::string plain, documented;
  int at = -1;
  try {
    train_plain(program, ranks, limit, at);
  } catch (const Difference& difference) {
    return {Verdict::kFinding, difference.what()};
  } catch (const TraceEnded&) {
  } catch (const Refused& refused) {
    documented = refused.what();
  } catch (const std::exception& error) {
    plain = text_of(error);
  }
  if (!fails) {
    if (!documented.empty())
      return {Verdict::kFinding, c10::str("operation ", at, " is not refused: ", documented)};
    if (plain.empty()) return {};
    return {Verdict::kFinding, c10::str("operation ", at, ": LibTorch refuses: ", plain)};
  }
  const std::string text =
      c10::str("operation ", failed.op, " on rank ", &failed - ranks.data(), ": ", failed.error);
  for (const Trace& trace : ranks)
    if (trace.op != failed.op || trace.error.empty())
      return {Verdict::kFinding, "some ranks only refuse " + text};
  if (!plain.empty()) return {Verdict::kBothRefuse, first_line(plain)};
  if (!documented.empty() && at == failed.op && failed.error.find(documented) != std::string::npos)
    return {Verdict::kRefused, documented};
  return {Verdict::kFinding, "Tessera refuses " + text};
}

}  // namespace tessera::differential
