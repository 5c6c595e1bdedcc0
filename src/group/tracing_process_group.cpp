#include <c10/util/Exception.h>
#include <tessera/process_group.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "group/check_arguments.h"
#include "group/collective_name.h"
#include "group/flight_record.h"
#include "group/peer_message.h"

namespace tessera {
namespace {

constexpr size_t kRecordsInErrors = 5;

// Before the arguments were checked.
int64_t nbytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

// Runs `wait`; an error of the backend gets the last records appended.
template <class Wait>
void wait_and_explain(const FlightRecord& flight_record, const Wait& wait) {
  try {
    wait();
  } catch (const c10::DistBackendError&) {
    // A new error: the inner work keeps the old one, and throws it again at the next wait.
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
    if (completed) {
      flight_record_->complete(sequence_);
    }
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
      : inner_(std::move(inner)), flight_record_(std::make_shared<FlightRecord>(capacity)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  std::string backend_name() const override { return inner_->backend_name(); }
  bool has_channels() const override { return inner_->has_channels(); }

  WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds, const CollectiveTag& tag) override {
    return trace("all_gather", nbytes_of(flat), tag,
                 [&] { return inner_->all_gather(flat, shard, bounds, tag); });
  }

  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag) override {
    const bool valid = out.defined() && !bounds.empty();
    const int64_t bytes = valid ? bounds.back() * message_item_size(out, options) : 0;
    return trace("reduce_scatter", bytes, tag, [&] {
      return inner_->reduce_scatter(out, std::move(pieces), bounds, options, tag);
    });
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) override {
    return trace("all_reduce", nbytes_of(tensor), tag,
                 [&] { return inner_->all_reduce(tensor, op, tag); });
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) override {
    return trace("broadcast", nbytes_of(tensor), tag,
                 [&] { return inner_->broadcast(tensor, root, tag); });
  }

  WorkPtr all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                     const CollectiveTag& tag) override {
    int64_t bytes = 0;
    for (const at::Tensor& message : to) bytes += message_bytes(message);
    return trace("all_to_all", bytes, tag,
                 [&] { return inner_->all_to_all(std::move(from), std::move(to), tag); });
  }

  void barrier(const CollectiveTag& tag) override {
    const int64_t sequence =
        flight_record_->add("barrier", std::string(tag.subject), tag.channel, 0);
    wait_and_explain(*flight_record_, [&] { inner_->barrier(tag); });
    flight_record_->complete(sequence);
  }

  WorkPtr arrive(const CollectiveTag& tag) override {
    return trace("barrier", 0, tag, [&] { return inner_->arrive(tag); });
  }

  std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) override {
    return inner_->share(nbytes, tag);
  }
  void release(const SharedBuffer& buffer) override { inner_->release(buffer); }
  std::vector<int> sends_to() const override { return inner_->sends_to(); }

  std::vector<CollectiveRecord> records() const override { return flight_record_->records(); }

 private:
  // Recorded before it is issued: a call that throws is in the record, too.
  template <class Issue>
  WorkPtr trace(const char* name, int64_t bytes, const CollectiveTag& tag, const Issue& issue) {
    const int64_t sequence =
        flight_record_->add(name, std::string(tag.subject), tag.channel, bytes);
    WorkPtr work;
    wait_and_explain(*flight_record_, [&] { work = issue(); });
    return std::make_shared<TracedWork>(std::move(work), flight_record_, sequence);
  }

  const ProcessGroupPtr inner_;
  const std::shared_ptr<FlightRecord> flight_record_;
};

}  // namespace

std::shared_ptr<TracingProcessGroup> tracing_process_group(ProcessGroupPtr inner, size_t capacity) {
  TORCH_CHECK_VALUE(inner != nullptr, "[tracing_process_group] `inner` must be given");
  return std::make_shared<TracingDecorator>(std::move(inner), capacity);
}

}  // namespace tessera
