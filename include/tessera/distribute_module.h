#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/device_mesh.h>
#include <tessera/dist_tensor.h>
#include <tessera/export.h>
#include <tessera/fully_shard.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// Places the parameters and buffers that `module` itself holds, by `distribute_()`. `name` is its
/// dotted name in the model, empty for the root.
using PartitionFn =
    std::function<void(const std::string& name, torch::nn::Module& module, const DeviceMesh& mesh)>;

/// One tensor, or several in order.
struct TensorList {
  TensorList(at::Tensor tensor) : tensors{std::move(tensor)} {}
  TensorList(std::vector<at::Tensor> list) : tensors(std::move(list)) {}
  std::vector<at::Tensor> tensors;
};

/// Changes the tensors that a forward is given, or what it returns; as many as came.
using ForwardHook =
    std::function<TensorList(std::vector<at::Tensor> tensors, const DeviceMesh& mesh)>;

struct DistributeOptions {
  /// Compare the values of all parameters and buffers over the ranks first: where they differ, so
  /// would the parts. Reads the whole model, and sends a few bytes for each tensor.
  bool check_values = false;
};

/// Makes all parameters and buffers of `module` DistTensors on `mesh`, in place: those that
/// `partition` leaves as they are get replicated.
///
/// `partition` is called once for each module, the outer before those in it, in the order of
/// registration. Members see the result, since tensors are changed and not replaced. DistTensors
/// stay what they are, so that a second call places only what is new. Values must be the same on
/// all ranks; a deferred model is made tensor by tensor.
///
/// Collective over `mesh`: the ranks agree on what each has done. If `partition` throws on one of
/// them, or places a tensor otherwise than on another, every rank throws, naming the rank, and the
/// module is as it was. Ranks that are not in `mesh` may call it, and agree with nobody.
/// **Memory**: until it returns, that of the whole model and of this rank's parts.
TESSERA_API void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh,
                                   const PartitionFn& partition = {},
                                   const DistributeOptions& options = {});

/// Throws `c10::ValueError` on all ranks of `mesh`, naming ranks and tensor, unless the tensors
/// have the same values on all of them. Collective.
TESSERA_API void check_same_values(const std::vector<NamedTensor>& tensors, const DeviceMesh& mesh);

/// Makes all parameters and buffers of `module` ordinary tensors with memory of their own, which
/// hold the full values, whatever made them something else: `fully_shard()`, `distribute_module()`
/// or `distribute_()`. Names, identity and `requires_grad` stay; gradients are forgotten.
///
/// Collective over the ranks that have parts. **Memory**: takes that of the whole model. **Throws**
/// `c10::ValueError` if no tensor of the module is sharded or distributed, or one lies on a mesh
/// without this rank, and as `ShardedModule::unwrap()` does; nothing is changed then.
TESSERA_API void unwrap(torch::nn::Module& module);

namespace detail {

/// True while a `PartitionFn` runs on this thread and `tensor` is one that it may place.
TESSERA_API bool is_being_placed(const at::Tensor& tensor);

TESSERA_API std::vector<at::Tensor> call_hook(const char* which, const ForwardHook& hook,
                                              std::vector<at::Tensor> tensors,
                                              const DeviceMesh& mesh);
/// A tensor that requires a gradient as a DistTensor; others as they are.
TESSERA_API at::Tensor as_input(const at::Tensor& tensor, const DeviceMesh& mesh);
[[noreturn]] TESSERA_API void refuse_output();
[[noreturn]] TESSERA_API void refuse_unwrapped();

template <class T>
concept TensorTuple = requires {
  std::tuple_size<T>::value;
};

template <class T>
void add_tensor(std::vector<at::Tensor>& list, const T& item) {
  if constexpr (std::is_same_v<T, at::Tensor>) list.push_back(item);
}
template <class T>
void take_tensor(T& item, const std::vector<at::Tensor>& list, size_t& next) {
  if constexpr (std::is_same_v<T, at::Tensor>) item = list[next++];
}

template <class R>
R change_output(R output, const ForwardHook& hook, const DeviceMesh& mesh) {
  const char* const which = "output_fn";
  if constexpr (std::is_same_v<R, at::Tensor>) {
    return call_hook(which, hook, {std::move(output)}, mesh)[0];
  } else if constexpr (std::is_same_v<R, std::vector<at::Tensor>>) {
    return call_hook(which, hook, std::move(output), mesh);
  } else if constexpr (TensorTuple<R>) {
    const auto all_tensors = [](const auto&... items) {
      return (std::is_same_v<std::decay_t<decltype(items)>, at::Tensor> && ...);
    };
    if (!std::apply(all_tensors, output)) refuse_output();
    std::vector<at::Tensor> list;
    std::apply([&](const auto&... items) { (add_tensor(list, items), ...); }, output);
    list = call_hook(which, hook, std::move(list), mesh);
    size_t next = 0;
    std::apply([&](auto&... items) { (take_tensor(items, list, next), ...); }, output);
    return output;
  } else {
    refuse_output();
  }
}

}  // namespace detail

/// A module on DistTensors with what is done around its forward.
///
/// C++ modules have no hooks: `input_fn` and `output_fn` take effect when the model is called
/// through this handle (`model(x)`, `model.forward(x)`), and not when a module calls another one.
/// Without them the module can be called directly just as well.
///
/// `input_fn` gets the tensors among the arguments, in order; others pass by. A tensor that
/// requires a gradient is replicated first; of those that don't, operators take care. `output_fn`
/// gets the tensor, or the tensors of the tuple or vector, that forward returns; anything else is
/// `c10::NotImplementedError`.
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

  /// See `tessera::unwrap()`. The module is as any other then, and this of no use.
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
    // Braces: the arguments are taken in their order.
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

/// `distribute_module()` and a handle that calls `input_fn` and `output_fn`; either may be empty.
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
