#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

namespace tessera {

/// What is remembered of the tensors that were made in an `OriginScope`: an object of its caller.
class Origin {
 public:
  virtual ~Origin() = default;
  /// `tensor` was made and remembers this. Called in the scope.
  virtual void on_made(const at::Tensor& tensor) const {}
};

/// While one lives, tensors that operators make on this thread remember where they come from, the
/// views of them, too. The innermost scope counts. It does not matter whether they are deferred.
/// A tensor forgets it when it is given other data (`set_data`, `Module::to`).
class OriginScope {
 public:
  explicit OriginScope(std::shared_ptr<const Origin> origin);
  ~OriginScope();
  OriginScope(const OriginScope&) = delete;
  OriginScope& operator=(const OriginScope&) = delete;

  /// The thread's innermost origin, or null.
  static const std::shared_ptr<const Origin>& current();

 private:
  std::shared_ptr<const Origin> outer_;
  c10::impl::IncludeDispatchKeyGuard seen_;  // by the fallback, which marks
};

/// What `tensor` remembers; null if it was made in no scope.
std::shared_ptr<const Origin> origin_of(const at::Tensor& tensor);

/// Makes the tensors among `results` remember the current origin, if there is one and they have
/// none.
void mark_origin(c10::ArrayRef<c10::IValue> results);

}  // namespace tessera
