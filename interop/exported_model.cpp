#include "interop/exported_model.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <utility>

#include "base/files/untrusted.h"
#include "checkpoint/name_rules.h"
#include "checkpoint/safetensors.h"

namespace tessera {

ExportedModel::ExportedModel(const std::filesystem::path& path, ExportOptions options,
                             bool with_state)
    : options_(std::move(options)), reader_(path), index_(reader_.index()) {
  std::erase_if(index_.tensors, [&](const TensorRecord& record) {
    return !is_of_model(record) && !(with_state && record.kind == "state");
  });
  const NameRules rules(options_.rename, "options.rename");
  rename_tensors(index_, path.string(), [&](const std::string& name) { return rules.apply(name); });
  TORCH_CHECK_VALUE(index_.models.empty(), "[export_checkpoint] '", path.string(),
                    "' holds several models: export each from its subdirectory, such as '",
                    index_.models.empty() ? "" : (path / index_.models.front()).string(), "'");
  for (const TensorRecord& record : index_.tensors) {
    reader_.check(record);
    total_ += record.nbytes();
  }
  if (options_.progress) options_.progress(0, total_);
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

CheckpointTensors::CheckpointTensors(const std::filesystem::path& path, bool with_state,
                                     const ExportOptions& options)
    : model_(std::make_unique<ExportedModel>(path, options, with_state)) {}

CheckpointTensors::~CheckpointTensors() = default;

std::string CheckpointTensors::index() const {
  CheckpointIndex index = model_->index();
  for (TensorRecord& record : index.tensors) {
    record.dtype = model_->dtype_of(record);
    record.chunks.clear();
  }
  return to_json(index);
}

at::Tensor CheckpointTensors::read(size_t number) {
  TORCH_CHECK_VALUE(number < model_->tensors().size(), "[CheckpointTensors] there are ",
                    model_->tensors().size(), " tensors; got number ", number);
  return model_->read(model_->tensors()[number]);
}

}  // namespace tessera
