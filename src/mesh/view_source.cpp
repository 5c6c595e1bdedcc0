#include "mesh/view_source.h"

#include <utility>

#include "mesh/redistribute.h"

namespace tessera {

// [Note: Views that are copies]
//
// A view of a DistTensor mostly is a view of the local part: both share memory, as they should.
// Where a rank needs elements that it does not have (a row of a tensor that is cut by rows), the
// base is placed anew first, and the view shows that copy. To hide this from the program, a write
// to the view is followed by a write to the base, and a read first checks the base's version, which
// autograd increments with each write to the base or to a view of it: they all share one. If it
// differs from the version at which the copy was made, the copy is made again, in place.
namespace {

// Inference tensors have no version; their copies are always made again.
constexpr int64_t kUnknown = -1;

int64_t current(const c10::VariableVersion& version) {
  return version.enabled() ? static_cast<int64_t>(version.current_version()) : kUnknown;
}

c10::intrusive_ptr<const DistMeta> shared_meta(const at::Tensor& tensor) {
  return c10::static_intrusive_pointer_cast<const DistMeta>(
      tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

// The present meta of `tensor`, which is about to change.
c10::intrusive_ptr<const DistMeta> copy_of_meta(const at::Tensor& tensor) {
  const DistMeta& meta = *find_dist_meta(tensor);
  return c10::make_intrusive<DistMeta>(meta.local, meta.spec, meta.source, meta.parameter);
}

}  // namespace

void write_part(const DistMeta& meta, at::IntArrayRef sizes, const at::Tensor& part,
                const DistSpec& spec, std::string_view subject) {
  meta.local.copy_(convert(part, spec, meta.spec->placements, sizes, subject));
  wrote_to(meta);
}

ViewSource::ViewSource(const at::Tensor& base, c10::intrusive_ptr<const DistMeta> meta,
                       DistSpecPtr spec, at::Tensor copy, at::IntArrayRef placed_sizes)
    : base_(std::move(meta)),
      sizes_(base.sizes().vec()),
      placed_sizes_(placed_sizes.vec()),
      spec_(std::move(spec)),
      copy_(std::move(copy)),
      version_(base.unsafeGetTensorImpl()->version_counter()),
      seen_(current(version_)) {}

ViewSource::ViewSource(const at::Tensor& base, DistSpecPtr spec, at::Tensor copy,
                       at::IntArrayRef placed_sizes)
    : ViewSource(base, shared_meta(base), std::move(spec), std::move(copy), placed_sizes) {}

ViewSource::ViewSource(const at::Tensor& tensor, DistSpecPtr spec, at::Tensor copy)
    : ViewSource(tensor, copy_of_meta(tensor), std::move(spec), copy, copy.sizes()) {}

void ViewSource::refresh() {
  const int64_t now = current(version_);
  if (now == seen_ && now != kUnknown) return;
  const at::Tensor& base = local_part(*base_);
  const at::Tensor placed =
      convert(base, *base_->spec, spec_->placements, sizes_, "view of a DistTensor");
  copy_.copy_(placed.reshape(copy_.sizes()));
  seen_ = now;
}

void ViewSource::write_back() {
  const at::Tensor placed = copy_.reshape(placed_sizes_);
  write_part(*base_, sizes_, placed, *spec_, "view of a DistTensor");
  // Autograd counts the write only after the operator has returned.
  if (seen_ != kUnknown) seen_ = current(version_) + 1;
}

}  // namespace tessera
