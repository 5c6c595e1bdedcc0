#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collective.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

/// What ranks must agree on for a collective: which one it is, its subject and channel, and what is
/// exchanged. Ranks whose fingerprints differ must not read each other's tensors.
class CollectiveForm {
 public:
  CollectiveForm(std::string_view collective, const CollectiveTag& tag);

  /// What is exchanged.
  CollectiveForm& elements(int64_t numel, at::ScalarType dtype);
  /// Which ranks have which part of it.
  CollectiveForm& cut(std::span<const int64_t> bounds);
  CollectiveForm& pieces(std::span<const Piece> pieces);
  CollectiveForm& op(ReduceOp op);
  CollectiveForm& root(int root);
  /// Anything else, which `text()` does not tell.
  CollectiveForm& mix(int64_t value);
  CollectiveForm& mix(std::string_view text);

  uint64_t fingerprint() const { return hash_; }

  /// For a message of the collective with this number in its channel, or of its `part`: ranks that
  /// disagree wait for messages that never come, instead of writing one tensor into another.
  int message_tag(int64_t sequence, int64_t part = 0) const;

  /// "all_reduce of unit 'blocks.3': 100 elements of Float, max"
  std::string text() const;

 private:
  static constexpr size_t kPartsTold = 4;

  std::string collective_, subject_;
  int64_t numel_ = -1;
  at::ScalarType dtype_ = at::kFloat;
  size_t parts_ = 0;
  std::array<int64_t, kPartsTold> first_parts_{};
  std::optional<size_t> pieces_;
  std::optional<ReduceOp> op_;
  std::optional<int> root_;
  uint64_t hash_ = 0xCBF29CE484222325ull;
};

/// The form of a collective. Each two ranks of an all-to-all agree on the message between them, and
/// a barrier has none: neither is in the form.
CollectiveForm form_of(const AllGather& call, const CollectiveTag& tag);
CollectiveForm form_of(const ReduceScatter& call, const CollectiveTag& tag);
CollectiveForm form_of(const AllReduce& call, const CollectiveTag& tag);
CollectiveForm form_of(const Broadcast& call, const CollectiveTag& tag);
CollectiveForm form_of(const AllToAll& call, const CollectiveTag& tag);
CollectiveForm form_of(const Barrier& call, const CollectiveTag& tag);

}  // namespace tessera
