#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/comm/process_group_decorators.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/group/collective_name.h"
#include "comm/group/flight_record.h"
#include "comm/group/process_time.h"

namespace tessera {
namespace {

constexpr size_t kRecordsInErrors = 5;

// Returns the last `count` records as lines of text, oldest first.
std::string describe_last(const FlightRecord& flight_record, size_t count) {
  const auto all = flight_record.entries();
  std::string text;
  for (size_t i = all.size() - std::min(count, all.size()); i < all.size(); ++i) {
    const CollectiveRecord& record = all[i];
    const bool is_complete = record.completed_us >= 0;
    const int64_t end = is_complete ? record.completed_us : process_time_us();
    text +=
        fmt::format("  #{} {} '{}' ({}), {} bytes, issued at {:.3f} s, {} {:.3f} s\n",
                    record.sequence, record.name, record.subject, channel_name(record.channel),
                    record.bytes, 1e-6 * record.issued_us,
                    is_complete ? "took" : "not complete after", 1e-6 * (end - record.issued_us));
  }
  return text;
}

// Runs `wait`, and appends the last records to an error of the backend.
template <class Wait>
void wait_and_explain(const FlightRecord& flight_record, const Wait& wait) {
  try {
    wait();
  } catch (const c10::DistBackendError&) {
    // Throws a new error: the inner work keeps the original, and rethrows it at the next wait.
    C10_THROW_ERROR(DistBackendError, exception_text(std::current_exception()) +
                                          "\nLast collectives of this rank:\n" +
                                          describe_last(flight_record, kRecordsInErrors));
  }
}

class TracedWork : public Work {
 public:
  TracedWork(WorkPtr inner, std::shared_ptr<FlightRecord> flight_record, int64_t sequence)
      : inner_(std::move(inner)), flight_record_(std::move(flight_record)), sequence_(sequence) {}

  void wait() override {
    wait_and_explain(*flight_record_, [&] { inner_->wait(); });
    flight_record_->complete(sequence_);
  }

  void wait_inputs() override {
    wait_and_explain(*flight_record_, [&] { inner_->wait_inputs(); });
    flight_record_->complete(sequence_);
  }

  bool is_completed() override {
    const bool completed = inner_->is_completed();
    if (completed) flight_record_->complete(sequence_);
    return completed;
  }

 private:
  const WorkPtr inner_;
  const std::shared_ptr<FlightRecord> flight_record_;  // works may outlive the process group
  const int64_t sequence_;
};

class TracingDecorator : public TracingProcessGroup {
 public:
  TracingDecorator(ProcessGroupPtr inner, size_t capacity)
      : TracingProcessGroup(std::move(inner)),
        flight_record_(std::make_shared<FlightRecord>(capacity)) {
    TORCH_CHECK_VALUE(capacity > 0, "[tracing_process_group] `capacity` must be positive; got 0");
  }

  std::vector<CollectiveRecord> records() const override {
    const auto entries = flight_record_->entries();
    return {entries.begin(), entries.end()};
  }

 private:
  // Records the collective before it is issued, so that a call that throws is recorded, too.
  WorkPtr issue(Collective collective) override {
    FlightEntry entry;
    entry.name = collective.name();
    entry.subject = collective.tag.subject;
    entry.channel = collective.tag.channel;
    entry.bytes = collective.nbytes();
    const int64_t sequence = flight_record_->add(std::move(entry));
    WorkPtr work;
    wait_and_explain(*flight_record_, [&] { work = pass_on(std::move(collective)); });
    return std::make_shared<TracedWork>(std::move(work), flight_record_, sequence);
  }

  const std::shared_ptr<FlightRecord> flight_record_;
};

}  // namespace

std::shared_ptr<TracingProcessGroup> tracing_process_group(ProcessGroupPtr inner, size_t capacity) {
  return std::make_shared<TracingDecorator>(std::move(inner), capacity);
}

}  // namespace tessera
