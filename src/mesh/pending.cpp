#include "mesh/pending.h"

#include <algorithm>
#include <utility>

#include "mesh/placed.h"
#include "mesh/view_source.h"

namespace tessera {
namespace {

thread_local bool keeps_terms = false;

DistMeta* meta_of(const at::Tensor& tensor) {
  if (!find_dist_meta(tensor)) return nullptr;
  return static_cast<DistMeta*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

// True if pending reductions are all that changes from one to the other, and they get done.
bool only_reduces(const Placements& from, const Placements& to) {
  if (from == to) return false;
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] != to[i] && (!is_partial(from[i]) || is_partial(to[i]))) return false;
  }
  return true;
}

bool can_reduce(const DistMeta& meta, const at::Tensor& tensor, const DistSpec& wanted) {
  if (keeps_terms || !meta.reduces_once) return false;
  // A copy follows its base by the version, which inference tensors don't have.
  if (meta.is_shown && !tensor.unsafeGetTensorImpl()->version_counter().enabled()) return false;
  return only_reduces(meta.spec->placements, wanted.placements);
}

}  // namespace

at::Tensor placed_argument(const at::Tensor& tensor, const DistSpecPtr& wanted,
                           std::string_view subject) {
  const at::Tensor part = placed(tensor, *wanted, subject);
  DistMeta* const meta = meta_of(tensor);
  if (!meta || !can_reduce(*meta, tensor, *wanted)) return part;
  if (meta->is_shown) meta->source = std::make_shared<ViewSource>(tensor, wanted, part);
  meta->reduce_to(part, wanted);
  return part;
}

void note_placed_argument(const at::Tensor& tensor, const DistSpecPtr& wanted) {
  DistMeta* const meta = meta_of(tensor);
  if (meta && can_reduce(*meta, tensor, *wanted)) meta->reduce_to(meta->local, wanted);
}

void reduce_once(const at::Tensor& made) {
  DistMeta* const meta = meta_of(made);
  meta->reduces_once = std::ranges::any_of(meta->spec->placements, is_partial);
}

void reduce_once(const at::Tensor& view, const at::Tensor& base) {
  DistMeta *const meta = meta_of(view), *const shown = meta_of(base);
  if (!shown) return;
  shown->is_shown = meta->is_shown = true;
  meta->reduces_once = shown->reduces_once;
}

KeepTerms::KeepTerms() : before_(std::exchange(keeps_terms, true)) {}
KeepTerms::~KeepTerms() { keeps_terms = before_; }

}  // namespace tessera
