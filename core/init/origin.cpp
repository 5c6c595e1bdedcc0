#include "init/origin.h"

#include <c10/core/TensorImpl.h>

#include <utility>

#include "base/dispatch/each_tensor.h"
#include "base/dispatch/unit_key.h"

namespace tessera {
namespace {

thread_local std::shared_ptr<const Origin> current_origin;

// LibTorch passes it along with a tensor's sizes, and reads it for other devices only.
struct OriginMark final : c10::BackendMeta {
  explicit OriginMark(std::shared_ptr<const Origin> of) : origin(std::move(of)) {}
  std::shared_ptr<const Origin> origin;
};

const OriginMark* mark_of(const at::Tensor& tensor) {
  return tensor.defined()
             ? dynamic_cast<const OriginMark*>(tensor.unsafeGetTensorImpl()->get_backend_meta())
             : nullptr;
}

}  // namespace

OriginScope::OriginScope(std::shared_ptr<const Origin> origin)
    : outer_(std::exchange(current_origin, std::move(origin))), seen_(kUnitKey) {}

OriginScope::~OriginScope() { current_origin = std::move(outer_); }

const std::shared_ptr<const Origin>& OriginScope::current() { return current_origin; }

std::shared_ptr<const Origin> origin_of(const at::Tensor& tensor) {
  const OriginMark* mark = mark_of(tensor);
  return mark ? mark->origin : nullptr;
}

void mark_origin(c10::ArrayRef<c10::IValue> results) {
  if (!current_origin) return;
  for (const c10::IValue& result : results) {
    each_tensor(result, [](const at::Tensor& tensor) {
      c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      const OriginMark* const mark = mark_of(tensor);  // a view has that of its base
      // Metadata that another library has set is left alone.
      if (impl.get_backend_meta() && !mark) return;
      if (!mark) impl.set_backend_meta(c10::make_intrusive<OriginMark>(current_origin));
      if (!mark || mark->origin == current_origin) current_origin->on_made(tensor);
    });
  }
}

}  // namespace tessera
