#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/collective.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "comm/group/collective.h"

namespace tessera {

/// The properties of a collective on which ranks must agree: its kind, subject and channel, and the
/// data exchanged. Ranks whose fingerprints differ must not read each other's tensors.
class CollectiveForm {
 public:
  CollectiveForm(std::string_view collective, const CollectiveTag& tag);

  /// Adds the number and dtype of the elements exchanged.
  CollectiveForm& elements(int64_t numel, at::ScalarType dtype);
  /// Adds the split of the elements over the ranks.
  CollectiveForm& cut(std::span<const int64_t> bounds);
  CollectiveForm& pieces(std::span<const Piece> pieces);
  CollectiveForm& op(ReduceOp op);
  CollectiveForm& root(int root);
  CollectiveForm& encoding(Encoding encoding);
  /// Adds a property that `text()` does not show.
  CollectiveForm& mix(int64_t value);
  CollectiveForm& mix(std::string_view text);

  uint64_t fingerprint() const { return hash_; }
  /// Returns the bytes of the elements exchanged.
  int64_t nbytes() const {
    return std::max<int64_t>(numel_, 0) * static_cast<int64_t>(c10::elementSize(dtype_));
  }

  /// Returns the tag for messages of the collective with number `sequence` in its channel, or of
  /// one `part` of it. Ranks that disagree use different tags, so they time out waiting for each
  /// other instead of receiving one tensor into another.
  int message_tag(int64_t sequence, int64_t part = 0) const;

  /// Returns, for example, "all_reduce of unit 'blocks.3': 100 elements of Float, max".
  std::string text() const;

 private:
  static constexpr size_t kPartsTold = 4;

  std::string collective_, subject_;
  uint64_t identity_;
  int64_t numel_ = -1;
  at::ScalarType dtype_ = at::kFloat;
  size_t parts_ = 0;
  std::array<int64_t, kPartsTold> first_parts_{};
  std::optional<size_t> pieces_;
  std::optional<ReduceOp> op_;
  std::optional<int> root_;
  Encoding encoding_ = Encoding::kPlain;
  uint64_t hash_ = 0xCBF29CE484222325ull;
};

/// Returns the form of a collective. It excludes the messages of an all-to-all, on each of which
/// only two ranks agree; a barrier has none.
template <class Call>
CollectiveForm form_of(const Call& call, const CollectiveTag& tag) {
  CollectiveForm form(Call::kName, tag);
  if constexpr (requires { call.tensor; })
    form.elements(call.tensor.numel(), call.tensor.scalar_type());
  if constexpr (requires { call.bounds; })
    form.elements(call.bounds.back(), call.dtype()).cut(call.bounds);
  if constexpr (requires { call.pieces; }) form.pieces(call.pieces);
  if constexpr (requires { call.op; }) form.op(call.op);
  if constexpr (requires { call.root; }) form.root(call.root);
  if constexpr (requires { call.options; }) {
    if (call.options.gather_into.defined()) form.mix("gathered");
  }
  form.encoding(encoding_of(call));
  return form;
}

}  // namespace tessera
