#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "mesh/dist_meta.h"

namespace tessera {

/// What a view was made of whose local part could not show the memory of its base's local part,
/// because the base had to be placed or laid out anew. Shared by all views that show that copy.
/// See [Note: Views that are copies] in mesh/view_source.cpp.
class ViewSource {
 public:
  /// `copy` has the values of `base` placed as `spec` says, and `placed_sizes` before it was given
  /// other sizes.
  ViewSource(const at::Tensor& base, DistSpecPtr spec, at::Tensor copy,
             at::IntArrayRef placed_sizes);
  /// Of a tensor itself, which from now on shows `copy`: its values placed as `spec` says.
  ViewSource(const at::Tensor& tensor, DistSpecPtr spec, at::Tensor copy);

  /// To be called before a view is read: takes over what was written to the base since.
  /// Collective over the mesh.
  void refresh();
  /// To be called after a write to a view: the base gets it. Collective over the mesh.
  void write_back();

 private:
  const c10::intrusive_ptr<const DistMeta> base_;
  const std::vector<int64_t> sizes_, placed_sizes_;
  const DistSpecPtr spec_;
  const at::Tensor copy_;
  const c10::VariableVersion version_;
  int64_t seen_;
};

/// The local part of a DistTensor; if it is a copy, with the values that its base has now.
inline const at::Tensor& local_part(const DistMeta& meta) {
  if (meta.source) meta.source->refresh();
  return meta.local;
}

/// Gives a DistTensor of these global sizes the values of `part`, which lies as `spec` says on the
/// same mesh. Collective over it.
void write_part(const DistMeta& meta, at::IntArrayRef sizes, const at::Tensor& part,
                const DistSpec& spec, std::string_view subject);

/// To be called after an operator wrote to `meta.local`.
inline void wrote_to(const DistMeta& meta) {
  if (meta.source) meta.source->write_back();
}

}  // namespace tessera
