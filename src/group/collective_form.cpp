#include "group/collective_form.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
    default:
      return "sum";
  }
}

uint64_t mixed(uint64_t hash, int64_t value) {
  hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 32);
}

}  // namespace

CollectiveForm::CollectiveForm(std::string_view collective, const CollectiveTag& tag)
    : collective_(collective), subject_(tag.subject) {
  mix(collective).mix(tag.subject).mix(static_cast<int64_t>(tag.channel));
}

CollectiveForm& CollectiveForm::mix(int64_t value) {
  hash_ = mixed(hash_, value);
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

int CollectiveForm::message_tag(int64_t sequence, int64_t part) const {
  return static_cast<int>((mixed(mixed(hash_, sequence), part) >> 16) & 0x7FFFFFFF);
}

std::string CollectiveForm::text() const {
  std::string text = fmt::format("{} of unit '{}'", collective_, subject_);
  if (numel_ >= 0) text += fmt::format(": {} elements of {}", numel_, c10::toString(dtype_));
  if (op_) text += fmt::format(", {}", name_of(*op_));
  if (root_) text += fmt::format(", from rank {}", *root_);
  if (parts_ > 0) {
    const auto* const end = first_parts_.begin() + std::min(parts_, kPartsTold);
    text += fmt::format(", parts of {}{}", fmt::join(first_parts_.begin(), end, ", "),
                        parts_ > kPartsTold ? ", ..." : "");
  }
  if (pieces_) text += fmt::format(", in {} pieces", *pieces_);
  return text;
}

CollectiveForm form_of(const AllGather& call, const CollectiveTag& tag) {
  CollectiveForm form(AllGather::kName, tag);
  return std::move(form.elements(call.bounds.back(), call.flat.scalar_type()).cut(call.bounds));
}

CollectiveForm form_of(const ReduceScatter& call, const CollectiveTag& tag) {
  CollectiveForm form(ReduceScatter::kName, tag);
  form.elements(call.bounds.back(), call.dtype()).cut(call.bounds);
  return std::move(form.pieces(call.pieces));
}

CollectiveForm form_of(const AllReduce& call, const CollectiveTag& tag) {
  CollectiveForm form(AllReduce::kName, tag);
  return std::move(form.elements(call.tensor.numel(), call.tensor.scalar_type()).op(call.op));
}

CollectiveForm form_of(const Broadcast& call, const CollectiveTag& tag) {
  CollectiveForm form(Broadcast::kName, tag);
  return std::move(form.elements(call.tensor.numel(), call.tensor.scalar_type()).root(call.root));
}

CollectiveForm form_of(const AllToAll& /*call*/, const CollectiveTag& tag) {
  return CollectiveForm(AllToAll::kName, tag);
}

CollectiveForm form_of(const Barrier& /*call*/, const CollectiveTag& tag) {
  return CollectiveForm(Barrier::kName, tag);
}

}  // namespace tessera
