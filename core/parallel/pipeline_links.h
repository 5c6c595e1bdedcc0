#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/process_group.h>
#include <tessera/parallel/pipeline.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

// [Note: Messages of a pipeline]
//
// From each place to each other one to which it sends leads a link: a process group of two ranks on
// which only the first sends. The messages of a link have the order of the sender's actions, which
// both ends know from the schedule. A sender doesn't wait; a receiver also takes the messages
// before the one that it needs, and keeps them. So ranks wait for each other only where actions do,
// and a schedule that passes `check_schedule()` can't block.
//
// A message is one buffer: whether the sender has failed, its clock, a flag for each tensor, and
// the tensors' elements. The layout of a stage's outputs is sent before the first ones for inputs
// of some form, and kept by both ends. A rank that has failed still sends its messages, marked, so
// no rank waits for one that never comes.

/// What goes from one stage to the next one, for one micro-batch.
struct Parcel {
  bool has_failed = false;       ///< then there are no tensors
  int64_t clock = 0;             ///< at the end of the sender's action
  StageTensors tensors = {};     ///< undefined: no gradient
  std::vector<char> flags = {};  ///< of outputs: whether they require a gradient
  /// Of outputs that are parts of replicated DistTensors: their meshes.
  std::vector<std::optional<DeviceMesh>> meshes = {};
};

/// This rank's ends of the links of its line.
class PipelineLinks {
 public:
  /// `mesh`: that of this rank's place. `places`: those of the stages. `line`: the ranks of this
  /// rank's line, by place. Collective over the line.
  PipelineLinks(const PipelineSchedule& schedule, const DeviceMesh& mesh,
                std::vector<int64_t> places, const std::vector<int>& line, int64_t place);

  /// Begins a step. `forms`: for each micro-batch, a text of the shapes of its inputs. If not
  /// `trains`, there are no backwards.
  void begin(std::vector<std::string> forms, bool trains);

  /// Sends the result of an action (F or B) to the stage that needs it, if it is wanted there.
  /// Throws, and sends nothing, for outputs of another layout than earlier ones for inputs of this
  /// form; then the caller must send a failure.
  void send(const PipelineAction& action, Parcel parcel);
  /// Returns the result of an action (F or B) of the stage before or after. Waits for it.
  Parcel receive(const PipelineAction& action);

  /// Waits until all messages are sent.
  void finish();

 private:
  using Layout = std::vector<int64_t>;
  struct Message {
    at::Tensor buffer;
    WorkPtr work;
  };
  struct Incoming {
    ProcessGroupPtr process_group;
    std::vector<PipelineAction> order;
    size_t next = 0;                             // the first that was not started
    std::map<PipelineAction, Message> arriving;  // undefined: there is none
  };
  struct Outgoing {
    ProcessGroupPtr process_group;
    std::deque<Message> sent;
  };

  // The stage that gets the result of an action, or -1.
  int64_t receiver_of(const PipelineAction& action) const;
  Layout& layout_of(const PipelineAction& action);
  // False if the forward has failed or no output requires a gradient.
  bool has_gradients(int64_t stage, int64_t micro_batch) const;
  // Starts to receive the next message, unless that needs to wait and may not.
  void start_next(Incoming& link, bool may_wait);
  static Message start_receiving(Incoming& link, const at::Tensor& buffer);
  static void start_sending(Outgoing& link, const at::Tensor& buffer);

  const DeviceMesh mesh_;
  const std::vector<int64_t> places_;
  const int64_t place_;
  std::map<int64_t, Incoming> incoming_;  // by place
  std::map<int64_t, Outgoing> outgoing_;
  std::map<std::pair<int64_t, std::string>, Layout> layouts_;  // by stage and form
  std::vector<std::string> forms_;
  bool trains_ = true;
  std::map<PipelineAction, Parcel> own_;  // from stages of this place to others of it
  // Those of outputs that were sent or received, by stage and micro-batch.
  std::map<std::pair<int64_t, int64_t>, std::vector<char>> flags_;
};

}  // namespace tessera
