#include "mesh/ranks.h"

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

namespace tessera {
namespace {

// Packs the parts into one text, each after its length, and unpacks them again.
std::string pack(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += std::to_string(part.size()) + ":" + part;
  return text;
}

void unpack(const std::string& text, std::vector<std::string>& parts) {
  for (size_t next = 0; next < text.size();) {
    const size_t colon = text.find(':', next);
    const size_t length = std::stoull(text.substr(next, colon - next));
    parts.push_back(text.substr(colon + 1, length));
    next = colon + 1 + length;
  }
}

void run_as_check(const std::function<void()>& check, const char* subject) {
  try {
    check();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "[", subject, "] ", error.what());
  }
}

}  // namespace

Ranks::Ranks(std::vector<ProcessGroup*> lines) : lines_(std::move(lines)) {
  for (const ProcessGroup* line : lines_) {
    rank_ += line->rank() * size_;
    size_ *= line->size();
  }
}

std::vector<std::string> Ranks::all_gather_bytes(const std::string& bytes,
                                                 const CollectiveTag& tag) const {
  std::vector<std::string> all = {bytes};
  for (ProcessGroup* line : lines_) {
    if (line->size() == 1) continue;
    const auto gathered = tessera::all_gather_bytes(*line, pack(all), tag);
    all.clear();
    for (const std::string& part : gathered) unpack(part, all);
  }
  return all;
}

void Ranks::check(const std::function<void()>& check, const char* subject) const {
  std::string error;
  std::exception_ptr exception;
  try {
    run_as_check(check, subject);
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
    exception = std::current_exception();
  }
  if (size() == 1) {
    if (exception) std::rethrow_exception(exception);
    return;
  }
  const auto errors = all_gather_bytes(error, {"check of the arguments", Channel::kControl});
  if (exception) std::rethrow_exception(exception);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    TORCH_CHECK_VALUE(errors[rank].empty(), errors[rank], " (on rank ", rank, " of ", errors.size(),
                      ")");
  }
}

}  // namespace tessera
