#include "checkpoint/save.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/dist_tensor.h>
#include <tessera/grad_scaler.h>
#include <tessera/world.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/additional_state.h"
#include "checkpoint/checksum.h"
#include "checkpoint/model_view.h"
#include "checkpoint/optimizer_options.h"
#include "checkpoint/whole_model.h"
#include "group/math_bits.h"

namespace tessera {
namespace {

// Adds the objects that are saved along with a model.
void add_options(ChunkCollector& contents, const SaveOptions& options) {
  CheckpointIndex& index = contents.index();
  index.numbers = options.numbers;
  if (options.scaler) index.scaler = options.scaler->state();
  for (const SchedulerPtr& scheduler : options.schedulers)
    index.schedulers.push_back(read_scheduler(scheduler));
  if (options.random_state) contents.add_rank_state("random", read_random_state());
  contents.add_rank_state("user", options.rank_state);
}

std::string describe(const ShardPlan& plan, const ShardMesh& mesh) {
  static constexpr const char* kLevels[] = {"none", "os", "os_g", "p_g_os"};
  std::string text = fmt::format(
      "fully_shard: level {}, {}, over {} ranks", kLevels[static_cast<size_t>(plan.level)],
      plan.partition == Partition::kWholeParam ? "whole parameters" : "flat", mesh.shard().size());
  if (mesh.replicates()) text += fmt::format(", {} replicas", mesh.replicate().size());
  if (mesh.parts().size() > 1)
    text += fmt::format(", DistTensors of {} ranks", mesh.parts().size());
  return text;
}

std::string checksum_of(const std::string& text) {
  return checksum_text(checksum(text.data(), text.size()));
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
  if (differences.size() > 10) {
    const std::string more = fmt::format("and {} more", differences.size() - 10);
    differences.resize(10);
    differences.push_back(more);
  }
  TORCH_CHECK_VALUE(false, "[save_state_dict] all ranks must have the same names; ",
                    fmt::format("{}", fmt::join(differences, ", ")));
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
  Offer mine{job.whole ? "whole" : "shards", new_save_id(), checksum_of(names), {}};
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

SaveJob job_of_world() {
  ProcessGroupPtr all = default_process_group();
  return {.ranks = Ranks({all.get()}), .owner = all};
}

void save(const std::filesystem::path& path, const SaveJob& job) {
  const BegunSave begun = begin_save(path, job);
  job.ranks.check([&] { begun.writer->write(begun.contents); }, "checkpoint");
  job.ranks.check(
      [&] {
        static const std::atomic<bool> kNever = false;
        if (job.ranks.rank() == 0) begun.writer->commit(job.ranks.timeout(), kNever);
      },
      "checkpoint");
}

}  // namespace

BegunSave begin_save(const std::filesystem::path& path, const SaveJob& job) {
  at::NoGradGuard no_grad;
  const int rank = job.ranks.rank();
  const Agreement agreement = agree(job);
  BegunSave begun;
  std::vector<WholeTensor> plan;
  ChunkCollector contents(rank, job.ranks.size());
  job.ranks.check(
      [&] {
        if (job.whole) plan = plan_whole_model(*job.whole);
        job.collect(contents);
        contents.add_rank_state("buffer", agreement.own_buffers);
        TORCH_CHECK_VALUE(job.keep_last >= 0, "[save_checkpoint] options.keep_last must be the "
                          "number of checkpoints to keep, or 0; got ", job.keep_last);
        begun.writer = std::make_unique<CheckpointWriter>(path, rank, job.ranks.size(),
                                                          agreement.id, job.keep_last);
        if (rank == 0) begun.writer->begin();
      },
      "checkpoint");
  if (job.whole)
    contents.add_stored(write_whole_model(*job.whole, plan, begun.writer->draft(), agreement.id));
  begun.contents = std::move(contents).take();
  return begun;
}

SaveJob job_of(const ShardedModule& module, const ShardedOptimizer* optimizer,
               const SaveOptions& options) {
  ShardedState& state = *module.state();
  state.take_in_replaced();
  state.thaw_trained();
  SaveJob job{.ranks = Ranks::of(state.mesh()), .owner = module.state()};
  job.keep_last = options.keep_last;
  job.buffers = ordinary(state.buffers());
  if (options.whole_parameters) job.whole = &state;
  job.collect = [&state, optimizer, &options](ChunkCollector& contents) {
    const ModelView view = view_of(state, optimizer);
    contents.index().plan = describe(state.plan(), state.mesh());
    options.whole_parameters ? contents.add_masters(view) : contents.add_model(view);
    if (optimizer) {
      contents.add_optimizer(view);
      contents.index().optimizer->steps = optimizer->steps();
    }
    add_options(contents, options);
  };
  return job;
}

SaveJob job_of(torch::nn::Module& module, torch::optim::Optimizer* optimizer,
               const SaveOptions& options) {
  SaveJob job = job_of_world();
  const int rank = job.ranks.rank(), size = job.ranks.size();
  job.keep_last = options.keep_last;
  for (const auto& item : module.named_buffers()) job.buffers.push_back({item.key(), item.value()});
  job.buffers = ordinary(job.buffers);
  job.collect = [&module, optimizer, &options, rank, size](ChunkCollector& contents) {
    TORCH_CHECK_NOT_IMPLEMENTED(!options.whole_parameters,
                                "[save_checkpoint] options.whole_parameters needs the handle "
                                "that fully_shard() returned; export_checkpoint() makes one file "
                                "of any checkpoint");
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
  save(path, job_of(module, optimizer, options));
}

void save_checkpoint(const std::filesystem::path& path, torch::nn::Module& module,
                     torch::optim::Optimizer* optimizer, const SaveOptions& options) {
  save(path, job_of(module, optimizer, options));
}

void save_state_dict(const std::filesystem::path& path, const StateDict& state) {
  save(path, job_of(state));
}

StateDict flatten_state_dict(const std::map<std::string, StateDict>& parts) {
  StateDict flat;
  for (const auto& [part, state] : parts) {
    for (const auto& [name, tensor] : state) {
      const bool is_new = flat.emplace(part + "." + name, tensor).second;
      TORCH_CHECK_VALUE(is_new, "[flatten_state_dict] two tensors would be '", part, ".", name, "'");
    }
  }
  return flat;
}

}  // namespace tessera
