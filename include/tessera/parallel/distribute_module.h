#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/export.h>
#include <tessera/tensor/device_mesh.h>
#include <tessera/tensor/dist_tensor.h>
#include <tessera/tensor/nested_tensors.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// Places the parameters and buffers that `module` itself holds, by `distribute_()`. `name` is the
/// module's dotted name in the model, empty for the root.
using PartitionFn =
    std::function<void(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh)>;

/// One tensor, or several in order.
struct TensorList {
  TensorList(at::Tensor tensor) : tensors{std::move(tensor)} {}
  TensorList(std::vector<at::Tensor> list) : tensors(std::move(list)) {}
  std::vector<at::Tensor> tensors;
};

/// Replaces the inputs of a forward, or its outputs; must return as many tensors as it is given.
using ForwardHook =
    std::function<TensorList(std::vector<at::Tensor> tensors, const DeviceMesh& mesh)>;

struct DistributeOptions {
  /// Compares the values of all parameters and buffers over the ranks first: if they differ, so
  /// would the parts. Reads the whole model, and sends a few bytes for each tensor.
  bool check_values = false;
};

/// Turns all parameters and buffers of `module` into DistTensors on `mesh`, in place. Those that
/// `partition` does not place are replicated.
///
/// Calls `partition` once for each module, parents before their children, in the order of
/// registration. The module's members see the result, since tensors are changed and not replaced.
/// Tensors that are DistTensors already are not changed, so a second call places new tensors only.
/// Values must be equal on all ranks; those of a deferred model are made tensor by tensor.
///
/// Collective over `mesh`: the ranks compare the resulting placements. If `partition` throws on one
/// of them, or places a tensor differently on one, every rank throws, naming the rank, and the
/// module is unchanged. Ranks that are not in `mesh` may call it; they compare nothing.
/// **Memory**: until it returns, that of the whole model and of this rank's parts.
TESSERA_API void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh,
                                   const PartitionFn& partition = {},
                                   const DistributeOptions& options = {});

/// Throws `c10::ValueError` on all ranks of `mesh`, naming ranks and tensor, unless the values of
/// the tensors are equal on all of them. Skips DistTensors. Collective.
TESSERA_API void check_same_values(const std::vector<NamedTensor>& tensors, const DeviceMesh& mesh);

/// Turns all parameters and buffers of `module` back into ordinary tensors with memory of their own
/// and the full values, after `fully_shard()`, `distribute_module()` or `distribute_()`. Names,
/// identity and `requires_grad` stay; gradients are dropped.
///
/// Collective over the ranks that have parts. **Memory**: that of the whole model. **Throws**
/// `c10::ValueError`, and changes nothing, if no tensor of the module is sharded or distributed, or
/// if one is on a mesh without this rank; also throws as `ShardedModule::unwrap()` does.
TESSERA_API void unwrap(torch::nn::Module& module);

namespace detail {

/// Returns true if a `PartitionFn` runs on this thread and may place `tensor`.
TESSERA_API bool is_being_placed(const at::Tensor& tensor);

TESSERA_API std::vector<at::Tensor> call_hook(const char* which, const ForwardHook& hook,
                                              std::vector<at::Tensor> tensors,
                                              const DeviceMesh& mesh);
/// Returns a tensor that requires a gradient as a replicated DistTensor, and others as they are.
TESSERA_API at::Tensor as_input(const at::Tensor& tensor, const DeviceMesh& mesh);
[[noreturn]] TESSERA_API void refuse_output();
[[noreturn]] TESSERA_API void refuse_unwrapped();

/// True for a tensor, and for a tuple or vector of tensors alone.
template <class T>
struct IsTensors : std::is_same<T, at::Tensor> {};
template <>
struct IsTensors<std::vector<at::Tensor>> : std::true_type {};
template <size_t n>
struct IsTensors<std::array<at::Tensor, n>> : std::true_type {};
template <>
struct IsTensors<std::pair<at::Tensor, at::Tensor>> : std::true_type {};
template <class... T>
struct IsTensors<std::tuple<T...>> : std::conjunction<std::is_same<T, at::Tensor>...> {};

template <class R>
R change_output(R output, const ForwardHook& hook, const DeviceMesh& mesh) {
  if constexpr (!IsTensors<R>::value) refuse_output();
  std::vector<at::Tensor> list;
  replace_tensors(output, [&](const at::Tensor& tensor) { return list.emplace_back(tensor); });
  list = call_hook("output_fn", hook, std::move(list), mesh);
  size_t next = 0;
  replace_tensors(output, [&](const at::Tensor&) { return list[next++]; });
  return output;
}

}  // namespace detail

/// A handle of a module on DistTensors that calls hooks around the module's forward.
///
/// C++ modules have no hooks: `input_fn` and `output_fn` take effect when the model is called
/// through this handle (`model(x)`, `model.forward(x)`), and not when a module calls another one.
/// Without them the module can be called directly just as well.
///
/// `input_fn` gets the tensors among the arguments, in order; other arguments are passed on as they
/// are. A tensor that requires a gradient is replicated first; operators accept the others as they
/// are. `output_fn` gets the tensor, or the tensors of the tuple or vector, that forward returns;
/// any other result throws `c10::NotImplementedError`.
template <class M>
class DistModule {
 public:
  DistModule(std::shared_ptr<M> module, DeviceMesh mesh, ForwardHook input_fn,
             ForwardHook output_fn)
      : module_(std::move(module)),
        mesh_(std::move(mesh)),
        input_fn_(std::move(input_fn)),
        output_fn_(std::move(output_fn)) {}

  M* operator->() const { return module_.get(); }
  M& operator*() const { return *module_; }
  const std::shared_ptr<M>& ptr() const { return module_; }
  const DeviceMesh& mesh() const { return mesh_; }

  /// See `tessera::unwrap()`. Afterwards the module is an ordinary one, and calls of this handle
  /// throw.
  void unwrap() {
    tessera::unwrap(*module_);
    is_unwrapped_ = true;
  }

  template <class... Args>
  auto forward(Args&&... args) {
    if (is_unwrapped_) detail::refuse_unwrapped();
    std::vector<at::Tensor> tensors;
    (collect(tensors, args), ...);
    if (input_fn_) tensors = detail::call_hook("input_fn", input_fn_, std::move(tensors), mesh_);
    size_t next = 0;
    // Braces guarantee that the arguments are evaluated in order.
    std::tuple<decltype(replace(std::forward<Args>(args), tensors, next))...> changed{
        replace(std::forward<Args>(args), tensors, next)...};
    auto output = std::apply(
        [&](auto&&... items) { return module_->forward(std::forward<decltype(items)>(items)...); },
        std::move(changed));
    if (!output_fn_) return output;
    return detail::change_output(std::move(output), output_fn_, mesh_);
  }
  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

 private:
  template <class T>
  static constexpr bool is_tensor = std::is_same_v<std::remove_cvref_t<T>, at::Tensor>;

  template <class T>
  void collect(std::vector<at::Tensor>& tensors, const T& argument) const {
    if constexpr (is_tensor<T>) tensors.push_back(detail::as_input(argument, mesh_));
  }
  template <class T>
  static decltype(auto) replace(T&& argument, const std::vector<at::Tensor>& tensors,
                                size_t& next) {
    if constexpr (is_tensor<T>) {
      return at::Tensor(tensors[next++]);
    } else {
      return std::forward<T>(argument);
    }
  }

  std::shared_ptr<M> module_;
  DeviceMesh mesh_;
  ForwardHook input_fn_, output_fn_;
  bool is_unwrapped_ = false;
};

/// Calls `distribute_module()`, and returns a handle that calls `input_fn` and `output_fn`; either
/// may be empty.
template <class M>
DistModule<M> distribute_module(std::shared_ptr<M> module, const DeviceMesh& mesh,
                                const PartitionFn& partition = {}, ForwardHook input_fn = {},
                                ForwardHook output_fn = {}, const DistributeOptions& options = {}) {
  distribute_module(static_cast<torch::nn::Module&>(*module), mesh, partition, options);
  return {std::move(module), mesh, std::move(input_fn), std::move(output_fn)};
}
template <detail::ModuleHolder Holder>
auto distribute_module(const Holder& holder, const DeviceMesh& mesh,
                       const PartitionFn& partition = {}, ForwardHook input_fn = {},
                       ForwardHook output_fn = {}, const DistributeOptions& options = {}) {
  return distribute_module(holder.ptr(), mesh, partition, std::move(input_fn), std::move(output_fn),
                           options);
}

}  // namespace tessera
