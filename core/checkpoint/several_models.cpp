#include "checkpoint/several_models.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/engine/exponential_average.h>
#include <torch/nn/module.h>

#include <memory>
#include <set>
#include <string>
#include <utility>

#include "checkpoint/directory.h"
#include "checkpoint/index.h"
#include "checkpoint/load.h"
#include "checkpoint/save.h"
#include "engine/optim/averaged_weights.h"

namespace tessera {
namespace {

template <class... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
// clang deduces the arguments of an aggregate from version 17 on.
template <class... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

// An average is saved as a plain copy of the model: its parameters alone differ.
SaveJob job_of_average(const std::shared_ptr<AveragedWeights>& average,
                       const SaveOptions& options) {
  SaveJob job = job_of(ShardedModule(average->state), nullptr, options);
  job.whole = nullptr;
  job.collect = [average, is_whole = options.whole_parameters](ChunkCollector& contents) {
    average->check_separate("save_checkpoint");
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_whole,
        "[save_checkpoint] an average can't be saved with options.whole_parameters; "
        "export_checkpoint() makes one file of it");
    average->prepare();
    contents.index().plan = "average of a sharded model's parameters";
    contents.index().numbers["updates"] = static_cast<double>(average->updates);
    contents.add_model(view_of(*average));
  };
  return job;
}

SaveJob job_of_model(const CheckpointModel& model, const SaveOptions& options) {
  return std::visit(Overloaded{[&](const CheckpointModel::Sharded& sharded) {
                                 return job_of(sharded.module, sharded.optimizer, options);
                               },
                               [&](const CheckpointModel::Plain& plain) {
                                 return job_of(*plain.module, plain.optimizer, options);
                               },
                               [&](const CheckpointModel::Average& average) {
                                 return job_of_average(average, options);
                               }},
                    model.model);
}

std::unique_ptr<ModelLoad> load_of_model(const CheckpointModel& model) {
  return std::visit(
      Overloaded{[](CheckpointModel::Sharded sharded) {
                   return load_of(sharded.module, sharded.optimizer);
                 },
                 [](const CheckpointModel::Plain& plain) {
                   return load_of(*plain.module, plain.optimizer);
                 },
                 [](const CheckpointModel::Average& average) { return load_of(average); }},
      model.model);
}

// Compares the models to load with those that the checkpoint has, `present`. Differences that
// `options` allow are added to `result`, and the loads of absent models are removed.
void drop_absent(const std::filesystem::path& path, const std::vector<CheckpointModel>& models,
                 const std::vector<std::string>& present, const LoadOptions& options,
                 std::vector<std::unique_ptr<ModelLoad>>& loads, LoadedCheckpoint& result) {
  std::set<std::string> others(present.begin(), present.end());
  for (size_t i = 0; i < models.size(); ++i) {
    if (others.erase(models[i].name) != 0) continue;
    result.missing.push_back(models[i].name);
    loads[i].reset();
  }
  result.unexpected.assign(others.begin(), others.end());
  const bool fits = (result.missing.empty() || options.allow_missing) &&
                    (result.unexpected.empty() || options.allow_unexpected);
  TORCH_CHECK_VALUE(fits, "[load_checkpoint] the checkpoint '", path.string(),
                    "' must have the models to load; it has ",
                    fmt::format("{}", fmt::join(present, ", ")),
                    "; missing: ", fmt::format("{}", fmt::join(result.missing, ", ")),
                    "; not loaded: ", fmt::format("{}", fmt::join(result.unexpected, ", ")));
}

void add_differences(const std::string& model, LoadedCheckpoint loaded, LoadedCheckpoint& result) {
  for (std::string& name : loaded.missing) result.missing.push_back(model + "/" + name);
  for (std::string& name : loaded.unexpected) result.unexpected.push_back(model + "/" + name);
}

}  // namespace

CheckpointModel::CheckpointModel(std::string given, const ShardedModule& module,
                                 ShardedOptimizer* optimizer)
    : name(std::move(given)), model(Sharded{module, optimizer}) {}
CheckpointModel::CheckpointModel(std::string given, torch::nn::Module& module,
                                 torch::optim::Optimizer* optimizer)
    : name(std::move(given)), model(Plain{&module, optimizer}) {}
CheckpointModel::CheckpointModel(std::string given, const ExponentialAverage& average)
    : name(std::move(given)), model(average.weights()) {}

void check_models(const std::vector<CheckpointModel>& models) {
  TORCH_CHECK_VALUE(!models.empty(), "[checkpoint] models must not be empty");
  std::set<std::string> names;
  for (const CheckpointModel& model : models) {
    TORCH_CHECK_VALUE(is_model_name(model.name),
                      "[checkpoint] a model's name must be of letters, digits, - and _; got '",
                      model.name, "'");
    TORCH_CHECK_VALUE(names.insert(model.name).second,
                      "[checkpoint] models must have distinct names; got '", model.name, "' twice");
  }
}

SaveJob job_of(const std::vector<CheckpointModel>& models, const SaveOptions& options) {
  check_models(models);
  const auto own = std::make_shared<SaveOptions>();  // of each model
  own->random_state = false;
  own->whole_parameters = options.whole_parameters;
  std::vector<SaveJob> jobs;
  for (const CheckpointModel& model : models) {
    SaveJob& job = jobs.emplace_back(job_of_model(model, *own));
    job.name = model.name;
    job.collect = [own, collect = std::move(job.collect)](ChunkCollector& contents) {
      collect(contents);
    };
  }
  const SaveJob& first = jobs.front();
  SaveJob all{.ranks = first.ranks, .owner = first.owner, .progress = first.progress};
  all.replicas = first.replicas;
  all.keep = {options.keep_last, options.keep_best};
  for (const SaveJob& job : jobs) {
    TORCH_CHECK_VALUE(
        job.ranks.rank() == first.ranks.rank() && job.ranks.size() == first.ranks.size(),
        "[save_checkpoint] all models must be sharded over the same ranks; '", first.name,
        "' is over ", first.ranks.size(), ", '", job.name, "' over ", job.ranks.size());
    all.names.push_back(job.name);
  }
  all.collect = [&options](ChunkCollector& contents) {
    add_options(contents, options);
    contents.index().plan = "several models";
  };
  all.models = std::move(jobs);
  return all;
}

void save_checkpoint(const std::filesystem::path& path, const std::vector<CheckpointModel>& models,
                     const SaveOptions& options) {
  run_save(path, job_of(models, options));
}

LoadedCheckpoint load_checkpoint(const std::filesystem::path& path,
                                 const std::vector<CheckpointModel>& models,
                                 const LoadOptions& options) {
  at::NoGradGuard no_grad;
  check_models(models);
  std::vector<std::unique_ptr<ModelLoad>> loads;
  for (const CheckpointModel& model : models) loads.push_back(load_of_model(model));
  const Ranks ranks = loads.front()->ranks();
  const auto common = load_of_options(ranks);
  const LoadOptions own{.random_state = false,
                        .allow_missing = options.allow_missing,
                        .allow_unexpected = options.allow_unexpected};
  LoadedCheckpoint result;
  ranks.check(
      [&] {
        common->plan(path, options);
        const std::vector<std::string> present = common->index().models;
        drop_absent(path, models, present, options, loads, result);
        for (size_t i = 0; i < models.size(); ++i)
          if (loads[i]) loads[i]->plan(readable_checkpoint(path) / models[i].name, own);
      },
      "checkpoint");
  check_same_checkpoint(ranks, common->index().id);
  for (size_t i = 0; i < models.size(); ++i)
    if (loads[i]) add_differences(models[i].name, loads[i]->load(), result);
  LoadedCheckpoint rest = common->load();
  rest.missing = std::move(result.missing);
  rest.unexpected = std::move(result.unexpected);
  return rest;
}

}  // namespace tessera
