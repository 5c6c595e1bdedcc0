#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/init/deferred_init.h>
#include <tessera/parallel/distribute_module.h>
#include <torch/nn/module.h>

#include <set>
#include <string_view>
#include <utility>

#include "engine/unit/agreement.h"
#include "engine/unit/unit_storage.h"
#include "init/deferred_storage.h"
#include "init/recorder.h"
#include "tensor/dist_meta.h"
#include "tensor/shard_mesh.h"

namespace tessera {
namespace {

thread_local const std::set<const c10::TensorImpl*>* being_placed = nullptr;

// The distinct parameters and buffers of `module`; `recurse`: also those of its submodules.
std::vector<NamedTensor> tensors_of(const torch::nn::Module& module, bool recurse) {
  std::vector<NamedTensor> tensors;
  std::set<const c10::TensorImpl*> seen;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second)
      tensors.push_back({name, tensor});
  };
  for (const auto& item : module.named_parameters(recurse)) add(item.key(), item.value());
  for (const auto& item : module.named_buffers(recurse)) add(item.key(), item.value());
  return tensors;
}

// The former state of a module's tensors, from which it can be restored. Their memory is kept;
// deferred tensors still have none.
class Before {
 public:
  explicit Before(std::vector<NamedTensor> tensors) : tensors_(std::move(tensors)) {
    for (const NamedTensor& item : tensors_) {
      kept_.push_back(
          {copy_of_handle(item.tensor), item.tensor.grad(), item.tensor.requires_grad()});
      impls_.insert(item.tensor.unsafeGetTensorImpl());
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
      kept_[i].handles = tensors_[i].tensor.use_count();
      kept_[i].place = find_dist_meta(tensors_[i].tensor);
    }
  }

  // Throws if the module has lost a handle of a tensor that it still has registered, other than by
  // placing the tensor: the member that was this handle now refers to another tensor. C++ has no
  // way to look at the member itself.
  void check_members(const torch::nn::Module& module) const {
    std::set<const c10::TensorImpl*> registered;
    for (const NamedTensor& item : tensors_of(module, true))
      registered.insert(item.tensor.unsafeGetTensorImpl());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto& [name, tensor] = tensors_[i];
      const bool is_lost = tensor.use_count() < kept_[i].handles &&
                           find_dist_meta(tensor) == kept_[i].place &&
                           registered.contains(tensor.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(
          !is_lost,
          "[distribute_module] a partition (shard_fn) must place tensors in place, by "
          "distribute_(linear->weight, mesh, placements) or its dialect's shard_tensor(); it "
          "assigned another tensor to the member that was '",
          name,
          "', so the module would compute with a tensor that its parameters() and buffers() don't "
          "have. Build the module anew: its member keeps that tensor");
    }
  }

  void restore() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[i].tensor.set_data(kept_[i].data);
      tensors_[i].tensor.set_requires_grad(kept_[i].requires_grad);
      tensors_[i].tensor.mutable_grad() = kept_[i].grad;
    }
  }

  const std::set<const c10::TensorImpl*>& impls() const { return impls_; }

 private:
  struct Kept {
    at::Tensor data, grad;
    bool requires_grad = false;
    size_t handles = 0;
    const DistMeta* place = nullptr;
  };

  static at::Tensor copy_of_handle(const at::Tensor& tensor) {
    const DeferredStorage* const storage = deferred_storage(tensor);
    if (!storage || !storage->is_deferred()) return tensor.detach();
    return make_deferred(tensor, c10::make_intrusive<DeferredStorage>(storage->recipe()));
  }

  std::vector<NamedTensor> tensors_;
  std::vector<Kept> kept_;
  std::set<const c10::TensorImpl*> impls_;
};

void run_partition(torch::nn::Module& root, const DeviceMesh& mesh, const PartitionFn& partition) {
  std::set<const torch::nn::Module*> seen{&root};
  partition("", root, mesh);
  // A partition may add modules: the list is made after the root's partition has run.
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    if (seen.insert(item.value().get()).second) partition(item.key(), *item.value(), mesh);
  }
}

void place_all(torch::nn::Module& root, const DeviceMesh& mesh, const PartitionFn& partition,
               const Before& before) {
  if (partition) run_partition(root, mesh, partition);
  before.check_members(root);
  for (const NamedTensor& item : tensors_of(root, true)) {
    at::Tensor tensor = item.tensor;
    if (!is_dist(tensor)) distribute_(tensor, mesh, {});
  }
}

// One line for each tensor; the lines must be the same on all ranks.
std::vector<std::string> describe_all(const torch::nn::Module& module) {
  std::vector<std::string> lines;
  for (const NamedTensor& item : tensors_of(module, true))
    lines.push_back(fmt::format(
        "'{}' of sizes [{}] as {} on {}{}", item.name, fmt::join(item.tensor.sizes(), ", "),
        to_string(placements_of(item.tensor)), mesh_of(item.tensor).to_string(),
        item.tensor.requires_grad() ? "" : ", frozen"));
  return lines;
}

// Names the tensors, so that errors can tell which parameter an operator had.
void name_tensors(const torch::nn::Module& module) {
  at::NoGradGuard no_grad;
  for (const NamedTensor& item : tensors_of(module, true)) {
    const DistMeta& meta = dist_meta("distribute_module", item.tensor);
    if (meta.parameter && meta.parameter->name == item.name) continue;
    DistParameter parameter = meta.parameter ? *meta.parameter : DistParameter();
    parameter.name = item.name;
    item.tensor.set_data(make_dist(meta.local, meta.spec, item.tensor.sizes(),
                                   item.tensor.strides(),
                                   std::make_shared<const DistParameter>(std::move(parameter))));
  }
}

}  // namespace

void check_same_values(const std::vector<NamedTensor>& tensors, const DeviceMesh& mesh) {
  at::NoGradGuard no_grad;
  if (!mesh.is_member()) return;
  std::vector<std::string> lines;
  for (const NamedTensor& item : tensors) {
    // Parts of distributed tensors differ by design.
    if (!is_dist(item.tensor))
      lines.push_back(fmt::format("'{}' with values of hash {}", item.name, hash_of(item.tensor)));
  }
  check_same_lines({mesh.process_group(), nullptr}, lines,
                   "[check_same_values] tensors must have the same values on all ranks");
}

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh,
                       const PartitionFn& partition, const DistributeOptions& options) {
  TORCH_CHECK(!in_deferred_init(),
              "[distribute_module] must be called after the DeferredInit scope, not in it");
  const auto tensors = tensors_of(module, true);
  for (const NamedTensor& item : tensors)
    TORCH_CHECK_VALUE(!unit_of(item.tensor), "[distribute_module] must come before fully_shard; '",
                      item.name, "' is sharded by it already");
  if (options.check_values) check_same_values(tensors, mesh);
  const Before before(tensors);
  const auto run = [&] {
    const auto outer = std::exchange(being_placed, &before.impls());
    const auto restore = c10::make_scope_exit([&] { being_placed = outer; });
    place_all(module, mesh, partition, before);
  };
  try {
    if (mesh.is_member()) {
      const ShardMesh ranks(mesh.process_group(), nullptr);
      check_on_all_ranks(ranks, run, "distribute_module");
      check_same_lines(ranks, describe_all(module),
                       "[distribute_module] all ranks must place the tensors alike");
    } else {
      run();
    }
  } catch (...) {
    before.restore();
    throw;
  }
  name_tensors(module);
}

bool detail::is_being_placed(const at::Tensor& tensor) {
  return being_placed && being_placed->contains(tensor.unsafeGetTensorImpl());
}

std::vector<at::Tensor> detail::call_hook(const char* which, const ForwardHook& hook,
                                          std::vector<at::Tensor> tensors, const DeviceMesh& mesh) {
  const size_t count = tensors.size();
  auto changed = hook(std::move(tensors), mesh).tensors;
  TORCH_CHECK_VALUE(changed.size() == count, "[distribute_module] ", which,
                    " must return as many tensors as it was given; expected ", count, ", got ",
                    changed.size());
  return changed;
}

at::Tensor detail::as_input(const at::Tensor& tensor, const DeviceMesh& mesh) {
  const bool is_plain = tensor.defined() && tensor.requires_grad() && !is_dist(tensor);
  // A leaf: its gradient must reach it.
  return is_plain ? distribute(tensor.view_as(tensor), mesh, {}) : tensor;
}

void detail::refuse_unwrapped() {
  TORCH_CHECK(false,
              "[DistModule] the module was unwrapped: its tensors are ordinary ones again; call "
              "the module itself");
}

void detail::refuse_output() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "[distribute_module] output_fn needs a forward that returns a tensor, or a tuple or vector "
      "of tensors; change the output after the call in its place");
}

}  // namespace tessera
