#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "tensor/dist_meta.h"
#include "tensor/identity.h"

namespace tessera {

/// The base of a view that had to be backed by a copy: the local part of the view could not share
/// the memory of its base's local part, because the base had to be placed or laid out anew. Shared
/// by all views of that copy. See [Note: Views that are copies] in mesh/view_source.cpp.
class ViewSource {
 public:
  /// `copy` has the values of `base`, placed as `spec` says; `placed_sizes` are its sizes before it
  /// was reshaped.
  ViewSource(const at::Tensor& base, DistSpecPtr spec, at::Tensor copy,
             at::IntArrayRef placed_sizes);
  /// Makes a tensor itself show `copy` from now on: its values, placed as `spec` says.
  ViewSource(const at::Tensor& tensor, DistSpecPtr spec, at::Tensor copy);

  /// Must be called before a view is read: copies again if the base has been written to since.
  /// Collective over the mesh.
  void refresh();
  /// Must be called after a write to a view: writes the values to the base. Collective over the
  /// mesh.
  void write_back();

 private:
  ViewSource(const at::Tensor& base, c10::intrusive_ptr<const DistMeta> meta, DistSpecPtr spec,
             at::Tensor copy, at::IntArrayRef placed_sizes);
  uint32_t writes() const;

  const c10::intrusive_ptr<const DistMeta> base_;
  const std::vector<int64_t> sizes_, placed_sizes_;
  const DistSpecPtr spec_;
  const at::Tensor copy_;
  uint32_t seen_;
};

/// Returns the local part of a DistTensor; if it is a copy, with the current values of its base.
inline const at::Tensor& local_part(const DistMeta& meta) {
  if (meta.source) meta.source->refresh();
  return meta.local;
}

/// Writes the values of `part`, placed as `spec` says on the same mesh, to a DistTensor of these
/// global sizes. Collective over the mesh.
void write_part(const DistMeta& meta, at::IntArrayRef sizes, const at::Tensor& part,
                const DistSpec& spec, std::string_view subject);

/// Lets tensors that show the memory of `meta.local` see what was written to it.
inline void show_write(const DistMeta& meta) {
  if (meta.source) {
    meta.source->write_back();
  } else if (meta.writes.enabled()) {
    c10::VariableVersion(meta.writes).bump();
  }
}

/// Must be called after an operator wrote to `meta.local`. Bases of a view keep their identities:
/// it is a copy on some ranks, and on others it is not.
inline void wrote_to(const DistMeta& meta) {
  meta.identity = next_identity(*meta.spec, meta.parameter.get());
  show_write(meta);
}

}  // namespace tessera
