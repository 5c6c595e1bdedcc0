#include "interop/exported_model.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "base/files/untrusted.h"
#include "checkpoint/name_rules.h"
#include "checkpoint/safetensors.h"

namespace tessera {

ExportedModel::ExportedModel(const std::filesystem::path& path, const ExportOptions& options)
    : options_(options), reader_(path), index_(reader_.index()) {
  std::erase_if(index_.tensors, [&](const TensorRecord& record) {
    return !is_of_model(record) && !(record.kind == "state" && !options.optimizer_key.empty());
  });
  const NameRules rules(options.rename, "options.rename");
  rename_tensors(index_, path.string(), [&](const std::string& name) { return rules.apply(name); });
  TORCH_CHECK_VALUE(
      options.optimizer_key.empty() || index_.optimizer,
      "[export_checkpoint] options.optimizer_key needs a checkpoint with an optimizer; '",
      path.string(), "' was saved without one");
  TORCH_CHECK_VALUE(index_.models.empty(), "[export_checkpoint] '", path.string(),
                    "' holds several models: export each from its subdirectory, such as '",
                    index_.models.empty() ? "" : (path / index_.models.front()).string(), "'");
  for (const TensorRecord& record : index_.tensors) {
    reader_.check(record);
    total_ += record.nbytes();
    is_of_model(record) ? tensors_.push_back(&record)
                        : states_[record.names.front()].push_back(&record);
  }
  if (options_.progress) options_.progress(0, total_);
}

const std::vector<const TensorRecord*>& ExportedModel::states_of(const std::string& param) const {
  static const std::vector<const TensorRecord*> kNone;
  const auto it = states_.find(param);
  return it == states_.end() ? kNone : it->second;
}

std::string ExportedModel::dtype_of(const TensorRecord& record) const {
  const bool is_converted =
      options_.dtype && record.kind != "state" && c10::isFloatingType(scalar_type_of(record.dtype));
  return is_converted ? safetensors_dtype(*options_.dtype) : record.dtype;
}

int64_t ExportedModel::nbytes_of(const TensorRecord& record) const {
  return CheckedShape(record.shape, item_size(dtype_of(record))).nbytes();
}

at::Tensor ExportedModel::read(const TensorRecord& record) {
  const at::Tensor value = reader_.read_whole(record);
  done_ += record.nbytes();
  if (options_.progress) options_.progress(done_, total_);
  return value.to(scalar_type_of(dtype_of(record)));
}

}  // namespace tessera
