#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/process_group.h>
#include <tessera/parallel/pipeline.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

namespace tessera {

// [Note: Messages of a pipeline]
//
// From each place to each other one to which it sends leads a link: a process group of two ranks on
// which only the first sends. The parcels of a link have the order of the sender's actions, which
// both ends know from the schedule. A sender doesn't wait; a receiver also takes the parcels before
// the one that it needs, and keeps them. So ranks wait for each other only where actions do, and a
// schedule that passes `check_schedule()` can't block.
//
// A parcel is a head of fixed length, which tells the forms of its tensors, and a message for each
// of them. A rank that has failed still sends its parcels, marked, so no rank waits for one that
// never comes.

/// The result of an action, for the stage that needs it.
struct Parcel {
  struct Item {
    at::Tensor tensor;           ///< undefined: no gradient
    bool requires_grad = false;  ///< of an output
    std::optional<DeviceMesh> mesh =
        std::nullopt;  ///< of a replicated DistTensor, whose part it is
  };
  bool has_failed = false;
  int64_t clock = 0;  ///< at the end of the action
  std::vector<Item> items = {};
};

/// This rank's ends of the links of its line.
class PipelineLinks {
 public:
  /// `mesh`: that of this rank's place. `places`: those of the stages. `line`: the ranks of this
  /// rank's line, by place. Collective over the line.
  PipelineLinks(const PipelineSchedule& schedule, const DeviceMesh& mesh,
                std::vector<int64_t> places, const std::vector<int>& line, int64_t place);

  /// Begins a step. If not `trains`, there are no backwards.
  void begin(bool trains);

  /// Sends the result of an action (F or B) to the stage that needs it, if there is one.
  void send(const PipelineAction& action, Parcel parcel);
  /// Returns the result of an action (F or B) of the stage before or after. Waits for it.
  Parcel receive(const PipelineAction& action);
  /// Starts to receive the tensors of parcels whose heads are there, as far as one ahead.
  void poll();

  /// Waits until all messages are sent.
  void finish();

 private:
  struct Message {
    at::Tensor tensor;
    WorkPtr work;
  };
  struct Arriving {
    Parcel parcel;
    std::vector<WorkPtr> works;
  };
  struct Incoming {
    ProcessGroupPtr process_group;
    std::vector<PipelineAction> order;
    size_t next = 0;              // the first whose head was not taken
    std::optional<Message> head;  // of that one, if started
    std::map<PipelineAction, Arriving> arriving;
  };
  struct Outgoing {
    ProcessGroupPtr process_group;
    std::deque<Message> sent;
  };

  // The stage that gets the result of an action, or -1.
  int64_t receiver_of(const PipelineAction& action) const;
  // Takes the next head, unless it needs to wait for it and may not.
  bool advance(Incoming& link, bool may_wait);
  void start_head(Incoming& link) const;
  static void start_sending(Outgoing& link, const at::Tensor& tensor);

  const DeviceMesh mesh_;
  const std::vector<int64_t> places_;
  const int64_t place_;
  bool trains_ = true;
  std::map<int64_t, Incoming> incoming_;  // by place
  std::map<int64_t, Outgoing> outgoing_;
  std::map<PipelineAction, Parcel> own_;  // from stages of this place to others of it
};

}  // namespace tessera
