#include "tensor/plan_key.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <bit>
#include <functional>
#include <string_view>
#include <unordered_map>

#include "base/dispatch/mixed_hash.h"
#include "tensor/dist_meta.h"
#include "tensor/op_plan.h"
#include "tensor/strict.h"

namespace tessera {
namespace {

// Written in place of, or before, values that are not integers.
enum Mark : int64_t {
  kUndefined = -1,
  kOrdinary = -2,
  kNone = -3,
  kReal = -4,
  kWantsGradient = -5,
  kComplex = -6,
  kText = -7,
  kDevice = -8,
};

// Whether the operator's rule depends on real numbers; cached by operator.
bool asks_for_reals(const c10::FunctionSchema& schema) {
  thread_local std::unordered_map<const c10::FunctionSchema*, bool> known;
  const auto found = known.find(&schema);
  if (found != known.end()) return found->second;
  return known[&schema] = !ignores_reals(schema);
}

class Writer {
 public:
  Writer(PlanKey& key, const c10::FunctionSchema& schema) : key_(key), schema_(schema) {}

  bool write(const c10::IValue& value) {
    if (value.isTensor()) {
      write(value.toTensor());
    } else if (value.isNone()) {
      key_.push_back(kNone);
    } else if (value.isInt()) {
      key_.push_back(value.toInt());
    } else if (value.isBool()) {
      key_.push_back(value.toBool());
    } else if (value.isDouble()) {
      key_.push_back(kReal);
      if (asks_for_reals(schema_)) key_.push_back(std::bit_cast<int64_t>(value.toDouble()));
    } else if (value.isIntList()) {
      const auto list = value.toIntVector();
      key_.push_back(static_cast<int64_t>(list.size()));
      key_.insert(key_.end(), list.begin(), list.end());
    } else if (value.isTensorList() || value.isList()) {
      const auto list = value.toListRef();
      key_.push_back(static_cast<int64_t>(list.size()));
      for (const c10::IValue& element : list) {
        if (!write(element)) return false;
      }
    } else {
      return write_rare(value);
    }
    return true;
  }

 private:
  void write(const at::Tensor& tensor) {
    if (!tensor.defined()) return key_.push_back(kUndefined);
    const DistMeta* const meta = find_dist_meta(tensor);
    if (meta && meta->parameter) {
      note_parameter(meta->parameter);
    } else if (meta && meta->shown_parameter) {
      note_parameter(meta->shown_parameter);
    }
    const bool wants_gradient = !meta && at::GradMode::is_enabled() && tensor.requires_grad();
    key_.push_back(meta             ? reinterpret_cast<int64_t>(meta->spec.get())
                   : wants_gradient ? kWantsGradient
                                    : kOrdinary);
    const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    const int64_t flags =
        8 * tensor.is_conj() + 4 * tensor.is_neg() + 2 * is_number + shows_parameter(tensor);
    const int64_t kind = static_cast<int64_t>(tensor.scalar_type()) * 16 + flags;
    key_.push_back(kind * 256 + tensor.dim());
    key_.insert(key_.end(), tensor.sizes().begin(), tensor.sizes().end());
    key_.insert(key_.end(), tensor.strides().begin(), tensor.strides().end());
  }

  bool write_rare(const c10::IValue& value) {
    if (value.isComplexDouble()) {
      const auto number = value.toComplexDouble();
      key_.insert(key_.end(), {kComplex, std::bit_cast<int64_t>(number.real()),
                               std::bit_cast<int64_t>(number.imag())});
    } else if (value.isString()) {
      const auto hash = std::hash<std::string_view>()(value.toStringView());
      key_.insert(key_.end(), {kText, static_cast<int64_t>(hash)});
    } else if (value.isDevice()) {
      const c10::Device device = value.toDevice();
      key_.insert(key_.end(), {kDevice, static_cast<int64_t>(device.type()), device.index()});
    } else {
      return value.isGenerator();
    }
    return true;
  }

  PlanKey& key_;
  const c10::FunctionSchema& schema_;
};

}  // namespace

size_t PlanKeyHash::operator()(const PlanKey& key) const {
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const int64_t value : key) hash = mixed_hash(hash, static_cast<uint64_t>(value));
  return hash;
}

bool write_plan_key(PlanKey& key, const c10::OperatorHandle& op,
                    at::ArrayRef<c10::IValue> arguments) {
  key.clear();
  key.push_back(reinterpret_cast<int64_t>(&op.schema()));
  Writer writer(key, op.schema());
  bool is_complete = true;
  for (const c10::IValue& argument : arguments) is_complete &= writer.write(argument);
  return is_complete;
}

}  // namespace tessera
