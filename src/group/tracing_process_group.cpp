#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/process_group_decorators.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "group/collective_name.h"
#include "group/process_time.h"

namespace tessera {
namespace {

constexpr size_t kRecordsInErrors = 5;

// A ring buffer of the last `capacity` collectives of this rank. Thread-safe.
class FlightRecord {
 public:
  explicit FlightRecord(size_t capacity) : capacity_(capacity) {
    TORCH_CHECK_VALUE(capacity > 0, "[tracing_process_group] `capacity` must be positive; got 0");
  }

  // Records that a collective is issued now; returns its sequence number, from 0.
  int64_t add(const Collective& collective) {
    const std::lock_guard lock(mutex_);
    const int64_t sequence = next_++;
    const auto& [subject, channel] = collective.tag;
    CollectiveRecord& record = ring_.size() < capacity_ ? ring_.emplace_back() : at(sequence);
    record = {sequence, collective.name(),   std::string(subject),
              channel,  collective.nbytes(), process_time_us()};
    return sequence;
  }

  // Records that collective `sequence` completes now. Does nothing if it is no longer in the ring,
  // or was already complete.
  void complete(int64_t sequence) {
    const std::lock_guard lock(mutex_);
    CollectiveRecord& record = at(sequence);
    if (record.sequence == sequence && record.completed_us < 0)
      record.completed_us = process_time_us();
  }

  // Returns the records in the ring, oldest first.
  std::vector<CollectiveRecord> records() const {
    const std::lock_guard lock(mutex_);
    std::vector<CollectiveRecord> result = ring_;
    std::ranges::sort(result, {}, &CollectiveRecord::sequence);
    return result;
  }

  // Returns the last `count` records as lines of text, oldest first.
  std::string describe_last(size_t count) const {
    const auto all = records();
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

 private:
  CollectiveRecord& at(int64_t sequence) { return ring_[sequence % capacity_]; }

  mutable std::mutex mutex_;
  std::vector<CollectiveRecord> ring_;
  const size_t capacity_;
  int64_t next_ = 0;
};

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
    const int64_t sequence = flight_record_->add(collective);
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
