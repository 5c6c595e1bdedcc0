#include "checkpoint/fit.h"

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <set>

#include "base/files/untrusted.h"
#include "checkpoint/additional_state.h"
#include "checkpoint/safetensors.h"
#include "engine/optim/param_state.h"
#include "engine/optim/small_state.h"
#include "engine/optim/state_shape.h"

namespace tessera {
namespace {

// Collects all mismatches, so that one error lists them.
class Misfits {
 public:
  enum Kind : uint8_t {
    kMissing,
    kExtra,
    kShape,
    kDtype,
    kTie,
    kOptimizer,
    kNoState,
    kExtraState,
    kScaler,
    kScheduler,
    kKinds
  };

  Misfits(const LoadOptions& options, LoadedCheckpoint& loaded)
      : options_(options), loaded_(loaded) {}

  /// `name`: the one to report if `options` allow the mismatch.
  void add(Kind kind, std::string text, const std::string& name = "") {
    if (options_.allow_missing && (kind == kMissing || kind == kNoState)) {
      loaded_.missing.push_back(name);
    } else if (options_.allow_unexpected && (kind == kExtra || kind == kExtraState)) {
      loaded_.unexpected.push_back(name);
    } else {
      found_[kind].push_back(std::move(text));
    }
  }

  void check(const std::string& path) const {
    static constexpr const char* kTitles[kKinds] = {"missing in the checkpoint",
                                                    "not in the model",
                                                    "other shapes",
                                                    "other dtypes",
                                                    "tied only in the model",
                                                    "optimizer",
                                                    "optimizer",
                                                    "optimizer",
                                                    "scaler",
                                                    "schedulers"};
    std::string text;
    for (size_t kind = 0; kind < kKinds; ++kind) {
      if (found_[kind].empty()) continue;
      text +=
          fmt::format("{}{}: {}", text.empty() ? "" : "; ", kTitles[kind], shortened(found_[kind]));
    }
    TORCH_CHECK_VALUE(text.empty(), "[load_checkpoint] the checkpoint '", path,
                      "' must fit the model; ", text);
  }

 private:
  const LoadOptions& options_;
  LoadedCheckpoint& loaded_;
  std::vector<std::string> found_[kKinds];
};

// Values are widened or rounded between float and the half precisions.
bool is_convertible(const std::string& from, const std::string& to) {
  const auto is_half = [](const std::string& dtype) { return dtype == "F16" || dtype == "BF16"; };
  return from == to || (from == "F32" && is_half(to)) || (is_half(from) && to == "F32");
}

void compare(const TensorRecord& record, const std::string& name, at::IntArrayRef sizes,
             at::ScalarType dtype, Misfits& misfits) {
  if (at::IntArrayRef(record.shape) != sizes) {
    misfits.add(Misfits::kShape,
                fmt::format("'{}' [{}] (the model's: [{}])", name, fmt::join(record.shape, ", "),
                            fmt::join(sizes.vec(), ", ")));
  }
  if (!is_convertible(record.dtype, safetensors_dtype(dtype))) {
    misfits.add(Misfits::kDtype, fmt::format("'{}' {} (the model's: {})", name, record.dtype,
                                             safetensors_dtype(dtype)));
  }
}

void compare_param(const TensorTable& table, const ParamView& param, Misfits& misfits) {
  const TensorRecord* first = nullptr;
  for (const std::string& name : param.names) {
    const TensorRecord* record = table.find("param", name);
    if (!record) {
      misfits.add(Misfits::kMissing, fmt::format("'{}'", name), name);
    } else if (!first) {
      first = record;
    } else if (record != first) {
      misfits.add(Misfits::kTie, fmt::format("'{}' = '{}'", param.name(), name));
    }
  }
  if (first) {
    compare(*table.source_of(param), param.name(), param.sizes, param.master_dtype, misfits);
  }
}

void compare_model(const CheckpointIndex& index, const TensorTable& table, const ModelView& view,
                   Misfits& misfits) {
  std::set<std::string> in_model;  // "KIND/NAME"
  for (const ParamView& param : view.params) {
    for (const std::string& name : param.names) in_model.insert("param/" + name);
    compare_param(table, param, misfits);
  }
  for (const NamedTensor& buffer : view.buffers) {
    in_model.insert("buffer/" + buffer.name);
    const TensorRecord* record = table.find("buffer", buffer.name);
    if (record)
      compare(*record, buffer.name, buffer.tensor.sizes(), buffer.tensor.scalar_type(), misfits);
    if (!record)
      misfits.add(Misfits::kMissing, fmt::format("buffer '{}'", buffer.name), buffer.name);
  }
  for (const std::string& name : view.left_out) in_model.insert("buffer/" + name);
  for (const TensorRecord& record : index.tensors) {
    if (!is_of_model(record)) continue;
    for (const std::string& name : record.names) {
      const bool any = record.kind == "tensor";
      if ((any || record.kind == "param") && in_model.contains("param/" + name)) continue;
      if ((any || record.kind == "buffer") && in_model.contains("buffer/" + name)) continue;
      if (table.find("param", name) == &record && in_model.contains("param/" + name)) continue;
      misfits.add(Misfits::kExtra,
                  fmt::format("{}'{}'", record.kind == "buffer" ? "buffer " : "", name), name);
    }
  }
}

// The param group of each parameter, by the parameter's first name in the checkpoint.
using Groups = std::map<std::string, size_t>;

void compare_groups(const Groups& saved, const Groups& present, Misfits& misfits) {
  for (const auto& [name, group] : present) {
    const auto it = saved.find(name);
    if (it == saved.end()) {
      misfits.add(Misfits::kNoState,
                  fmt::format("'{}' is in none of the checkpoint's param groups", name),
                  "optimizer: " + name);
    } else if (it->second != group) {
      misfits.add(
          Misfits::kOptimizer,
          fmt::format("'{}' is in param group {} (the checkpoint's: {})", name, group, it->second));
    }
  }
  for (const auto& [name, group] : saved) {
    if (present.contains(name)) continue;
    misfits.add(Misfits::kExtraState,
                fmt::format("'{}' of the checkpoint's param group {} is in none of the optimizer's",
                            name, group),
                "optimizer: " + name);
  }
}

Groups present_groups(const ModelView& view, const TensorTable& table) {
  Groups groups;
  for (const OptimizedParam& optimized : view.optimized) {
    const std::string& name = view.params[optimized.param].name();
    const TensorRecord* param = table.find("param", name);
    if (param) groups[param->names.front()] = optimized.param_group;
  }
  return groups;
}

// Blocks of 8-bit state must be those of the model's parameters, and none may be cut.
void compare_blocks(const TensorTable& table, const ModelView& view, Misfits& misfits) {
  for (const OptimizedParam& optimized : view.optimized) {
    const ParamView& param = view.params[optimized.param];
    const TensorRecord* const record = table.find("param", param.name());
    if (!record || record->shape != param.sizes || !optimized.tensor.defined()) continue;
    bool has_blocks = false, has_order = true;
    for (const TensorRecord* state : table.states_of(*record)) {
      has_blocks = has_blocks || is_scale(state->state);
      has_order = has_order && (is_scale(state->state) || state->shape != param.sizes ||
                                is_same_order(param.sizes, state->strides, param.strides));
    }
    const bool is_cut =
        param.begin % kStateBlock != 0 ||
        (param.end % kStateBlock != 0 && param.end != c10::multiply_integers(param.sizes));
    const bool is_dist_tensor = param.box || is_dist(optimized.tensor);
    if (!has_blocks || (has_order && !is_cut && !is_dist_tensor)) continue;
    misfits.add(Misfits::kOptimizer,
                fmt::format("'{}' has 8-bit state in blocks of {} elements, which {}", param.name(),
                            kStateBlock,
                            is_cut      ? "ranks cut here: shard with plan.cuts = cpu_adam_cuts()"
                            : has_order ? "a DistTensor can't have"
                                        : "are of another memory order"));
  }
}

void compare_optimizer(const CheckpointIndex& index, const TensorTable& table,
                       const ModelView& view, Misfits& misfits) {
  if (!index.optimizer) {
    misfits.add(Misfits::kOptimizer, "it was saved without one");
    return;
  }
  const OptimizerRecord& record = *index.optimizer;
  const std::string kind = optimizer_kind(*view.optimizer);
  if (record.kind != kind) {
    misfits.add(Misfits::kOptimizer, fmt::format("{} (the checkpoint's: {})", kind, record.kind));
  }
  const size_t groups = view.optimizer->param_groups().size();
  if (record.param_groups.size() != groups) {
    misfits.add(Misfits::kOptimizer, fmt::format("{} param groups (the checkpoint's: {})", groups,
                                                 record.param_groups.size()));
    return;
  }
  compare_groups(table.saved_groups(), present_groups(view, table), misfits);
  const OtherShapes others = other_shapes(*view.optimizer);
  compare_blocks(table, view, misfits);
  for (const TensorRecord& tensor : index.tensors) {
    if (tensor.kind != "state" || others.contains(tensor.state)) continue;
    const TensorRecord* param = table.find("param", tensor.names.front());
    if (param && state_sizes(tensor.state, param->shape) == tensor.shape) continue;
    misfits.add(Misfits::kOptimizer,
                fmt::format("'{}' has another shape than its parameter", tensor.id()));
  }
}

template <class Map>
const typename Map::mapped_type& find_or_none(const Map& map, const std::string& name) {
  static const typename Map::mapped_type kNone;
  const auto it = map.find(name);
  return it == map.end() ? kNone : it->second;
}

void compare_rest(const CheckpointIndex& index, const LoadOptions& options, Misfits& misfits) {
  const GradScaler* scaler = options.scaler;
  if (scaler && scaler->is_enabled() && index.scaler.empty())
    misfits.add(Misfits::kScaler, "the checkpoint was saved without one");
  const size_t wanted = options.schedulers.size(), present = index.schedulers.size();
  if (wanted > 0 && wanted != present) {
    misfits.add(Misfits::kScheduler, fmt::format("{} (the checkpoint's: {})", wanted, present));
    return;
  }
  for (size_t i = 0; i < wanted; ++i) {
    const std::string error = check_scheduler(options.schedulers[i], index.schedulers[i]);
    if (!error.empty()) misfits.add(Misfits::kScheduler, fmt::format("number {}: {}", i, error));
  }
}

}  // namespace

TensorTable::TensorTable(const CheckpointIndex& index) : index_(index) {
  for (const TensorRecord& record : index.tensors) {
    if (record.kind == "state") states_[record.names.front()].push_back(&record);
    for (size_t i = 0; i < record.names.size(); ++i) by_id_[record.id(i)] = &record;
  }
}

const TensorRecord* TensorTable::find(const std::string& kind, const std::string& name) const {
  auto it = by_id_.find(kind + "/" + name);
  if (it == by_id_.end() && kind != "master") it = by_id_.find("tensor/" + name);
  // Earlier checkpoints have parameters that a plan ignored as buffers.
  if (it == by_id_.end() && kind == "param") it = by_id_.find("buffer/" + name);
  return it == by_id_.end() ? nullptr : it->second;
}

const TensorRecord* TensorTable::source_of(const ParamView& param) const {
  const TensorRecord* in_use = nullptr;
  const TensorRecord* master = nullptr;
  for (const std::string& name : param.names) {
    if (!in_use) in_use = find("param", name);
    if (!master) master = find("master", name);
  }
  const std::string wanted = safetensors_dtype(param.master_dtype);
  return in_use && master && (in_use->dtype != wanted || master->dtype == wanted) ? master : in_use;
}

const std::vector<const TensorRecord*>& TensorTable::states_of(const TensorRecord& param) const {
  return find_or_none(states_, param.names.front());
}

Groups TensorTable::saved_groups() const {
  Groups groups;
  const auto& saved = index_.optimizer->param_groups;
  for (size_t group = 0; group < saved.size(); ++group) {
    for (const std::string& name : saved[group].params) {
      if (const auto* param = find("param", name)) groups[param->names.front()] = group;
    }
  }
  return groups;
}

const std::map<std::string, double>& TensorTable::counts_of(const TensorRecord& param) const {
  return find_or_none(index_.optimizer->counts, param.names.front());
}

std::string describe_misfit(const TensorRecord& record, const std::string& name,
                            const at::Tensor& tensor) {
  if (at::IntArrayRef(record.shape) != tensor.sizes())
    return fmt::format("'{}' has the shape [{}] (the checkpoint's: [{}])", name,
                       fmt::join(tensor.sizes().vec(), ", "), fmt::join(record.shape, ", "));
  if (!is_convertible(record.dtype, safetensors_dtype(tensor.scalar_type())))
    return fmt::format("'{}' is {} (the checkpoint's: {})", name,
                       safetensors_dtype(tensor.scalar_type()), record.dtype);
  return "";
}

void check_fit(const CheckpointIndex& index, const TensorTable& table, const ModelView& view,
               const LoadOptions& options, const std::string& path, LoadedCheckpoint& loaded) {
  Misfits misfits(options, loaded);
  compare_model(index, table, view, misfits);
  compare_rest(index, options, misfits);
  if (view.optimizer) compare_optimizer(index, table, view, misfits);
  misfits.check(path);
}

}  // namespace tessera
