#include "comm/group/collective_form.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/dispatch/mixed_hash.h"
#include "comm/group/encoding.h"

namespace tessera {
namespace {

constexpr const char* kOpNames[] = {"sum", "max", "min"};  // by `ReduceOp`

}  // namespace

CollectiveForm::CollectiveForm(std::string_view collective, const CollectiveTag& tag)
    : collective_(collective), subject_(tag.subject), identity_(tag.identity) {
  mix(collective).mix(tag.subject).mix(static_cast<int64_t>(tag.channel));
  if (identity_) mix(static_cast<int64_t>(identity_));
}

CollectiveForm& CollectiveForm::mix(int64_t value) {
  hash_ = mixed_hash(hash_, static_cast<uint64_t>(value));
  return *this;
}

CollectiveForm& CollectiveForm::mix(std::string_view text) {
  mix(static_cast<int64_t>(text.size()));
  for (const char c : text) mix(static_cast<int64_t>(c));
  return *this;
}

CollectiveForm& CollectiveForm::elements(int64_t numel, at::ScalarType dtype) {
  numel_ = numel;
  dtype_ = dtype;
  return mix(numel).mix(static_cast<int64_t>(dtype));
}

CollectiveForm& CollectiveForm::cut(std::span<const int64_t> bounds) {
  parts_ = bounds.size() - 1;
  for (size_t r = 0; r < parts_; ++r) {
    const int64_t part = bounds[r + 1] - bounds[r];
    if (r < kPartsTold) first_parts_[r] = part;
    mix(part);
  }
  return *this;
}

CollectiveForm& CollectiveForm::pieces(std::span<const Piece> pieces) {
  pieces_ = pieces.size();
  for (const Piece& piece : pieces) mix(piece.begin).mix(piece.numel);
  return *this;
}

CollectiveForm& CollectiveForm::op(ReduceOp op) {
  op_ = op;
  return mix(static_cast<int64_t>(op));
}

CollectiveForm& CollectiveForm::root(int root) {
  root_ = root;
  return mix(root);
}

CollectiveForm& CollectiveForm::encoding(Encoding encoding) {
  encoding_ = encoding;
  return encoding == Encoding::kPlain ? *this : mix(static_cast<int64_t>(encoding));
}

int CollectiveForm::message_tag(int64_t sequence, int64_t part) const {
  const uint64_t of_sequence = mixed_hash(hash_, static_cast<uint64_t>(sequence));
  return static_cast<int>((mixed_hash(of_sequence, static_cast<uint64_t>(part)) >> 16) &
                          0x7FFFFFFF);
}

std::string CollectiveForm::text() const {
  std::string text = fmt::format("{} of unit '{}'", collective_, subject_);
  if (identity_) text += fmt::format(", tensor {:08x}", identity_ & 0xFFFFFFFF);
  if (numel_ >= 0) text += fmt::format(": {} elements of {}", numel_, c10::toString(dtype_));
  if (encoding_ != Encoding::kPlain) text += fmt::format(" sent as {}", to_string(encoding_));
  if (op_) text += fmt::format(", {}", kOpNames[static_cast<size_t>(*op_)]);
  if (root_) text += fmt::format(", from rank {}", *root_);
  if (parts_ > 0) {
    const auto* const end = first_parts_.begin() + std::min(parts_, kPartsTold);
    text += fmt::format(", parts of {}{}", fmt::join(first_parts_.begin(), end, ", "),
                        parts_ > kPartsTold ? ", ..." : "");
  }
  if (pieces_) text += fmt::format(", in {} pieces", *pieces_);
  return text;
}

}  // namespace tessera
