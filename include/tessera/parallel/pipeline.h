#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/export.h>
#include <tessera/tensor/device_mesh.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
class SequentialImpl;
}  // namespace torch::nn

namespace tessera {

// Pipelines: the stages of a model on ranks of their own, and the micro-batches of a batch on their
// way through them.
//
//     const auto meshes = tessera::stage_meshes(tessera::DeviceMesh::over_world());
//     auto stages = tessera::cut_stages(*model, {{"embed", "layer0"}, {"layer1", "head"}});
//     tessera::Pipeline pipeline(std::move(stages), tessera::one_f_one_b_schedule(2, 8), meshes,
//                                {.loss = loss});
//     at::Tensor mean = pipeline.step({x}, {y});  // then the optimizer of this rank's stages
//
// A place is a mesh of ranks on which stages run. A schedule has a list of actions for each place.

enum class PipelinePart : char {
  kForward = 'F',
  kBackward = 'B',        ///< gradients of the stage's inputs and of its parameters
  kInputGradient = 'I',   ///< those of the inputs alone; sends them to the stage before
  kWeightGradient = 'W',  ///< after it: those of the parameters
};

struct PipelineAction {
  PipelinePart part = PipelinePart::kForward;
  int64_t stage = 0, micro_batch = 0;  ///< from 0
  auto operator<=>(const PipelineAction&) const = default;
};

/// The actions of each place, in their order. A stage runs at the place that has its actions.
/// Messages follow from them: they are sent at the end of an action, without waiting, and received
/// before the action that needs them.
using PipelineSchedule = std::vector<std::vector<PipelineAction>>;

/// Makes the schedule of GPipe: all forwards, then all backwards. One stage at each place, as in
/// all but the interleaved one. Throw `c10::ValueError` for numbers below 1.
TESSERA_API PipelineSchedule gpipe_schedule(int64_t places, int64_t micro_batches);
/// The same actions in turns: place `p` has at most `places - p` micro-batches under way.
TESSERA_API PipelineSchedule one_f_one_b_schedule(int64_t places, int64_t micro_batches);
/// Puts several stages at each place, `places` apart, and divides the bubble by their number.
/// Throws `c10::ValueError` unless `micro_batches` is a multiple of `places`.
TESSERA_API PipelineSchedule interleaved_schedule(int64_t places, int64_t stages_per_place,
                                                  int64_t micro_batches);
/// ZB-H1 (arXiv 2401.10241): backwards in two parts, the second where a place would be idle; at
/// most `places` micro-batches under way at each place.
TESSERA_API PipelineSchedule zero_bubble_schedule(int64_t places, int64_t micro_batches);

/// Returns "F0.0 F0.1 B0.0 B0.1" (part, stage, micro-batch), a line for each place.
TESSERA_API std::string to_string(const PipelineSchedule& schedule);

/// What a place does in one step. Time is counted in ticks: a backward takes two, every other
/// action one, a message none.
struct PipelineCounts {
  int64_t ticks = 0;           ///< from the first action of the pipeline to its last
  int64_t busy = 0;            ///< of these, in actions; the others are the place's bubble
  int64_t peak_in_flight = 0;  ///< micro-batches, by stage, whose backward was not finished
  bool operator==(const PipelineCounts&) const = default;
};

/// Runs a schedule without tensors, and returns the counts of each place.
///
/// Throws `c10::ValueError` unless stages and micro-batches are numbered from 0 without gaps, each
/// stage has all of its actions at one place, for each micro-batch F and either B or both I and W,
/// once, and the places don't wait for each other; the message names the actions.
TESSERA_API std::vector<PipelineCounts> check_schedule(const PipelineSchedule& schedule);

/// Returns the stages that run at `place`, ascending.
TESSERA_API std::vector<int64_t> stages_at(const PipelineSchedule& schedule, int64_t place);

/// Returns the places of a mesh: its ranks at each index along `mesh_dim`, as `select()` does.
TESSERA_API std::vector<DeviceMesh> stage_meshes(const DeviceMesh& mesh, int64_t mesh_dim = 0);

using StageTensors = std::vector<at::Tensor>;

/// One stage. On ranks where it does not run, it may be empty.
struct PipelineStage {
  /// Gets what the stage before returned, or this micro-batch's part of the inputs. It must not
  /// change that in place. Calls the module itself, not the handle of a sharded one.
  std::function<StageTensors(const StageTensors&)> forward;
  std::shared_ptr<torch::nn::Module> module;  ///< kept; else not used
  /// If the module is sharded over ranks of its place: inputs are cast as its plan says, and
  /// gradients reduced once in a step.
  std::optional<ShardedModule> sharded;
  /// Parameters that other stages have copies of, under names that are the same in all of them.
  /// `cut_stages()` finds them.
  std::map<std::string, at::Tensor> tied;
};

/// Makes a stage of a module that gets one tensor and returns one.
template <class M>
PipelineStage make_stage(std::shared_ptr<M> module) {
  return {[module](const StageTensors& in) { return StageTensors{module->forward(in.at(0))}; },
          module,
          std::nullopt,
          {}};
}

/// Cuts a model of one tensor into stages by the names of its children, which they keep. Throws
/// `c10::ValueError` unless the names of all stages are those of all children in their order.
TESSERA_API std::vector<PipelineStage> cut_stages(
    torch::nn::SequentialImpl& model, const std::vector<std::vector<std::string>>& names);

struct PipelineOptions {
  /// Computes the loss of a micro-batch from the outputs of the last stage and its part of the
  /// targets: the mean over its rows. Empty: the last stage returns the loss.
  std::function<at::Tensor(const StageTensors& outputs, const StageTensors& targets)> loss;
};

/// Trains the stages of a model, each on a mesh of its own, on the micro-batches of a schedule.
///
/// Each rank of a place exchanges tensors with the ranks that have its coordinate at the other
/// places: a line. Lines are independent, so along other mesh dims modules may be sharded or
/// parallelized, and lines may get different rows. A DistTensor that a stage returns is replicated:
/// each rank of its mesh sends the whole, of which those of the next place make a DistTensor.
class TESSERA_API Pipeline {
 public:
  /// `stages`: all of them, in order. `meshes`: the places, disjoint and of one shape.
  ///
  /// Collective over the ranks of all meshes, which connect. Throws `c10::ValueError` on all of
  /// them for a wrong schedule (see `check_schedule()`), one for other numbers of stages or places,
  /// one that differs between ranks, or a stage without `forward` where it runs; and on each rank
  /// alone for wrong meshes.
  Pipeline(std::vector<PipelineStage> stages, PipelineSchedule schedule,
           std::vector<DeviceMesh> meshes, PipelineOptions options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  /// Runs forward and backward of a batch, and returns its loss, on each rank that of its line.
  ///
  /// `inputs`: of the first stage; `targets`: of the loss. They are read where these run, and cut
  /// along dim 0, as `torch::tensor_split` does, into the micro-batches of the schedule. Losses are
  /// weighted by the micro-batches' parts of the rows: if each is a mean, the result is the mean
  /// over the batch. Gradients are added to those that parameters have, in the order of the
  /// schedule's backwards; sharded modules reduce theirs with the last one. At the end, each copy
  /// of a tied parameter gets the sum of their gradients.
  ///
  /// Collective. If a rank throws, all others throw `c10::Error` with that rank and its message;
  /// then set the gradients to zero before the next step. Throws `c10::ValueError` on all ranks for
  /// fewer rows than micro-batches, and if the rows of inputs or targets differ.
  at::Tensor step(const StageTensors& inputs = {}, const StageTensors& targets = {});

  /// Runs the forwards alone, without gradients, and returns the outputs of the last stage,
  /// concatenated along dim 0; none where it does not run. Otherwise as `step()`.
  StageTensors forward(const StageTensors& inputs = {});

  /// Returns what this rank did in the last `step()` or `forward()`.
  const PipelineCounts& counts() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
