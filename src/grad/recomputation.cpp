#include "grad/recomputation.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <optional>
#include <utility>

namespace tessera {
namespace {

using torch::autograd::SavedVariableHooks;

thread_local int recomputing = 0;

class RecomputingScope {
 public:
  RecomputingScope() { ++recomputing; }
  ~RecomputingScope() { --recomputing; }
  RecomputingScope(const RecomputingScope&) = delete;
  RecomputingScope& operator=(const RecomputingScope&) = delete;
};

std::string describe(const TensorLook& look) {
  return fmt::format("{} of {} on {}", c10::toString(look.dtype), look.sizes, look.device.str());
}

// Plain autograd makes this check, too, but not on tensors that pass through hooks.
at::Tensor unchanged(const SavedTensor& saved, const std::string& name) {
  TORCH_CHECK(version_of(saved.data) == saved.version, "[checkpoint] ", label_of(name),
              "a tensor that backward needs was changed in place after it was saved: ",
              describe(saved.look), " is at version ", version_of(saved.data), ", expected ",
              saved.version);
  return saved.data;
}

class DroppedTensor final : public SavedVariableHooks {
 public:
  explicit DroppedTensor(std::shared_ptr<Recomputation> source) : source_(std::move(source)) {}
  void call_pack_hook(const at::Tensor& tensor) override { number_ = source_->save(tensor); }
  at::Tensor call_unpack_hook() override { return source_->get(number_); }

 private:
  std::shared_ptr<Recomputation> source_;
  size_t number_ = 0;
};

// Keeps a tensor saved for the graph of a second run. That graph is needed if the function itself
// runs a backward.
class KeptTensor final : public SavedVariableHooks {
 public:
  KeptTensor(std::vector<SavedTensor>* all, const std::string& name) : all_(all), name_(name) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    saved_ = SavedTensor::of(tensor);
    std::exchange(all_, nullptr)->push_back(*saved_);
  }
  at::Tensor call_unpack_hook() override { return unchanged(*saved_, name_); }

 private:
  std::vector<SavedTensor>* all_;  // null once the tensor was saved, which is at once
  std::string name_;
  std::optional<SavedTensor> saved_;
};

struct KeepingSink final : SavedTensorSink {
  explicit KeepingSink(const std::string& name) : name(name) {}
  std::unique_ptr<SavedVariableHooks> next() override {
    return std::make_unique<KeptTensor>(&saved, name);
  }
  const std::string& name;
  std::vector<SavedTensor> saved;
};

constexpr const char* kMustRepeat =
    "the function must do the same when backward runs it again (what differs may be a flag that it "
    "reads, random numbers of a generator that is not among its inputs, or a value that it changed "
    "itself); expected ";

}  // namespace

bool is_recomputing() { return recomputing > 0; }

int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

std::string label_of(const std::string& name) { return name.empty() ? "" : "'" + name + "': "; }

TensorLook TensorLook::of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {at::kFloat, at::kCPU, {-1}};
  return {tensor.scalar_type(), tensor.device(), tensor.sizes().vec()};
}

// Makes no operator call, which sharded parameters and DistTensors would intercept. A view of a
// parameter counts as the parameter: a linear layer saves its weight transposed.
SavedTensor SavedTensor::of(const at::Tensor& tensor) {
  const at::TensorBase& base = tensor.is_view() ? tensor._base() : tensor;
  const bool is_parameter = base.is_leaf() && base.requires_grad();
  return {tensor.tensor_data(), version_of(tensor), is_parameter ? version_of(tensor) : -1,
          TensorLook::of(tensor)};
}

Recomputation::Recomputation(std::string name, const Tensors& inputs, RandomState random,
                             Rerun rerun)
    : name_(std::move(name)),
      random_(std::move(random)),
      autocast_(AutocastState::current()),
      rerun_(std::move(rerun)) {
  for (const at::Tensor& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
    requires_grad_.push_back(input.defined() && input.requires_grad());
  }
}

void Recomputation::drop_saved(const Tensors& outputs) {
  const std::lock_guard lock(mutex_);
  for (SavedTensor& saved : saved_) saved.data.reset();
  for (const at::Tensor& output : outputs) outputs_.push_back(TensorLook::of(output));
  dropped_ = true;
}

std::unique_ptr<SavedVariableHooks> Recomputation::next() {
  return std::make_unique<DroppedTensor>(shared_from_this());
}

size_t Recomputation::save(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  saved_.push_back(SavedTensor::of(tensor));
  return saved_.size() - 1;
}

void Recomputation::abandon() {
  const std::lock_guard lock(mutex_);
  inputs_.clear();
  rerun_ = nullptr;
}

// The tensors that a run saved for a backward are freed with that backward, even if it fails. Each
// tensor is handed out once, so that it is freed as soon as its node has used it. A node that asks
// twice causes another run.
at::Tensor Recomputation::get(size_t number) {
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

at::Tensor Recomputation::take(SavedTensor& saved) const {
  const at::Tensor data = unchanged(saved, name_);
  saved.data.reset();
  return data;
}

void Recomputation::keep(Saved again, int backward) {
  std::erase_if(again_, [](const auto& entry) { return entry.second.expired(); });
  const auto kept = std::make_shared<Saved>(std::move(again));
  again_[backward] = kept;
  torch::autograd::Engine::get_default_engine().queue_callback([kept] {});
}

Recomputation::Saved Recomputation::run_again() const {
  const Tensors inputs = detached_inputs();
  KeepingSink sink(name_);
  Tensors outputs;
  {
    const RandomStateScope random(random_);
    const AutocastScope autocast(autocast_);
    const PlainScriptScope plain_scripts;
    const SavedTensorScope scope(&sink);
    const RecomputingScope flag;
    const at::AutoGradMode gradients(true);
    outputs = rerun_(inputs);
  }
  check_saved(sink.saved);
  check_outputs(outputs);
  return std::move(sink.saved);
}

Recomputation::Tensors Recomputation::detached_inputs() const {
  Tensors detached;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    try {
      const at::Tensor input = inputs_[i].unpack();
      detached.push_back(input.defined() ? input.tensor_data() : input);
    } catch (c10::Error& error) {
      error.add_context(
          fmt::format("[checkpoint] {}input {} is needed as it was, to run the function again: it "
                      "must not be changed in place before backward is done",
                      label_of(name_), i));
      throw;
    }
    if (requires_grad_[i]) detached.back().set_requires_grad(true);
  }
  return detached;
}

void Recomputation::check_saved(const Saved& again) const {
  TORCH_CHECK(again.size() == saved_.size(), "[checkpoint] ", label_of(name_), kMustRepeat,
              saved_.size(), " tensors to be saved for backward, got ", again.size());
  for (size_t i = 0; i < saved_.size(); ++i) {
    TORCH_CHECK(again[i].look == saved_[i].look, "[checkpoint] ", label_of(name_), kMustRepeat,
                describe(saved_[i].look), " as saved tensor ", i, " of ", saved_.size(), ", got ",
                describe(again[i].look));
    TORCH_CHECK(
        saved_[i].leaf_version < 0 || again[i].leaf_version == saved_[i].leaf_version,
        "[checkpoint] ", label_of(name_),
        "a parameter was changed in place between forward and backward, for example by a step of "
        "an optimizer: ",
        describe(saved_[i].look), " is at version ", again[i].leaf_version, ", expected ",
        saved_[i].leaf_version);
  }
}

void Recomputation::check_outputs(const Tensors& again) const {
  TORCH_CHECK(again.size() == outputs_.size(), "[checkpoint] ", label_of(name_), kMustRepeat,
              outputs_.size(), " tensors returned, got ", again.size());
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const TensorLook look = TensorLook::of(again[i]);
    TORCH_CHECK(look == outputs_[i], "[checkpoint] ", label_of(name_), kMustRepeat,
                describe(outputs_[i]), " as returned tensor ", i, ", got ", describe(look));
  }
}

}  // namespace tessera
