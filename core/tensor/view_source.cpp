#include "tensor/view_source.h"

#include <utility>

#include "tensor/redistribute.h"

namespace tessera {

// [Note: Views that are copies]
//
// A view of a DistTensor mostly is a view of the local part: both share memory, as they should.
// Where a rank needs elements that it does not have (a row of a tensor that is cut by rows), the
// base is placed anew first, and the view shows that copy. To hide this from the program, a write
// to the view is followed by a write to the base, and a read first checks the common count of
// writes to the base and to its views. If it differs from the number at which the copy was made,
// the copy is made again, in place. Autograd's versions would not do: writes through `x.data` don't
// increment that of `x`, and inference tensors have none.
namespace {

c10::intrusive_ptr<const DistMeta> shared_meta(const at::Tensor& tensor) {
  return c10::static_intrusive_pointer_cast<const DistMeta>(
      tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

// Returns a copy of the meta of `tensor`; the tensor is about to change.
c10::intrusive_ptr<const DistMeta> copy_of_meta(const at::Tensor& tensor) {
  const DistMeta& meta = *find_dist_meta(tensor);
  auto copy = c10::make_intrusive<DistMeta>(meta.local, meta.spec, meta.source, meta.parameter);
  copy->writes = meta.writes;
  copy->identity = meta.identity;
  return copy;
}

void copy_part(const DistMeta& meta, at::IntArrayRef sizes, const at::Tensor& part,
               const DistSpec& spec, std::string_view subject) {
  meta.local.copy_(convert(part, spec, meta.spec->placements, sizes, {subject, meta.identity}));
}

// Not the same memory under another name where there is nothing to reshape: the copy may be the
// base's own part, and LibTorch copies a tensor to itself, but not to another one that shows the
// same elements.
at::Tensor reshaped(const at::Tensor& tensor, at::IntArrayRef sizes) {
  return tensor.sizes() == sizes ? tensor : tensor.reshape(sizes);
}

}  // namespace

void write_part(const DistMeta& meta, at::IntArrayRef sizes, const at::Tensor& part,
                const DistSpec& spec, std::string_view subject) {
  copy_part(meta, sizes, part, spec, subject);
  wrote_to(meta);
}

ViewSource::ViewSource(const at::Tensor& base, c10::intrusive_ptr<const DistMeta> meta,
                       DistSpecPtr spec, at::Tensor copy, at::IntArrayRef placed_sizes)
    : base_(std::move(meta)),
      sizes_(base.sizes().vec()),
      placed_sizes_(placed_sizes.vec()),
      spec_(std::move(spec)),
      copy_(std::move(copy)),
      seen_(writes()) {}

ViewSource::ViewSource(const at::Tensor& base, DistSpecPtr spec, at::Tensor copy,
                       at::IntArrayRef placed_sizes)
    : ViewSource(base, shared_meta(base), std::move(spec), std::move(copy), placed_sizes) {}

ViewSource::ViewSource(const at::Tensor& tensor, DistSpecPtr spec, at::Tensor copy)
    : ViewSource(tensor, copy_of_meta(tensor), std::move(spec), copy, copy.sizes()) {}

uint32_t ViewSource::writes() const {
  return base_->writes.enabled() ? base_->writes.current_version() : 0;
}

void ViewSource::refresh() {
  const uint32_t now = writes();
  if (now == seen_) return;
  const at::Tensor& base = local_part(*base_);
  const at::Tensor placed = convert(base, *base_->spec, spec_->placements, sizes_,
                                    {"view of a DistTensor", base_->identity});
  copy_.copy_(reshaped(placed, copy_.sizes()));
  seen_ = now;
}

void ViewSource::write_back() {
  copy_part(*base_, sizes_, reshaped(copy_, placed_sizes_), *spec_, "view of a DistTensor");
  show_write(*base_);
  seen_ = writes();
}

}  // namespace tessera
