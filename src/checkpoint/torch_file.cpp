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

#include "checkpoint/file.h"

namespace tessera {
namespace {

using caffe2::serialize::PyTorchStreamReader;
using caffe2::serialize::PyTorchStreamWriter;

int64_t item_size(const PickledTensor& tensor) {
  return static_cast<int64_t>(c10::elementSize(scalar_type_of(tensor.dtype)));
}

// Elements of the storage that the tensor reaches, from its offset on.
int64_t reach(const PickledTensor& tensor) {
  int64_t last = 0;
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    if (tensor.shape[dim] == 0) return 0;
    last += (tensor.shape[dim] - 1) * tensor.strides[dim];
  }
  return last + 1;
}

// The header of a record in a zip file has the method after 8 bytes; 0: stored as it is.
bool is_compressed(const std::filesystem::path& path, size_t header_offset) {
  uint16_t method = 0;
  File::open_file(path).read(&method, sizeof(method), static_cast<int64_t>(header_offset) + 8);
  return method != 0;
}

bool is_little_endian(PyTorchStreamReader& file) {
  if (!file.hasRecord("byteorder")) return true;
  const auto [data, size] = file.getRecord("byteorder");
  return std::string(static_cast<const char*>(data.get()), size) == "little";
}

void check_tensor(const std::filesystem::path& path, PyTorchStreamReader& file,
                  const std::string& name, const PickledTensor& tensor) {
  const auto is_negative = [](int64_t value) { return value < 0; };
  const std::string record = "data/" + tensor.storage;
  TORCH_CHECK_VALUE(tensor.shape.size() == tensor.strides.size() && tensor.offset >= 0 &&
                        std::none_of(tensor.shape.begin(), tensor.shape.end(), is_negative) &&
                        std::none_of(tensor.strides.begin(), tensor.strides.end(), is_negative),
                    "'", name, "' is no tensor");
  TORCH_CHECK_VALUE(file.hasRecord(record), "it lacks '", record, "' of '", name, "'");
  TORCH_CHECK_VALUE(!is_compressed(path, file.getRecordHeaderOffset(record)), "'", record,
                    "' of '", name, "' is compressed, which torch.save does not do");
  const auto nbytes = static_cast<int64_t>(file.getRecordSize(record));
  TORCH_CHECK_VALUE((tensor.offset + reach(tensor)) * item_size(tensor) <= nbytes, "'", name,
                    "' does not fit into the ", nbytes, " bytes of '", record, "'");
}

}  // namespace

TorchFile::TorchFile(const std::filesystem::path& path) : path_(path) {
  try {
    File::open_file(path);
    reader_ = std::make_unique<PyTorchStreamReader>(path.string());
    TORCH_CHECK_VALUE(is_little_endian(*reader_), "it was written by a big-endian machine");
    const auto [data, size] = reader_->getRecord("data.pkl");
    tensors_ = unpickle_tensors({static_cast<const char*>(data.get()), size});
    for (const auto& [name, tensor] : tensors_) check_tensor(path, *reader_, name, tensor);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "[import_checkpoint] '", path.string(),
                      "' must be a state dict as torch.save writes it since PyTorch 1.6; ",
                      error.what_without_backtrace());
  }
}

TorchFile::~TorchFile() = default;

// Straight from the file, as torch.save compresses nothing: no more than the tensor is in memory.
at::Tensor TorchFile::read(const PickledTensor& tensor) const {
  const int64_t count = reach(tensor), item = item_size(tensor);
  const auto dtype = scalar_type_of(tensor.dtype);
  const at::Tensor flat = at::empty({count}, dtype);
  if (count > 0) {
    const auto start = static_cast<int64_t>(reader_->getRecordOffset("data/" + tensor.storage));
    File::open_file(path_).read(flat.mutable_data_ptr(), static_cast<size_t>(count * item),
                                start + tensor.offset * item);
  }
  if (count == 0) return at::empty(tensor.shape, dtype);
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
  const at::Tensor data = value.contiguous();
  writer_->writeRecord("data/" + std::to_string(written_.size()), data.const_data_ptr(),
                       data.nbytes());
  written_.push_back({names, data.scalar_type(), data.sizes().vec()});
}

void TorchFileWriter::finish() {
  // The pickle names shapes and storages in the order in which it meets the tensors. It is made of
  // tensors without data, which it does not look at.
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
