#include "checkpoint/save.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/comm/world.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/engine/plan_fields.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/dispatch/math_bits.h"
#include "base/files/untrusted.h"
#include "checkpoint/additional_state.h"
#include "checkpoint/checksum.h"
#include "checkpoint/model_view.h"
#include "checkpoint/safetensors.h"
#include "engine/optim/param_state.h"
#include "engine/optim/sharded_optimizer_access.h"

namespace tessera {
namespace {

// Throws for options that name no checkpoints to keep.
void check(const SaveOptions& options) {
  TORCH_CHECK_VALUE(
      options.keep_last >= 0,
      "[save_checkpoint] options.keep_last must be the number of checkpoints to keep, or 0; got ",
      options.keep_last);
  if (!options.keep_best) return;
  TORCH_CHECK_VALUE(options.keep_last > 0,
                    "[save_checkpoint] options.keep_best needs options.keep_last: without it, all "
                    "checkpoints are kept");
  TORCH_CHECK_VALUE(options.numbers.contains(options.keep_best->number),
                    "[save_checkpoint] options.keep_best: '", options.keep_best->number,
                    "' must be in options.numbers");
}

std::string describe(const ShardPlan& plan, const ShardMesh& mesh) {
  std::string text =
      fmt::format("fully_shard: level {}, {}, over {} ranks", plan_choice(plan.level).name,
                  plan.partition == Partition::kWholeParam ? "whole parameters"
                  : plan.cuts.empty()                      ? "flat"
                                                           : "cut by rules",
                  mesh.shard().size());
  if (mesh.replicates()) text += fmt::format(", {} replicas", mesh.replicate().size());
  if (mesh.parts().size() > 1)
    text += fmt::format(", DistTensors of {} ranks", mesh.parts().size());
  return text;
}

std::vector<NamedTensor> ordinary(const std::vector<NamedTensor>& buffers) {
  std::vector<NamedTensor> result;
  for (const NamedTensor& buffer : buffers)
    if (buffer.tensor.defined() && !is_dist(buffer.tensor)) result.push_back(buffer);
  return result;
}

// Throws on all ranks: some have other names.
[[noreturn]] void refuse_names(const Ranks& ranks, const std::string& names) {
  std::vector<std::set<std::string>> all;
  for (const std::string& lines : ranks.all_gather_bytes(names, kCheckpointTag)) {
    std::istringstream stream(lines);
    std::set<std::string>& of_rank = all.emplace_back();
    for (std::string line; std::getline(stream, line);) of_rank.insert(line);
  }
  std::vector<std::string> differences;
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (const auto& name : all[0])
      if (!all[rank].contains(name))
        differences.push_back(fmt::format("rank {} lacks '{}'", rank, name));
    for (const auto& name : all[rank])
      if (!all[0].contains(name))
        differences.push_back(fmt::format("rank 0 lacks '{}' of rank {}", name, rank));
  }
  TORCH_CHECK_VALUE(false, "[save_state_dict] all ranks must have the same names; ",
                    shortened(differences));
}

// The data that ranks exchange before a save.
struct Offer {
  std::string kind;                  // "whole" or "shards": ranks gather for the first
  std::string id;                    // proposed for the save; rank 0's is used
  std::string names;                 // checksum of the names that all ranks must have
  std::vector<std::string> buffers;  // checksum of each

  std::string text() const {
    return fmt::format("{} {} {} {}", kind, id, names, fmt::join(buffers, " "));
  }
  static Offer of(const std::string& text) {
    std::istringstream stream(text);
    Offer offer;
    stream >> offer.kind >> offer.id >> offer.names;
    for (std::string sum; stream >> sum;) offer.buffers.push_back(sum);
    return offer;
  }
};

struct Agreement {
  std::string id;
  /// This rank's buffers that differ from rank 0's, such as statistics that ranks do not
  /// synchronize: a resumed run continues with each rank's own.
  std::map<std::string, at::Tensor> own_buffers;
};

// Throws on all ranks if they want to store differently: some would wait for others forever.
Agreement agree(const SaveJob& job) {
  const std::string names = fmt::format("{}", fmt::join(job.names, "\n"));
  Offer mine{job.whole ? "whole" : "shards",
             new_save_id(),
             checksum_text(checksum(names.data(), names.size())),
             {}};
  for (const NamedTensor& buffer : job.buffers) {
    const at::Tensor value = with_plain_memory(buffer.tensor).cpu().contiguous();
    mine.buffers.push_back(checksum_text(checksum(value.const_data_ptr(), value.nbytes())));
  }
  std::vector<Offer> offers;
  for (const std::string& text : job.ranks.all_gather_bytes(mine.text(), kCheckpointTag))
    offers.push_back(Offer::of(text));
  const Offer& first = offers.front();
  for (size_t rank = 0; rank < offers.size(); ++rank) {
    const Offer& offer = offers[rank];
    TORCH_CHECK_VALUE(offer.kind == first.kind,
                      "[save_checkpoint] options.whole_parameters must be the same on all ranks");
    if (offer.names != first.names) refuse_names(job.ranks, names);
    TORCH_CHECK_VALUE(offer.buffers.size() == first.buffers.size(),
                      "[save_checkpoint] all ranks must have the same buffers; rank 0 has ",
                      first.buffers.size(), ", rank ", rank, " has ", offer.buffers.size());
  }
  Agreement agreement{first.id, {}};
  for (size_t i = 0; i < job.buffers.size(); ++i)
    if (mine.buffers[i] != first.buffers[i])
      agreement.own_buffers[job.buffers[i].name] = job.buffers[i].tensor;
  return agreement;
}

// Each replica has an optimizer state of its own. Throws on all ranks if two save to one path.
void check_paths_differ(ProcessGroup& replicas, const std::filesystem::path& path) {
  const std::string own = std::filesystem::absolute(path).lexically_normal().string();
  if (replicas.size() == 1) return;
  const auto paths = all_gather_bytes(replicas, own, kCheckpointTag);
  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t j = 0; j < i; ++j)
      TORCH_CHECK_VALUE(
          paths[i] != paths[j],
          "[save_checkpoint] with plan.outer each replica has an optimizer state of its own, and "
          "must save to a directory of its own, such as runs/replica-1/step-100 with "
          "plan.replicate_group->rank() in it; replicas ",
          j, " and ", i, " save to '", paths[i], "'");
  }
}

// A parameter or buffer that one rank stores whole and contiguous, under its plain name.
struct WholeTensor {
  TensorRecord record;
  int writer = 0;  // rank
};

int count_writers(const ShardedState& state) {
  return std::min(Ranks::of(state.mesh()).size(), static_cast<int>(state.units().size()));
}

// Returns the rank of `Ranks::of(state.mesh())` that stores each tensor: those of unit u belong to
// rank `u % size`, ignored parameters and buffers to rank 0. All ranks get the same result.
std::vector<WholeTensor> plan_whole_model(const ShardedState& state) {
  const int writers = count_writers(state);
  std::vector<WholeTensor> plan;
  for (const auto& unit : state.units()) {
    for (const ParamSlot& slot : unit->layout().slots)
      plan.push_back({contiguous_record("param", slot.names, slot.global_sizes(), slot.dtype),
                      unit->index() % writers});
  }
  for (const ParamSlot& slot : ignored_slots(state))
    plan.push_back({contiguous_record("param", slot.names, slot.global_sizes(), slot.dtype), 0});
  for (const NamedTensor& buffer : state.buffers().saved()) {
    if (buffer.tensor.defined()) plan.push_back({record_of(buffer), 0});
  }
  return plan;
}

at::Tensor whole_value(const at::Tensor& tensor) {
  return is_dist(tensor) ? full_tensor(tensor) : tensor;
}

// Calls `visit` with the name and the whole value of each tensor of the plan. Gathers the units one
// after another; collective.
template <class F>
void visit_whole_values(ShardedState& state, F&& visit) {
  for (const ParamSlot& slot : ignored_slots(state)) visit(slot.name(), whole_value(slot.tensor()));
  for (const NamedTensor& buffer : state.buffers().saved()) {
    if (buffer.tensor.defined()) visit(buffer.name, whole_value(buffer.tensor));
  }
  state.visit_whole_units([&](const Unit& unit) {
    for (const ParamSlot& slot : unit.layout().slots)
      visit(slot.name(), global_value(slot, view_param(slot, unit.full())));
  });
}

// Makes the file of the tensors that `rank` writes.
SafetensorsWriter start_model_file(const std::filesystem::path& path,
                                   const std::vector<WholeTensor>& plan, int rank,
                                   const std::string& id) {
  std::vector<TensorHeader> headers;
  std::map<std::string, std::string> metadata;
  for (const auto& [record, writer] : plan) {
    if (writer != rank) continue;
    headers.push_back({record.names.front(), record.dtype, record.shape});
    add_other_names(record, metadata);
  }
  metadata["format"] = "pt";
  metadata["id"] = id;
  return {File::create(path), std::move(headers), metadata};
}

// Writes each tensor into the model file of its rank, and adds the chunks that this rank has
// written to its records in the plan.
//
// Collective. A rank that can't write still gathers with the others; then all throw its error.
// Memory: one gathered unit, and one parameter of it that is not laid out contiguously.
void write_whole_model(ShardedState& state, std::vector<WholeTensor>& plan,
                       const std::filesystem::path& directory, const std::string& id) {
  const Ranks ranks = Ranks::of(state.mesh());
  const int rank = ranks.rank(), writers = count_writers(state);
  const std::string name_of_file = model_file(rank + 1, writers);
  std::map<std::string, TensorRecord*> mine;
  for (auto& [record, writer] : plan)
    if (writer == rank) mine[record.names.front()] = &record;
  std::optional<SafetensorsWriter> file;
  std::exception_ptr error;  // the first
  const auto attempt = [&](const std::function<void()>& work) {
    try {
      if (!error) work();
    } catch (...) {
      error = std::current_exception();
    }
  };
  attempt([&] {
    if (rank < writers) file.emplace(start_model_file(directory / name_of_file, plan, rank, id));
  });
  // All ranks take part in each gather, whichever rank writes the tensor, and even after an error.
  visit_whole_values(state, [&](const std::string& name, const at::Tensor& value) {
    const auto it = mine.find(name);
    if (it == mine.end()) return;
    attempt([&] {
      auto checksums = file->write(name, value);
      if (value.numel() > 0)
        it->second->chunks = {{name_of_file, name, Region{0, value.numel()}, std::move(checksums)}};
    });
  });
  ranks.check(
      [&] {
        if (error) std::rethrow_exception(error);
        if (file) file->sync();
      },
      "checkpoint");
}

SaveJob job_of_world() {
  ProcessGroupPtr all = default_process_group();
  return {.ranks = Ranks({all.get()}), .owner = all, .progress = progress_of(*all)};
}

// One model of a save that begins, or the whole.
struct BeginningPart {
  BeginningPart(const SaveJob& given, Agreement agreed)
      : job(given), agreement(std::move(agreed)), contents(job.ranks.rank(), job.ranks.size()) {}

  void collect() {
    if (job.whole) plan = plan_whole_model(*job.whole);
    job.collect(contents);
    contents.add_rank_state("buffer", agreement.own_buffers);
  }

  RankContents take() {
    RankContents taken = std::move(contents).take();
    taken.name = job.name;
    return taken;
  }

  const SaveJob& job;
  Agreement agreement;
  std::vector<WholeTensor> plan;
  ChunkCollector contents;
};

// Writes the model of a part whose parameters are stored whole, if they are. Collective.
void write_if_whole(BeginningPart& part, const std::filesystem::path& draft,
                    const std::string& id) {
  if (!part.job.whole) return;
  write_whole_model(*part.job.whole, part.plan, draft / part.job.name, id);
  const int rank = part.job.ranks.rank();
  std::vector<TensorRecord> stored;  // rank 0 lists all tensors
  for (auto& [record, writer] : part.plan)
    if (rank == 0 || writer == rank) stored.push_back(std::move(record));
  part.contents.add_stored(std::move(stored));
}

}  // namespace

void add_options(ChunkCollector& contents, const SaveOptions& options) {
  check(options);
  CheckpointIndex& index = contents.index();
  index.numbers = options.numbers;
  index.texts = options.texts;
  if (options.scaler) index.scaler = options.scaler->state();
  for (const SchedulerPtr& scheduler : options.schedulers)
    index.schedulers.push_back(read_scheduler(scheduler));
  if (options.random_state) contents.add_rank_state("random", read_random_state());
  contents.add_rank_state("user", options.rank_state);
}

BegunSave begin_save(const std::filesystem::path& path, const SaveJob& job) {
  at::NoGradGuard no_grad;
  if (job.replicas) check_paths_differ(*job.replicas, path);
  std::vector<BeginningPart> parts;
  parts.emplace_back(job, agree(job));
  for (const SaveJob& model : job.models) parts.emplace_back(model, agree(model));
  const std::string& id = parts.front().agreement.id;
  const int rank = job.ranks.rank();
  BegunSave begun;
  job.ranks.check(
      [&] {
        for (BeginningPart& part : parts) part.collect();
        begun.writer =
            std::make_unique<CheckpointWriter>(path, rank, job.ranks.size(), id, job.keep);
        std::vector<std::string> models;
        for (const SaveJob& model : job.models) models.push_back(model.name);
        if (rank == 0) begun.writer->begin(std::move(models));
      },
      "checkpoint");
  for (BeginningPart& part : parts) write_if_whole(part, begun.writer->draft(), id);
  begun.contents = parts.front().take();
  for (size_t i = 1; i < parts.size(); ++i) begun.contents.models.push_back(parts[i].take());
  return begun;
}

void run_save(const std::filesystem::path& path, const SaveJob& job) {
  const PhaseScope phase(job.progress, Phase::kSave);
  const BegunSave begun = begin_save(path, job);
  job.ranks.check([&] { begun.writer->write(begun.contents); }, "checkpoint");
  job.ranks.check(
      [&] {
        if (job.ranks.rank() == 0) begun.writer->commit(job.ranks.timeout());
      },
      "checkpoint");
}

SaveJob job_of(const ShardedModule& module, const ShardedOptimizer* optimizer,
               const SaveOptions& options) {
  ShardedState& state = *module.state();
  Progress* const progress = state.context().progress;
  const PhaseScope phase(progress, Phase::kSave);
  state.take_in_replaced();
  state.thaw_trained();
  SaveJob job{.ranks = Ranks::of(state.mesh()), .owner = module.state(), .progress = progress};
  job.keep = {options.keep_last, options.keep_best};
  if (state.plan().outer) job.replicas = state.plan().replicate_group;
  job.buffers = ordinary(state.buffers().saved().vec());
  const auto ignored = ordinary(state.buffers().ignored().vec());
  job.buffers.insert(job.buffers.end(), ignored.begin(), ignored.end());
  if (options.whole_parameters) job.whole = &state;
  job.collect = [&state, optimizer, &options](ChunkCollector& contents) {
    const ModelView view = view_of(state, optimizer);
    contents.index().plan = describe(state.plan(), state.mesh());
    options.whole_parameters ? contents.add_masters(view) : contents.add_model(view);
    if (optimizer) {
      contents.add_optimizer(view);
      contents.index().optimizer->steps = optimizer->steps();
      if (const OuterSteps* const outer = OptimizerAccess(*optimizer).outer_steps()) {
        outer->check_averaged("save_checkpoint");
        contents.add_rank_state(kOuterMomentum, outer->momentum());
      }
    }
    add_options(contents, options);
  };
  return job;
}

SaveJob job_of(torch::nn::Module& module, torch::optim::Optimizer* optimizer,
               const SaveOptions& options) {
  SaveJob job = job_of_world();
  const int rank = job.ranks.rank(), size = job.ranks.size();
  job.keep = {options.keep_last, options.keep_best};
  for (const auto& item : module.named_buffers()) job.buffers.push_back({item.key(), item.value()});
  job.buffers = ordinary(job.buffers);
  job.collect = [&module, optimizer, &options, rank, size](ChunkCollector& contents) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !options.whole_parameters,
        "[save_checkpoint] options.whole_parameters needs the handle that fully_shard() returned; "
        "export_checkpoint() makes one file of any checkpoint");
    const ModelView view = view_of(module, optimizer, rank, size);
    contents.index().plan = fmt::format("not sharded, {} ranks", size);
    contents.add_model(view);
    if (optimizer) contents.add_optimizer(view);
    add_options(contents, options);
  };
  return job;
}

SaveJob job_of(const StateDict& state) {
  SaveJob job = job_of_world();
  for (const auto& [name, tensor] : state) job.names.push_back(name);
  job.collect = [&state](ChunkCollector& contents) {
    contents.index().plan = "tensors by name";
    contents.add_tensors(state);
  };
  return job;
}

void save_checkpoint(const std::filesystem::path& path, const ShardedModule& module,
                     const ShardedOptimizer* optimizer, const SaveOptions& options) {
  run_save(path, job_of(module, optimizer, options));
}

void save_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                     torch::optim::Optimizer* optimizer, const SaveOptions& options) {
  run_save(path, job_of(module, optimizer, options));
}

void save_state_dict(const std::filesystem::path& path, const StateDict& state) {
  run_save(path, job_of(state));
}

StateDict flatten_state_dict(const std::map<std::string, StateDict>& parts) {
  StateDict flat;
  for (const auto& [part, state] : parts) {
    for (const auto& [name, tensor] : state) {
      const bool is_new = flat.emplace(part + "." + name, tensor).second;
      TORCH_CHECK_VALUE(is_new, "[flatten_state_dict] two tensors would be '", part, ".", name,
                        "'");
    }
  }
  return flat;
}

}  // namespace tessera
