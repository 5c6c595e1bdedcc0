#include <c10/util/Exception.h>
#include <tessera/process_group_decorators.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "group/collective_name.h"
#include "group/flight_record.h"

namespace tessera {
namespace {

constexpr size_t kRecordsInErrors = 5;

// Runs `wait`, and appends the last records to an error of the backend.
template <class Wait>
void wait_and_explain(const FlightRecord& flight_record, const Wait& wait) {
  try {
    wait();
  } catch (const c10::DistBackendError&) {
    // Throws a new error: the inner work keeps the original, and rethrows it at the next wait.
    C10_THROW_ERROR(DistBackendError, exception_text(std::current_exception()) +
                                          "\nLast collectives of this rank:\n" +
                                          flight_record.describe_last(kRecordsInErrors));
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
        flight_record_(std::make_shared<FlightRecord>(capacity)) {}

  std::vector<CollectiveRecord> records() const override { return flight_record_->records(); }

 private:
  // Records the collective before it is issued, so that a call that throws is recorded, too.
  WorkPtr issue(Collective collective) override {
    const auto& [subject, channel] = collective.tag;
    const int64_t sequence =
        flight_record_->add(collective.name(), std::string(subject), channel, collective.nbytes());
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
