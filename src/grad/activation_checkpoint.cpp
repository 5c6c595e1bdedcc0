#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <tessera/activation_checkpoint.h>
#include <tessera/generator.h>

#include <algorithm>
#include <set>
#include <utility>

#include "grad/recomputation.h"

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
namespace detail {
namespace {

std::vector<at::Generator> generators_for(const Tensors& inputs,
                                          const std::vector<at::Generator>& named) {
  std::vector<at::Generator> generators = {default_generator()};
  generators.insert(generators.end(), named.begin(), named.end());
  std::set<std::pair<at::DeviceType, at::DeviceIndex>> devices;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || !input.is_cuda()) continue;
    if (devices.emplace(input.device().type(), input.device().index()).second)
      generators.push_back(at::globalContext().defaultGenerator(input.device()));
  }
  return generators;
}

std::vector<int64_t> versions_of(const Tensors& inputs) {
  std::vector<int64_t> versions;
  for (const at::Tensor& input : inputs) versions.push_back(version_of(input));
  return versions;
}

}  // namespace

class CheckpointRecording::Impl {
 public:
  Impl(const ActivationCheckpointOptions& options, const Tensors& inputs,
       const std::vector<at::Generator>& named, Rerun rerun)
      : inputs_(inputs),
        versions_(versions_of(inputs)),
        name_(options.name),
        recomputation_(std::make_shared<Recomputation>(
            options.name, inputs,
            options.preserve_random_state ? random_state_of(generators_for(inputs, named))
                                          : RandomState(),
            std::move(rerun))),
        scope_(recomputation_.get()) {}

  void finish(const Tensors& outputs) {
    const auto now = versions_of(inputs_);
    for (size_t i = 0; i < now.size(); ++i) {
      TORCH_CHECK(now[i] == versions_[i], "[checkpoint] ", label_of(name_),
                  "the function must not change its inputs in place, or it could not run again on "
                  "what they were; input ",
                  i, " is at version ", now[i], ", expected ", versions_[i],
                  ". Let it work on input.clone()");
    }
    recomputation_->drop_saved(outputs);
    finished_ = true;
  }

  ~Impl() {
    if (!finished_) recomputation_->abandon();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

 private:
  Tensors inputs_;
  std::vector<int64_t> versions_;
  std::string name_;
  bool finished_ = false;
  std::shared_ptr<Recomputation> recomputation_;
  SavedTensorScope scope_;
  PlainScriptScope plain_scripts_;
};

CheckpointRecording::CheckpointRecording(const ActivationCheckpointOptions& options,
                                         const Tensors& inputs,
                                         const std::vector<at::Generator>& generators, Rerun rerun)
    : impl_(std::make_unique<Impl>(options, inputs, generators, std::move(rerun))) {}

CheckpointRecording::~CheckpointRecording() = default;

void CheckpointRecording::finish(const Tensors& outputs) { impl_->finish(outputs); }

}  // namespace detail
}  // namespace tessera
