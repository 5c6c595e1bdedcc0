#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>

namespace torch {
namespace nn {
class Module;
}
}  // namespace torch

namespace tessera {

/// While it lives, large tensors that this thread makes get no lasting memory: how their values are
/// made is recorded instead. So a model that fits on no rank can be built, and sharded:
///
/// ```cpp
/// auto model = [] {
///   tessera::DeferredInit scope;
///   return std::make_shared<Gpt>(options);
/// }();
/// auto sharded = tessera::fully_shard(model);  // makes the values unit by unit
/// ```
///
/// Values, errors and the state of the random generator are bit for bit those of a model that was
/// built without it. A deferred tensor that an operator uses after the scope gets its values then,
/// for good, so a model that nobody shards works, too; code that reads memory by `data_ptr()` calls
/// `materialize()` first.
///
/// Guards nest, and end on the thread that made them. `fully_shard()` must be called outside.
///
/// **Memory**: in the scope that of the largest tensor; what stays are tensors below 16 KiB, and
/// those whose values are not made by an operator each (`orthogonal_()`, `torch::tensor()`). Calls
/// `use_page_heap()`: malloc's heap keeps much of what is dropped.
class TESSERA_API DeferredInit {
 public:
  DeferredInit();
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;
};

/// True if `tensor` has no values yet, only the record of how they are made.
TESSERA_API bool is_deferred(const at::Tensor& tensor);

/// Gives a deferred tensor, and all that share its memory, their values for good. Does nothing to
/// other tensors. Threads may call it at the same time.
TESSERA_API void materialize(const at::Tensor& tensor);
/// The same for all parameters and buffers of `module`.
TESSERA_API void materialize(const torch::nn::Module& module);
template <class Holder>
requires requires(const Holder& holder) { typename Holder::ContainedType; }
void materialize(const Holder& holder) { materialize(*holder.ptr()); }

}  // namespace tessera
