#pragma once

#include <tessera/comm/process_group.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace tessera {

/// A process group that acts on each collective before or after it passes it on to another process
/// group. To write one, implement `issue()` with `pass_on()`:
///
/// ```
/// class Printing : public tessera::ProcessGroupDecorator {
///   using ProcessGroupDecorator::ProcessGroupDecorator;
///   tessera::WorkPtr issue(tessera::Collective collective) override {
///     std::cerr << collective.name() << " of " << collective.tag.subject << "\n";
///     return pass_on(std::move(collective));
///   }
/// };
/// ```
class TESSERA_API ProcessGroupDecorator : public ProcessGroup {
 public:
  explicit ProcessGroupDecorator(ProcessGroupPtr inner);

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }
  std::string backend_name() const override { return inner_->backend_name(); }
  bool has_channels() const override { return inner_->has_channels(); }
  std::optional<c10::DeviceType> device_type() const override { return inner_->device_type(); }
  std::vector<int> sends_to() const override { return inner_->sends_to(); }
  ProcessGroup& transport() override { return inner_->transport(); }

 protected:
  WorkPtr pass_on(Collective collective) { return issue_on(*inner_, std::move(collective)); }

 private:
  const ProcessGroupPtr inner_;
};

/// The collectives that passed through a counting process group, by kind.
struct TESSERA_API CollectiveCounts {
  struct Entry {
    int64_t calls = 0;
    int64_t bytes_sent = 0;  ///< by this rank, payload only
  };
  Entry all_gather, reduce_scatter, all_reduce, broadcast, barrier, all_to_all;
  int64_t calls() const;
  int64_t bytes_sent() const;
};

/// A process group that counts the collectives that it passes on to `inner`.
class TESSERA_API CountingProcessGroup : public ProcessGroupDecorator {
 public:
  using ProcessGroupDecorator::ProcessGroupDecorator;
  virtual CollectiveCounts counts() const = 0;
  virtual void reset_counts() = 0;
};
TESSERA_API std::shared_ptr<CountingProcessGroup> counting_process_group(ProcessGroupPtr inner);

/// One collective as seen by this rank; times in microseconds since the process started.
struct CollectiveRecord {
  int64_t sequence = 0;
  std::string name;     ///< all_gather, reduce_scatter, ...
  std::string subject;  ///< from the tag
  Channel channel = Channel::kControl;
  int64_t bytes = 0;  ///< `Collective::nbytes()`
  int64_t issued_us = 0;
  int64_t completed_us = -1;  ///< -1 while it is running
};

/// A process group that records the last `capacity` collectives (the flight record). When a wait on
/// it throws, the message ends with the last few records of this rank.
class TESSERA_API TracingProcessGroup : public ProcessGroupDecorator {
 public:
  using ProcessGroupDecorator::ProcessGroupDecorator;
  virtual std::vector<CollectiveRecord> records() const = 0;
};
TESSERA_API std::shared_ptr<TracingProcessGroup> tracing_process_group(ProcessGroupPtr inner,
                                                                       size_t capacity = 256);

/// A fault for tests: the `nth` (from 0) collective named `name` (empty: any) fails or is delayed.
struct Fault {
  std::string name;
  int64_t nth = 0;
  bool fail = true;                    ///< throw `c10::DistBackendError` when it is issued
  std::chrono::milliseconds delay{0};  ///< sleep this long before it is issued
};
TESSERA_API ProcessGroupPtr fault_process_group(ProcessGroupPtr inner, std::vector<Fault> faults);

}  // namespace tessera
