#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/parallel/pipeline.h>
#include <tessera/tensor/dist_tensor.h>

#include <algorithm>
#include <exception>
#include <set>
#include <sstream>
#include <utility>

#include "parallel/pipeline_links.h"
#include "parallel/stage_graph.h"
#include "parallel/texts_of_ranks.h"

namespace tessera {
namespace {

using enum PipelinePart;

constexpr CollectiveTag kAgreement{"what ranks of a pipeline do", Channel::kControl};
constexpr CollectiveTag kTied{"gradients of tied parameters of a pipeline", Channel::kControl};

// Parts of the tensors, cut along dim 0.
std::vector<StageTensors> cut_rows(const StageTensors& tensors, int64_t parts) {
  std::vector<StageTensors> result(parts);
  for (const at::Tensor& tensor : tensors) {
    const auto cut = tensor.tensor_split(parts, 0);
    for (int64_t i = 0; i < parts; ++i) result[i].push_back(cut[i]);
  }
  return result;
}

// Returns the number of rows of tensors; -1: there are none.
int64_t rows_of(const StageTensors& tensors, const char* name) {
  for (const at::Tensor& tensor : tensors)
    TORCH_CHECK_VALUE(
        tensor.defined() && tensor.dim() > 0 && tensor.size(0) == tensors[0].size(0),
        "[Pipeline] `", name,
        "` must be tensors with equally many rows; got one that is undefined, has no dims, or "
        "other rows than the first");
  return tensors.empty() ? -1 : tensors[0].size(0);
}

int64_t place_in(const std::vector<DeviceMesh>& meshes) {
  std::set<int> ranks;
  std::string text;
  size_t expected = 0;
  bool has_one_shape = true;
  for (const DeviceMesh& mesh : meshes) {
    ranks.insert(mesh.ranks().begin(), mesh.ranks().end());
    expected += mesh.ranks().size();
    has_one_shape &= mesh.shape() == meshes[0].shape();
    text += " " + mesh.to_string();
  }
  TORCH_CHECK_VALUE(has_one_shape && ranks.size() == expected,
                    "[Pipeline] `meshes` must be disjoint and of one shape, as each rank sends to "
                    "those at its coordinate; stage_meshes() cuts a mesh into such; got",
                    text);
  const auto own = std::ranges::find_if(meshes, &DeviceMesh::is_member);
  TORCH_CHECK_VALUE(own != meshes.end(),
                    "[Pipeline] this rank must be in one of `meshes`, else leave it out; got",
                    text);
  return own - meshes.begin();
}

}  // namespace

struct Pipeline::State {
  class Run;
  // A parameter of which other stages have copies, too.
  struct Copy {
    at::Tensor parameter;
    std::optional<ShardedModule> sharded;
    at::Tensor earlier = {};  // its gradient before the step
  };
  struct Tie {
    std::vector<Copy> copies;  // here
    ProcessGroupPtr ranks;     // those of the line that have copies; null: this one alone
  };

  State(std::vector<PipelineStage> its_stages, PipelineSchedule its_schedule,
        std::vector<DeviceMesh> its_meshes, PipelineOptions its_options)
      : stages(std::move(its_stages)),
        schedule(std::move(its_schedule)),
        meshes(std::move(its_meshes)),
        options(std::move(its_options)),
        place(place_in(meshes)) {
    const auto& ranks = mesh().ranks();
    index = std::ranges::find(ranks, mesh().rank_at(*mesh().coordinate())) - ranks.begin();
    std::vector<int> all, line;
    for (const DeviceMesh& each : meshes) {
      all.insert(all.end(), each.ranks().begin(), each.ranks().end());
      line.push_back(each.ranks()[index]);
    }
    everyone = mesh().process_group_of(all);
    const auto texts = texts_of_ranks(*everyone, kAgreement, [this] { return check(); });
    const auto schedule_in = [](const std::string& text) {
      return text.substr(0, text.find('\f'));
    };
    for (size_t rank = 0; rank < texts.size(); ++rank)
      TORCH_CHECK_VALUE(schedule_in(texts[rank]) == schedule_in(texts[0]),
                        "[Pipeline] all ranks must have equal schedules; that of rank ", rank,
                        " of the pipeline's differs from that of rank 0");
    links.emplace(schedule, mesh(), places, line, place);
    std::map<std::string, std::vector<int>> copies;
    for (size_t p = 0; p < meshes.size(); ++p) {
      std::istringstream names(texts[rank_of(static_cast<int64_t>(p))]);
      std::string name;
      for (std::getline(names, name, '\f'); std::getline(names, name, '\f');)
        copies[name].push_back(line[p]);
    }
    for (auto& [name, tie] : ties)
      if (copies[name].size() > 1) tie.ranks = mesh().process_group_of(copies[name]);
  }

  const DeviceMesh& mesh() const { return meshes[place]; }
  // The rank in `everyone` of this line's rank at a place.
  int64_t rank_of(int64_t its_place) const { return its_place * mesh().size() + index; }
  int64_t last_stage() const { return std::ssize(places) - 1; }
  bool runs(int64_t stage) const { return places[stage] == place; }

  // Returns the schedule, equal on all ranks, and the names of tied parameters.
  std::string check() {
    check_schedule(schedule);
    std::map<int64_t, int64_t> by_stage;
    for (int64_t p = 0; p < std::ssize(schedule); ++p) {
      for (const auto& [part, stage, m] : schedule[p]) {
        by_stage[stage] = p;
        micro_batches = std::max(micro_batches, m + 1);
      }
    }
    for (const auto& [stage, its_place] : by_stage) places.push_back(its_place);
    TORCH_CHECK_VALUE(places.size() == stages.size() && schedule.size() == meshes.size(),
                      "[Pipeline] the schedule must be for these stages and places; expected ",
                      stages.size(), " stages at ", meshes.size(), " places, got a schedule of ",
                      places.size(), " stages at ", schedule.size(), " places");
    for (int64_t s = 0; s <= last_stage(); ++s) {
      TORCH_CHECK_VALUE(!runs(s) || stages[s].forward,
                        "[Pipeline] a stage must have `forward` where it runs; got none for stage ",
                        s, " at place ", place);
      if (!runs(s)) stages[s] = {};
      for (const auto& [name, parameter] : stages[s].tied) {
        if (!parameter.requires_grad()) continue;
        auto& copies = ties[name].copies;
        if (std::ranges::none_of(
                copies, [&](const Copy& copy) { return copy.parameter.is_same(parameter); }))
          copies.push_back({parameter, stages[s].sharded});
      }
    }
    std::string text = to_string(schedule);
    for (const auto& [name, tie] : ties) text += '\f' + name;
    return text;
  }

  // Sets gradients of earlier steps aside: they are sums already.
  void begin_ties() {
    for (auto& [name, tie] : ties) {
      for (auto& [parameter, sharded, earlier] : tie.copies) {
        if (!sharded) {
          earlier = std::exchange(parameter.mutable_grad(), at::Tensor());
        } else if (earlier.reset(); sharded->has_reduced_grad(parameter)) {
          earlier = sharded->full_grad(parameter);
          sharded->zero_grad(parameter);
        }
      }
    }
  }

  // Gives each copy of a tied parameter the sum of their gradients.
  void sum_ties() {
    at::NoGradGuard no_grad;
    for (auto& [name, tie] : ties) {
      at::Tensor sum;
      for (auto& [parameter, sharded, earlier] : tie.copies) {
        at::Tensor own = sharded ? sharded->full_grad(parameter) : parameter.grad();
        if (!own.defined()) own = at::zeros_like(parameter);
        sum = sum.defined() ? sum + own : own.clone(at::MemoryFormat::Contiguous);
      }
      if (tie.ranks)
        tie.ranks->all_reduce(is_dist(sum) ? to_local(sum) : sum, ReduceOp::kSum, kTied)->wait();
      for (auto& [parameter, sharded, earlier] : tie.copies) {
        const at::Tensor whole = earlier.defined() ? earlier + sum : sum.clone();
        earlier.reset();
        if (sharded) {
          sharded->set_full_grad(parameter, whole);
        } else {
          parameter.mutable_grad() = whole;
        }
      }
    }
  }

  std::vector<PipelineStage> stages;
  const PipelineSchedule schedule;
  const std::vector<DeviceMesh> meshes;
  const PipelineOptions options;
  const int64_t place;
  int64_t index = 0;            // of this rank in its mesh
  ProcessGroupPtr everyone;     // all ranks, place by place
  std::vector<int64_t> places;  // by stage
  int64_t micro_batches = 0;
  std::optional<PipelineLinks> links;
  std::map<std::string, Tie> ties;
  PipelineCounts counts;
};

// One step.
class Pipeline::State::Run {
 public:
  Run(State& state, const StageTensors& inputs, const StageTensors& targets, bool trains)
      : state_(state), trains_(trains), outputs_(state.micro_batches) {
    const auto texts =
        texts_of_ranks(*state.everyone, kAgreement, [&] { return offer(inputs, targets); });
    check_offers(texts);
    int64_t rows = 0;
    std::istringstream(texts[state.rank_of(state.places[0])]) >> rows;
    for (int64_t m = 0; m < state.micro_batches; ++m) {
      const int64_t part = rows / state.micro_batches + (m < rows % state.micro_batches ? 1 : 0);
      weights_.push_back(static_cast<double>(part) / static_cast<double>(rows));
    }
    if (state.runs(0)) inputs_ = cut_rows(inputs, state.micro_batches);
    if (state.runs(state.last_stage())) {
      targets_ = cut_rows(targets, state.micro_batches);
      if (trains) losses_.resize(state.micro_batches);
    }
    for (const PipelineAction& action : state.schedule[state.place])
      if (action.part == kBackward || action.part == kWeightGradient) ++backwards_[action.stage];
    state.links->begin(trains);
  }

  // Runs this rank's actions and returns the loss. All ranks throw if one fails.
  at::Tensor run() {
    state_.counts = {};
    if (trains_) state_.begin_ties();
    for (const PipelineAction& action : state_.schedule[state_.place])
      if (trains_ || action.part == kForward) perform(action);
    state_.links->finish();
    graphs_.clear();  // of a failed step
    const auto texts = texts_of_ranks(*state_.everyone, kAgreement, [this] { return result(); });
    for (const std::string& text : texts) {
      int64_t clock = 0;
      std::istringstream(text) >> clock;
      state_.counts.ticks = std::max(state_.counts.ticks, clock);
    }
    if (trains_) state_.sum_ties();
    return loss_in(texts[state_.rank_of(state_.places.back())]);
  }

  StageTensors outputs() const {
    StageTensors whole;
    if (!state_.runs(state_.last_stage())) return whole;
    for (size_t i = 0; i < outputs_[0].size(); ++i) {
      StageTensors parts;
      for (const StageTensors& each : outputs_) parts.push_back(each[i]);
      whole.push_back(at::cat(parts));
    }
    return whole;
  }

 private:
  using Key = std::pair<int64_t, int64_t>;  // stage and micro-batch

  // The rows of inputs and targets where they are read, -1 elsewhere, and the function.
  std::string offer(const StageTensors& inputs, const StageTensors& targets) const {
    TORCH_CHECK_VALUE(targets.empty() || state_.options.loss || !state_.runs(state_.last_stage()),
                      "[Pipeline] `targets` must only be given with PipelineOptions::loss, which "
                      "reads them; got ",
                      targets.size(), " without it");
    const int64_t rows = state_.runs(0) ? rows_of(inputs, "inputs") : -1;
    const int64_t labels = state_.runs(state_.last_stage()) ? rows_of(targets, "targets") : -1;
    TORCH_CHECK_VALUE(!state_.runs(0) || rows >= state_.micro_batches,
                      "[Pipeline] the first stage must get inputs of a row at least for each of ",
                      state_.micro_batches, " micro-batches; got ", std::max<int64_t>(rows, 0));
    return fmt::format("{} {} {:d}", rows, labels, trains_);
  }

  // All ranks check all lines.
  void check_offers(const std::vector<std::string>& texts) const {
    const int64_t lines = std::ssize(state_.meshes[0].ranks());
    for (int64_t line = 0; line < lines; ++line) {
      int64_t rows = 0, labels = 0, unused = 0;
      std::istringstream(texts[state_.places[0] * lines + line]) >> rows;
      std::istringstream(texts[state_.places.back() * lines + line]) >> unused >> labels;
      TORCH_CHECK_VALUE(labels < 0 || labels == rows,
                        "[Pipeline] inputs and targets must have equally many rows; got ", rows,
                        " and ", labels);
    }
    for (const std::string& text : texts)
      TORCH_CHECK(text.back() == texts[0].back(),
                  "[Pipeline] all ranks must call the same function; got step() on some ranks and "
                  "forward() on others");
  }

  // Computes, receives and sends; after a failure, here or at a sender, only marks what it sends.
  void perform(const PipelineAction& action) {
    const auto [part, stage, m] = action;
    const bool is_forward = part == kForward, sends = part != kWeightGradient;
    state_.links->poll();
    const PipelineAction sent{is_forward ? kForward : kBackward, stage, m};
    Parcel in;
    if (is_forward && stage > 0) in = state_.links->receive({kForward, stage - 1, m});
    if (sends && !is_forward && stage < state_.last_stage())
      in = state_.links->receive({kBackward, stage + 1, m});
    has_failed_ = has_failed_ || in.has_failed;
    const int64_t ticks = part == kBackward ? 2 : 1;
    clock_ = std::max(clock_, in.clock) + ticks;
    state_.counts.busy += ticks;
    try {
      if (!has_failed_) {
        Parcel out = is_forward ? forward(stage, m, in) : backward(action, in);
        out.clock = clock_;
        if (sends) state_.links->send(sent, std::move(out));
        return;
      }
    } catch (const std::exception&) {
      error_ = std::current_exception();
      has_failed_ = true;
    }
    if (sends) state_.links->send(sent, {.has_failed = true});
  }

  Parcel forward(int64_t stage, int64_t m, const Parcel& in) {
    at::AutoGradMode mode(trains_);
    StageTensors leaves, given = stage == 0 ? inputs_[m] : StageTensors();
    for (const auto& [part, requires_grad, mesh] : in.items) {
      leaves.push_back(part.detach().set_requires_grad(requires_grad));
      given.push_back(mesh ? from_local(leaves.back(), *mesh, {}) : leaves.back());
    }
    StageTensors results = called(state_.stages[stage], std::move(given));
    TORCH_CHECK_VALUE(!results.empty() && std::ranges::all_of(results, &at::Tensor::defined),
                      "[Pipeline] a stage must return tensors; got none from stage ", stage);
    Parcel out;
    if (stage == state_.last_stage()) {
      if (!trains_) outputs_[m] = results;
      if (trains_) results = {weighted_loss(results, m)};
    } else {
      for (at::Tensor& each : results) {
        Parcel::Item& item = out.items.emplace_back();
        if (is_dist(each)) {
          item.mesh = mesh_of(each);
          each = to_local(redistribute(each, Placements(item.mesh->ndim(), Replicate{})));
        }
        item.tensor = each.detach();
        item.requires_grad = each.requires_grad();
      }
    }
    if (!trains_) return out;
    graphs_.emplace(Key{stage, m}, StageGraph(std::move(leaves), results));
    state_.counts.peak_in_flight = std::max(state_.counts.peak_in_flight, std::ssize(graphs_));
    return out;
  }

  // Does what the forward of a sharded module's handle does.
  static StageTensors called(PipelineStage& stage, StageTensors inputs) {
    struct Handle : ShardedModule {
      using ShardedModule::cast_tensor, ShardedModule::casts_inputs, ShardedModule::ShardedModule;
    };
    if (stage.sharded) {
      stage.sharded->begin_forward();
      const Handle handle(stage.sharded->state());
      for (at::Tensor& each : inputs)
        if (handle.casts_inputs()) each = handle.cast_tensor(each);
    }
    return stage.forward(inputs);
  }

  at::Tensor weighted_loss(const StageTensors& results, int64_t m) {
    const auto& loss_of = state_.options.loss;
    const at::Tensor loss = loss_of ? loss_of(results, targets_[m]) : results[0];
    TORCH_CHECK_VALUE(loss.defined() && loss.numel() == 1 && loss.is_floating_point(),
                      "[Pipeline] the loss must be one floating-point number; got ",
                      loss.defined() ? c10::str(loss.scalar_type(), " ", loss.sizes()) : "none");
    at::Tensor weighted = loss * weights_[m];
    const at::Tensor value = is_dist(weighted) ? full_tensor(weighted.detach()) : weighted.detach();
    losses_[m] = value;
    root_ = at::ones_like(weighted);
    return weighted;
  }

  Parcel backward(const PipelineAction& action, const Parcel& in) {
    const auto [part, stage, m] = action;
    const auto found = graphs_.find({stage, m});
    std::optional<ShardedModule::NoSync> local;
    auto& sharded = state_.stages[stage].sharded;
    if (sharded && (part == kInputGradient || --backwards_[stage] > 0))
      local.emplace(sharded->state());
    Parcel out;
    if (part == kWeightGradient) {
      found->second.weight_gradients();
    } else {
      StageTensors gradients;
      if (stage == state_.last_stage()) gradients = {root_};
      for (const Parcel::Item& item : in.items) gradients.push_back(item.tensor);
      for (const at::Tensor& each : part == kBackward ? found->second.backward(gradients)
                                                      : found->second.input_gradients(gradients))
        out.items.push_back({each});
    }
    if (part != kInputGradient) graphs_.erase(found);
    return out;
  }

  // The clock and the loss, or this rank's error.
  std::string result() const {
    if (error_) std::rethrow_exception(error_);
    if (losses_.empty() || has_failed_) return std::to_string(clock_);
    at::Tensor loss = losses_[0];
    for (size_t m = 1; m < losses_.size(); ++m) loss = loss + losses_[m];
    return fmt::format("{} {} {:a}", clock_, static_cast<int>(loss.scalar_type()),
                       loss.item().toDouble());
  }

  static at::Tensor loss_in(const std::string& text) {
    std::istringstream stream(text);
    int64_t clock = 0;
    int dtype = 0;
    std::string value;
    if (!(stream >> clock >> dtype >> value)) return {};
    return at::scalar_tensor(std::strtod(value.c_str(), nullptr),
                             at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)));
  }

  State& state_;
  const bool trains_;
  std::vector<StageTensors> inputs_, targets_, outputs_;  // by micro-batch
  std::vector<double> weights_;
  std::map<Key, StageGraph> graphs_;      // of forwards without their backward
  std::map<int64_t, int64_t> backwards_;  // that are left, by stage
  StageTensors losses_;                   // by micro-batch, where the last stage runs
  at::Tensor root_;
  int64_t clock_ = 0;
  bool has_failed_ = false;  // this rank, or one from which it got a message
  std::exception_ptr error_;
};

Pipeline::Pipeline(std::vector<PipelineStage> stages, PipelineSchedule schedule,
                   std::vector<DeviceMesh> meshes, PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), std::move(schedule), std::move(meshes),
                                     std::move(options))) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

at::Tensor Pipeline::step(const StageTensors& inputs, const StageTensors& targets) {
  return State::Run(*state_, inputs, targets, /*trains=*/true).run();
}

StageTensors Pipeline::forward(const StageTensors& inputs) {
  State::Run run(*state_, inputs, {}, /*trains=*/false);
  run.run();
  return run.outputs();
}

const PipelineCounts& Pipeline::counts() const { return state_->counts; }

}  // namespace tessera
