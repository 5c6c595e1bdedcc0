#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

namespace tessera {

/// An object of the caller of `OriginScope`. Tensors made in the scope remember it.
class Origin {
 public:
  virtual ~Origin() = default;
  /// Called in the scope after `tensor` was made and remembers this object.
  virtual void on_made(const at::Tensor& tensor) const {}
};

/// While a scope lives, tensors that operators make on this thread, and their views, remember its
/// origin, whether they are deferred or not. The innermost scope counts. A tensor forgets its
/// origin when it is given other data (`set_data`, `Module::to`).
class OriginScope {
 public:
  explicit OriginScope(std::shared_ptr<const Origin> origin);
  ~OriginScope();
  OriginScope(const OriginScope&) = delete;
  OriginScope& operator=(const OriginScope&) = delete;

  /// Returns the thread's innermost origin, or null.
  static const std::shared_ptr<const Origin>& current();

 private:
  std::shared_ptr<const Origin> outer_;
  c10::impl::IncludeDispatchKeyGuard seen_;  // lets the fallback see operators, to mark tensors
};

/// Returns the origin of `tensor`; null if it was made in no scope.
std::shared_ptr<const Origin> origin_of(const at::Tensor& tensor);

/// Makes the tensors among `results` remember the current origin, if there is one and they have
/// none.
void mark_origin(c10::ArrayRef<c10::IValue> results);

}  // namespace tessera
