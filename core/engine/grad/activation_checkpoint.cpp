#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/base/generator.h>
#include <tessera/engine/activation_checkpoint.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "base/device/device.h"
#include "engine/grad/saved_tensors.h"

namespace tessera {

// [Note: Recomputation]
//
// A checkpoint's function runs with gradients enabled, so the graph is the same as without the
// checkpoint, and backward traverses it as usual: once, with gradients in their order, into the
// tensors that they belong to. Only the tensors that operators save for backward are dropped at the
// function's end. When backward first asks for one of them, the function runs again, on detached
// inputs; the tensors that it saves in this run are handed out by number, and the graph of this run
// is discarded.
//
// While the function runs, nothing has been dropped yet, so it may itself run a backward.
//
// A checkpoint saves its inputs as an operator would: their versions show whether they were
// changed, and an enclosing checkpoint drops them like all other saved tensors. Asking for them
// then makes the outer function run again first.
namespace {

using detail::Rerun;
using detail::Tensors;
using torch::autograd::SavedVariableHooks;

thread_local int recomputing = 0;

// How often a tensor was changed in place; 0 for tensors without a version count.
int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

std::vector<int64_t> versions_of(const Tensors& tensors) {
  std::vector<int64_t> versions;
  for (const at::Tensor& tensor : tensors) versions.push_back(version_of(tensor));
  return versions;
}

std::string label_of(const std::string& name) { return name.empty() ? "" : "'" + name + "': "; }

std::vector<at::Generator> generators_for(const Tensors& inputs,
                                          const std::vector<at::Generator>& named) {
  std::vector<at::Generator> generators = {default_generator()};
  generators.insert(generators.end(), named.begin(), named.end());
  std::set<at::DeviceIndex> devices;
  for (const at::Tensor& input : inputs)
    if (input.defined() && !computes_on_host(input.device()) &&
        devices.insert(input.device().index()).second)
      generators.push_back(default_generator_of(input.device()));
  return generators;
}

// The state of some generators and of the calling thread, on which a function's result depends.
struct Surroundings {
  std::vector<std::pair<at::Generator, at::Tensor>> random;
  std::vector<std::tuple<at::DeviceType, bool, at::ScalarType>> autocast;
  bool caches_casts = false;
  bool optimizes_scripts = false;

  static Surroundings current(const std::vector<at::Generator>& generators) {
    Surroundings now{.caches_casts = at::autocast::is_autocast_cache_enabled(),
                     .optimizes_scripts = torch::jit::getGraphExecutorOptimize()};
    for (at::Generator generator : generators) {
      const std::lock_guard lock(generator.mutex());
      now.random.emplace_back(generator, generator.get_state());
    }
    for (const at::DeviceType type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
      now.autocast.emplace_back(type, at::autocast::is_autocast_enabled(type),
                                at::autocast::get_autocast_dtype(type));
    return now;
  }

  void set() const {
    for (auto [generator, state] : random) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
    for (const auto& [type, enabled, dtype] : autocast) {
      at::autocast::set_autocast_enabled(type, enabled);
      at::autocast::set_autocast_dtype(type, dtype);
    }
    at::autocast::set_autocast_cache_enabled(caches_casts);
    torch::jit::setGraphExecutorOptimize(optimizes_scripts);
  }
};

// The properties of a tensor that do not depend on its values.
struct TensorLook {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::vector<int64_t> sizes = {-1};

  static TensorLook of(const at::Tensor& tensor) {
    if (!tensor.defined()) return {};
    return {tensor.scalar_type(), tensor.device(), tensor.sizes().vec()};
  }
  bool operator==(const TensorLook&) const = default;
};

std::string describe(const TensorLook& look) {
  return fmt::format("{} of {} on {}", c10::toString(look.dtype), look.sizes, look.device.str());
}

// A tensor that an operator saved for backward.
struct SavedTensor {
  at::Tensor data;      // without a graph
  int64_t version = 0;  // of `data` when it was saved
  TensorLook look;

  // Makes no operator call: sharded parameters and DistTensors would intercept it.
  static SavedTensor of(const at::Tensor& tensor) {
    return {tensor.tensor_data(), version_of(tensor), TensorLook::of(tensor)};
  }
};

// Plain autograd makes this check, too, but not on tensors that pass through hooks.
at::Tensor unchanged(const SavedTensor& saved, const std::string& name) {
  TORCH_CHECK(version_of(saved.data) == saved.version, "[checkpoint] ", label_of(name),
              "a tensor that backward needs was changed in place after it was saved: ",
              describe(saved.look), " is at version ", version_of(saved.data), ", expected ",
              saved.version);
  return saved.data;
}

// Keeps a tensor saved for the graph of a second run. That graph is needed if the function itself
// runs a backward.
class KeptTensor final : public SavedVariableHooks {
 public:
  KeptTensor(std::vector<SavedTensor>* all, const std::string& name) : all_(all), name_(name) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    saved_ = SavedTensor::of(tensor);
    std::exchange(all_, nullptr)->push_back(saved_);
  }
  at::Tensor call_unpack_hook() override { return unchanged(saved_, name_); }

 private:
  std::vector<SavedTensor>* all_;  // null once the tensor was saved
  std::string name_;
  SavedTensor saved_;
};

// A parameter that a function used, and its version then.
using UsedParameter = std::pair<at::Tensor, int64_t>;

// Returns the parameters from which a function computed `outputs`, beside `inputs`. `begin`: the
// number of its first node. Older ones belong to tensors that the function has from elsewhere, and
// uses again as they are.
std::vector<UsedParameter> parameters_of(const Tensors& outputs, const Tensors& inputs,
                                         uint64_t begin) {
  using torch::autograd::Node;
  std::set<const Node*> seen = {nullptr};
  for (const at::Tensor& input : inputs)
    if (input.defined() && input.requires_grad())
      seen.insert(torch::autograd::impl::gradient_edge(input).function.get());
  std::vector<Node*> next;
  const auto visit = [&](Node* node) {
    if (seen.insert(node).second && node->sequence_nr() >= begin) next.push_back(node);
  };
  for (const at::Tensor& output : outputs)
    if (output.defined() && output.requires_grad())
      visit(torch::autograd::impl::gradient_edge(output).function.get());
  std::vector<UsedParameter> parameters;
  while (!next.empty()) {
    Node* const node = next.back();
    next.pop_back();
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node))
      parameters.emplace_back(leaf->variable, version_of(leaf->variable));
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return parameters;
}

constexpr const char* kMustRepeat =
    "the function must do the same when backward runs it again (the cause of a difference may be a "
    "flag that it reads, random numbers of a generator that is not among its inputs, or a value "
    "that it changed itself); expected ";

// The tensors that a checkpoint's function saved for backward, and the means to recompute them.
// Lives as long as the operators' nodes that saved tensors.
class Recomputation {
 public:
  // Must be constructed before the function's first run.
  Recomputation(const ActivationCheckpointOptions& options, const Tensors& inputs,
                const std::vector<at::Generator>& named, Rerun rerun)
      : name_(options.name), rerun_(std::move(rerun)) {
    if (options.preserve_random_state) generators_ = generators_for(inputs, named);
    surroundings_ = Surroundings::current(generators_);
    // Nothing would drop cached casts before the next optimizer step makes them stale.
    surroundings_.caches_casts = false;
    surroundings_.optimizes_scripts = false;
    for (const at::Tensor& input : inputs) {
      inputs_.emplace_back(input, /*is_output=*/false);
      requires_grad_.push_back(input.defined() && input.requires_grad());
    }
  }

  // Called after the first run: from now on, the saved tensors come from running the function
  // again.
  void drop_saved(const Tensors& outputs, const std::vector<UsedParameter>& parameters) {
    const std::lock_guard lock(mutex_);
    parameters_.insert(parameters_.end(), parameters.begin(), parameters.end());
    for (SavedTensor& saved : saved_) saved.data.reset();
    for (const at::Tensor& output : outputs) outputs_.push_back(TensorLook::of(output));
    dropped_ = true;
  }

  // Called if the first run failed: keeps the saved tensors, and releases the inputs.
  void abandon() {
    const std::lock_guard lock(mutex_);
    inputs_.clear();
    rerun_ = nullptr;
  }

  // Records a saved tensor, and returns the number by which `get()` returns it.
  size_t save(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    saved_.push_back(SavedTensor::of(tensor));
    // A view made without gradients leads to its parameter in no graph.
    const at::TensorBase& base = tensor.is_view() ? tensor._base() : tensor;
    if (base.is_leaf() && base.requires_grad())
      parameters_.emplace_back(at::Tensor(base), version_of(tensor));
    return saved_.size() - 1;
  }

  // The tensors that a run saved for a backward are freed with that backward, even if it fails.
  // Each tensor is handed out once, so that it is freed as soon as its node has used it. A node
  // that asks twice causes another run.
  at::Tensor get(size_t number) {
    const std::lock_guard lock(mutex_);
    if (!dropped_) return unchanged(saved_[number], name_);
    const int backward = torch::autograd::get_current_graph_task_id();
    const auto found = again_.find(backward);
    const auto rest = found == again_.end() ? nullptr : found->second.lock();
    if (rest && (*rest)[number].data.defined()) return take((*rest)[number]);
    Saved again = run_again();
    const at::Tensor data = take(again[number]);
    if (backward >= 0 && !rest) keep(std::move(again), backward);
    return data;
  }

 private:
  using Saved = std::vector<SavedTensor>;

  at::Tensor take(SavedTensor& saved) const {
    const at::Tensor data = unchanged(saved, name_);
    saved.data.reset();
    return data;
  }

  void keep(Saved again, int backward) {
    std::erase_if(again_, [](const auto& entry) { return entry.second.expired(); });
    const auto kept = std::make_shared<Saved>(std::move(again));
    again_[backward] = kept;
    torch::autograd::Engine::get_default_engine().queue_callback([kept] {});
  }

  Saved run_again() const {
    const Tensors inputs = detached_inputs();
    Saved saved;
    Tensors outputs;
    {
      const auto outer = Surroundings::current(generators_);
      ++recomputing;
      const auto restore = c10::make_scope_exit([&outer] {
        --recomputing;
        outer.set();
      });
      surroundings_.set();
      const SavedTensorScope scope([&] { return std::make_unique<KeptTensor>(&saved, name_); });
      const at::AutoGradMode gradients(true);
      outputs = rerun_(inputs);
    }
    check_saved(saved);
    check_parameters();
    check_outputs(outputs);
    return saved;
  }

  Tensors detached_inputs() const {
    Tensors detached;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      try {
        const at::Tensor input = inputs_[i].unpack();
        detached.push_back(input.defined() ? input.tensor_data() : input);
      } catch (c10::Error& error) {
        error.add_context(
            fmt::format("[checkpoint] {}input {} is needed as it was, to run the function again: "
                        "it must not be changed in place before backward is done",
                        label_of(name_), i));
        throw;
      }
      if (requires_grad_[i]) detached.back().set_requires_grad(true);
    }
    return detached;
  }

  void check_saved(const Saved& again) const {
    TORCH_CHECK(again.size() == saved_.size(), "[checkpoint] ", label_of(name_), kMustRepeat,
                saved_.size(), " tensors to be saved for backward, got ", again.size());
    for (size_t i = 0; i < saved_.size(); ++i) {
      TORCH_CHECK(again[i].look == saved_[i].look, "[checkpoint] ", label_of(name_), kMustRepeat,
                  describe(saved_[i].look), " as saved tensor ", i, " of ", saved_.size(), ", got ",
                  describe(again[i].look));
    }
  }

  // Before the second run and in it; also those that no operator saves, as a bias.
  void check_parameters() const {
    for (const auto& [parameter, version] : parameters_)
      TORCH_CHECK(version_of(parameter) == version, "[checkpoint] ", label_of(name_),
                  "a parameter was changed in place between forward and backward, for example by a "
                  "step of an optimizer: ",
                  describe(TensorLook::of(parameter)), " is at version ", version_of(parameter),
                  ", expected ", version);
  }

  void check_outputs(const Tensors& again) const {
    TORCH_CHECK(again.size() == outputs_.size(), "[checkpoint] ", label_of(name_), kMustRepeat,
                outputs_.size(), " tensors returned, got ", again.size());
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const TensorLook look = TensorLook::of(again[i]);
      TORCH_CHECK(look == outputs_[i], "[checkpoint] ", label_of(name_), kMustRepeat,
                  describe(outputs_[i]), " as returned tensor ", i, ", got ", describe(look));
    }
  }

  std::string name_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<bool> requires_grad_;  // per input
  std::vector<at::Generator> generators_;
  Surroundings surroundings_;  // of the second run
  Rerun rerun_;

  // Backward may run on several threads, and the function may release one of our nodes.
  mutable std::recursive_mutex mutex_;
  bool dropped_ = false;
  std::vector<UsedParameter> parameters_;
  Saved saved_;  // without data once they are dropped
  std::vector<TensorLook> outputs_;
  // By backward, their owner: the tensors not yet handed out of the run made for it.
  std::map<int, std::weak_ptr<Saved>> again_;
};

class DroppedTensor final : public SavedVariableHooks {
 public:
  explicit DroppedTensor(std::shared_ptr<Recomputation> source) : source_(std::move(source)) {}
  void call_pack_hook(const at::Tensor& tensor) override { number_ = source_->save(tensor); }
  at::Tensor call_unpack_hook() override { return source_->get(number_); }

 private:
  std::shared_ptr<Recomputation> source_;
  size_t number_ = 0;
};

// Optimized scripts save other tensors for backward, and optimization begins only after some calls.
Tensors run_unoptimized(const std::function<Tensors()>& run) {
  const bool optimizes = torch::jit::getGraphExecutorOptimize();
  const auto restore =
      c10::make_scope_exit([&] { torch::jit::setGraphExecutorOptimize(optimizes); });
  torch::jit::setGraphExecutorOptimize(false);
  return run();
}

}  // namespace

bool is_recomputing() { return recomputing > 0; }

void detail::record_checkpoint(const ActivationCheckpointOptions& options, const Tensors& inputs,
                               const std::vector<at::Generator>& generators, Rerun rerun,
                               const std::function<Tensors()>& run) {
  const auto versions = versions_of(inputs);
  const auto recomputation =
      std::make_shared<Recomputation>(options, inputs, generators, std::move(rerun));
  const uint64_t begin = at::sequence_number::peek();
  try {
    const SavedTensorScope scope([&] { return std::make_unique<DroppedTensor>(recomputation); });
    const Tensors outputs = run_unoptimized(run);
    const auto now = versions_of(inputs);
    for (size_t i = 0; i < now.size(); ++i) {
      TORCH_CHECK(now[i] == versions[i], "[checkpoint] ", label_of(options.name),
                  "the function must not change its inputs in place, as backward runs it again on "
                  "them; input ",
                  i, " is at version ", now[i], ", expected ", versions[i],
                  ". Let it work on input.clone()");
    }
    recomputation->drop_saved(outputs, parameters_of(outputs, inputs, begin));
  } catch (...) {
    recomputation->abandon();
    throw;
  }
}

}  // namespace tessera
