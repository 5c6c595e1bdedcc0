#include "checkpoint/whole_model.h"

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/model_view.h"
#include "checkpoint/safetensors.h"

namespace tessera {
namespace {

int count_writers(const ShardedState& state) {
  return std::min(state.mesh().size(), static_cast<int>(state.units().size()));
}

int writer_of(const Unit& unit, int writers) { return unit.index() % writers; }

TensorRecord whole_record(const char* kind, std::vector<std::string> names,
                          std::vector<int64_t> shape, at::ScalarType dtype,
                          const std::string& file) {
  TensorRecord record = contiguous_record(kind, std::move(names), std::move(shape), dtype);
  if (record.numel() > 0) record.chunks.push_back({file, record.names.front(), 0, record.numel()});
  return record;
}

// The names that a tied parameter has besides the one it is stored under are listed as `save_model`
// of Python's safetensors does.
std::map<std::string, std::string> metadata_of(const std::vector<TensorRecord>& records,
                                               const std::string& id) {
  std::map<std::string, std::string> metadata;
  for (const TensorRecord& record : records) {
    for (size_t i = 1; i < record.names.size(); ++i)
      metadata[record.names[i]] = record.names.front();
  }
  metadata["format"] = "pt";
  metadata["id"] = id;
  return metadata;
}

SafetensorsWriter start_file(const std::filesystem::path& path,
                             const std::vector<TensorRecord>& records, const std::string& id) {
  std::vector<TensorHeader> headers;
  for (const TensorRecord& record : records)
    headers.push_back({record.names.front(), record.dtype, record.shape});
  return SafetensorsWriter(File::create(path), std::move(headers), metadata_of(records, id));
}

void write_unit(SafetensorsWriter& file, const Unit& unit) {
  for (const ParamSlot& slot : unit.layout().slots)
    file.write(slot.name(), view_param(slot, unit.full()));
}

void write_buffers(SafetensorsWriter& file, const ShardedState& state) {
  for (const NamedTensor& buffer : state.buffers()) {
    if (buffer.tensor.defined()) file.write(buffer.name, buffer.tensor);
  }
}

// Does work until some of it fails, and keeps that error for later.
class FirstError {
 public:
  template <class F>
  void attempt(F&& work) {
    if (error_) return;
    try {
      work();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
};

}  // namespace

std::vector<WholeTensor> plan_whole_model(const ShardedState& state) {
  const int writers = count_writers(state);
  std::vector<WholeTensor> plan;
  for (const auto& unit : state.units()) {
    const int writer = writer_of(*unit, writers);
    const std::string file = model_file(writer + 1, writers);
    for (const ParamSlot& slot : unit->layout().slots)
      plan.push_back({whole_record("param", slot.names, slot.sizes, slot.dtype, file), writer});
  }
  for (const NamedTensor& buffer : state.buffers()) {
    if (!buffer.tensor.defined()) continue;
    const at::Tensor& value = buffer.tensor;
    plan.push_back({whole_record("buffer", {buffer.name}, value.sizes().vec(), value.scalar_type(),
                                 model_file(1, writers)),
                    0});
  }
  return plan;
}

void write_whole_model(ShardedState& state, const std::vector<WholeTensor>& plan,
                       const std::filesystem::path& directory, const std::string& id) {
  const int rank = state.mesh().rank(), writers = count_writers(state);
  std::vector<TensorRecord> mine;
  for (const WholeTensor& tensor : plan) {
    if (tensor.writer == rank) mine.push_back(tensor.record);
  }
  std::optional<SafetensorsWriter> file;
  FirstError error;
  error.attempt([&] {
    if (rank >= writers) return;
    file.emplace(start_file(directory / model_file(rank + 1, writers), mine, id));
    if (rank == 0) write_buffers(*file, state);
  });
  state.visit_whole_units([&](const Unit& unit) {
    if (writer_of(unit, writers) == rank) error.attempt([&] { write_unit(*file, unit); });
  });
  check_on_all_ranks(
      state.mesh(),
      [&] {
        error.rethrow();
        if (file) file->sync();
      },
      "checkpoint");
}

}  // namespace tessera
