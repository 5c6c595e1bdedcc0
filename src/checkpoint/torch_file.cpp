#include "checkpoint/torch_file.h"

#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "checkpoint/checked_shape.h"
#include "checkpoint/json_text.h"
#include "group/math_bits.h"

namespace tessera {
namespace {

using caffe2::serialize::PyTorchStreamWriter;

// As in pickle.cpp: more than the names of a large model take.
constexpr int64_t kMostPickleBytes = int64_t{64} << 20;

// Limits of the tensors of one storage together: they may overlap, and repeat elements, but a small
// file must not make a large model.
constexpr int64_t kMostViews = 8, kMostSmallBytes = int64_t{16} << 20;

// Returns how many elements of the storage the tensor spans, from its offset on.
int64_t reach(const PickledTensor& tensor) {
  return CheckedShape(tensor.shape).reach(tensor.strides);
}

std::string record_of(const PickledTensor& tensor) { return "data/" + tensor.storage; }

}  // namespace

TorchFile::TorchFile(const std::filesystem::path& path) : file_(File::open_file(path)) {
  naming_file("import_checkpoint", path.string(),
              "must be a state dict as torch.save writes it since PyTorch 1.6", [&] {
                records_.emplace(file_);
                const std::string order = read_record("byteorder", 16, "little");
                TORCH_CHECK_VALUE(order == "little", "it was written by a big-endian machine");
                tensors_ = unpickle_tensors(read_record("data.pkl", kMostPickleBytes));
                check_tensors();
              });
}

std::string TorchFile::read_record(const std::string& name, int64_t most,
                                   const std::optional<std::string>& otherwise) const {
  const ZipDirectory::Record* const record = records_->find(name);
  if (!record && otherwise) return *otherwise;
  TORCH_CHECK_VALUE(record, "it lacks '", name, "'");
  TORCH_CHECK_VALUE(record->nbytes <= most, "its '", name, "' must have at most ", most,
                    " bytes; it has ", record->nbytes);
  std::string bytes(static_cast<size_t>(record->nbytes), '\0');
  file_.read(bytes.data(), bytes.size(), record->offset);
  return bytes;
}

void TorchFile::check_tensors() const {
  // Equal views are one tensor.
  using View =
      std::tuple<std::string, std::string, int64_t, std::vector<int64_t>, std::vector<int64_t>>;
  std::set<View> seen;
  std::map<std::string, int64_t> used;  // bytes of the tensors of a storage
  for (const auto& [name, tensor] : tensors_) {
    const ZipDirectory::Record* const record = records_->find(record_of(tensor));
    TORCH_CHECK_VALUE(record, "it lacks '", record_of(tensor), "' of '", name, "'");
    try {
      const CheckedShape shape(tensor.shape, item_size(tensor.dtype));
      const int64_t end = checked_sum(tensor.offset, shape.reach(tensor.strides));
      TORCH_CHECK_VALUE(tensor.offset >= 0 && checked_product(end, item_size(tensor.dtype)) <= record->nbytes,
                        "it does not fit into the ", record->nbytes, " bytes of its storage");
      const View view{tensor.storage, tensor.dtype, tensor.offset, tensor.shape, tensor.strides};
      if (!seen.insert(view).second) continue;
      int64_t& bytes = used[tensor.storage];
      bytes = checked_sum(bytes, shape.nbytes());
      TORCH_CHECK_VALUE(bytes <= std::max(kMostSmallBytes, kMostViews * record->nbytes),
                        "it and others repeat the ", record->nbytes, " bytes of its storage; clone() "
                        "what was expanded before torch.save");
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(false, "'", name, "': ", error.what_without_backtrace());
    }
  }
}

// Reads straight from the file, as torch.save does not compress, and only the tensor's elements.
at::Tensor TorchFile::read(const PickledTensor& tensor) const {
  const int64_t count = reach(tensor), item = item_size(tensor.dtype);
  const auto dtype = scalar_type_of(tensor.dtype);
  if (count == 0) return at::empty(tensor.shape, dtype);
  const at::Tensor flat = at::empty({count}, dtype);
  file_.read(flat.mutable_data_ptr(), static_cast<size_t>(count * item),
             records_->find(record_of(tensor))->offset + tensor.offset * item);
  return at::as_strided(flat, tensor.shape, tensor.strides).contiguous();
}

TorchFileWriter::TorchFileWriter(const std::filesystem::path& path)
    : writer_(std::make_unique<PyTorchStreamWriter>(path.string())) {}

TorchFileWriter::~TorchFileWriter() = default;

void TorchFileWriter::write(const std::vector<std::string>& names, const at::Tensor& value) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_pickled_dtype(safetensors_dtype(value.scalar_type())),
                              "[export_checkpoint] '", names.front(), "' has the dtype ",
                              value.scalar_type(), ", which Python's torch.load does not take from "
                              "such a file: export to a safetensors file");
  const at::Tensor data = with_plain_memory(value).contiguous();
  writer_->writeRecord("data/" + std::to_string(written_.size()), data.const_data_ptr(),
                       data.nbytes());
  written_.push_back({names, data.scalar_type(), data.sizes().vec()});
}

void TorchFileWriter::finish() {
  // The pickle names shapes and storages in the order in which it meets the tensors. It is made
  // from tensors without data, which it does not read.
  static char nowhere = 0;
  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  for (const Written& tensor : written_) {
    const at::Tensor stand_in = at::from_blob(&nowhere, tensor.shape, at::dtype(tensor.dtype));
    for (const std::string& name : tensor.names) dict.insert(name, stand_in);
  }
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* bytes, size_t size) { pickle.append(bytes, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();
  writer_->writeRecord("data.pkl", pickle.data(), pickle.size());
  writer_->writeRecord("byteorder", "little", 6);
  writer_->writeEndOfFile();
}

}  // namespace tessera
