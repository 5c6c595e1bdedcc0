#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>

namespace torch {
namespace nn {
class Module;
}
}  // namespace torch

namespace tessera {

/// While an instance lives, large tensors that this thread makes get no lasting memory: instead,
/// the operators that make their values are recorded. So a model that fits on no rank can be built
/// and sharded:
///
/// ```cpp
/// auto model = [] {
///   tessera::DeferredInit scope;
///   return std::make_shared<Gpt>(options);
/// }();
/// auto sharded = tessera::fully_shard(model);  // makes the values unit by unit
/// ```
///
/// Values, errors and the state of the random generator are bit-identical to those of a model built
/// without it. A deferred tensor that an operator uses after the scope gets its values then,
/// permanently, so a model that is never sharded works, too; code that reads memory by `data_ptr()`
/// must call `materialize()` first.
///
/// Guards nest, and must end on the thread that made them. Call `fully_shard()` outside the scope.
///
/// **Memory**: in the scope, that of the largest tensor. Tensors below 16 KiB keep their memory,
/// and so do those whose values do not come from one operator each (`orthogonal_()`,
/// `torch::tensor()`). Calls `use_page_heap()`, because malloc's heap retains much of the memory
/// that is freed.
class TESSERA_API DeferredInit {
 public:
  DeferredInit();
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;
};

/// Returns true if `tensor` has no values yet, only the record of how to make them.
TESSERA_API bool is_deferred(const at::Tensor& tensor);

/// Makes the values of a deferred tensor, and of all tensors that share its memory, permanently.
/// Does nothing to other tensors. May be called by several threads at the same time.
TESSERA_API void materialize(const at::Tensor& tensor);
/// Does the same for all parameters and buffers of `module`.
TESSERA_API void materialize(const torch::nn::Module& module);
template <class Holder>
requires requires(const Holder& holder) { typename Holder::ContainedType; }
void materialize(const Holder& holder) { materialize(*holder.ptr()); }

}  // namespace tessera
