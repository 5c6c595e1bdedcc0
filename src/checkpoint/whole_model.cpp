#include "checkpoint/whole_model.h"

#include <tessera/dist_tensor.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/model_view.h"
#include "checkpoint/safetensors.h"
#include "mesh/shard_mesh.h"

namespace tessera {
namespace {

int count_writers(const ShardedState& state) {
  return std::min(Ranks::of(state.mesh()).size(), static_cast<int>(state.units().size()));
}

int writer_of(const Unit& unit, int writers) { return unit.index() % writers; }

std::map<std::string, std::string> metadata_of(const std::vector<TensorRecord>& records,
                                               const std::string& id) {
  std::map<std::string, std::string> metadata;
  for (const TensorRecord& record : records) add_other_names(record, metadata);
  metadata["format"] = "pt";
  metadata["id"] = id;
  return metadata;
}

// A model file of this rank's tensors, and their chunks, added as they are written.
class ModelFile {
 public:
  ModelFile(const std::filesystem::path& path, std::vector<TensorRecord> records,
            const std::string& id)
      : name_(path.filename().string()),
        records_(std::move(records)),
        writer_(File::create(path), headers(), metadata_of(records_, id)) {
    for (size_t i = 0; i < records_.size(); ++i) places_[records_[i].names.front()] = i;
  }

  void write(const std::string& name, const at::Tensor& value) {
    auto checksums = writer_.write(name, value);
    if (value.numel() == 0) return;
    records_[places_.at(name)].chunks = {
        {name_, name, Region{0, value.numel()}, std::move(checksums)}};
  }

  void sync() { writer_.sync(); }
  const std::vector<TensorRecord>& records() const { return records_; }

 private:
  std::vector<TensorHeader> headers() const {
    std::vector<TensorHeader> headers;
    for (const TensorRecord& record : records_)
      headers.push_back({record.names.front(), record.dtype, record.shape});
    return headers;
  }

  std::string name_;
  std::vector<TensorRecord> records_;
  SafetensorsWriter writer_;
  std::map<std::string, size_t> places_;
};

at::Tensor whole_value(const at::Tensor& tensor) {
  return is_dist(tensor) ? full_tensor(tensor) : tensor;
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
    for (const ParamSlot& slot : unit->layout().slots)
      plan.push_back({contiguous_record("param", slot.names, slot.global_sizes(), slot.dtype),
                      writer_of(*unit, writers)});
  }
  for (const ParamSlot& slot : ignored_slots(state))
    plan.push_back({contiguous_record("param", slot.names, slot.global_sizes(), slot.dtype), 0});
  for (const NamedTensor& buffer : state.module_buffers()) {
    if (buffer.tensor.defined()) plan.push_back({record_of(buffer), 0});
  }
  return plan;
}

std::vector<TensorRecord> write_whole_model(ShardedState& state,
                                            const std::vector<WholeTensor>& plan,
                                            const std::filesystem::path& directory,
                                            const std::string& id) {
  const Ranks ranks = Ranks::of(state.mesh());
  const int rank = ranks.rank(), writers = count_writers(state);
  std::vector<TensorRecord> mine;
  for (const WholeTensor& tensor : plan) {
    if (tensor.writer == rank) mine.push_back(tensor.record);
  }
  std::optional<ModelFile> file;
  FirstError error;
  error.attempt([&] {
    if (rank < writers) file.emplace(directory / model_file(rank + 1, writers), mine, id);
  });
  const auto write = [&](bool is_mine, const std::string& name, const at::Tensor& value) {
    if (is_mine) error.attempt([&] { file->write(name, value); });
  };
  // All ranks take part in each gather, whichever rank writes the tensor, and even after an error.
  for (const ParamSlot& slot : ignored_slots(state))
    write(rank == 0, slot.name(), whole_value(slot.tensor()));
  for (const NamedTensor& buffer : state.module_buffers()) {
    if (buffer.tensor.defined()) write(rank == 0, buffer.name, whole_value(buffer.tensor));
  }
  state.visit_whole_units([&](const Unit& unit) {
    for (const ParamSlot& slot : unit.layout().slots)
      write(writer_of(unit, writers) == rank, slot.name(),
            global_value(slot, view_param(slot, unit.full())));
  });
  ranks.check(
      [&] {
        error.rethrow();
        if (file) file->sync();
      },
      "checkpoint");
  std::vector<TensorRecord> records = file ? file->records() : std::vector<TensorRecord>();
  if (rank != 0) return records;
  std::map<std::string, TensorRecord> written;
  for (TensorRecord& record : records) written[record.id()] = std::move(record);
  records.clear();
  for (const WholeTensor& tensor : plan) {
    const auto it = written.find(tensor.record.id());
    records.push_back(it == written.end() ? tensor.record : std::move(it->second));
  }
  return records;
}

}  // namespace tessera
