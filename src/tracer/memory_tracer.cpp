#include <c10/util/Exception.h>
#include <tessera/memory_tracer.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "model/sharded_state.h"
#include "tracer/memory_recorder.h"

namespace tessera {

struct MemoryTracer::Impl {
  MemoryRecorder recorder;
};

namespace {

void write_file(const char* function, const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  TORCH_CHECK(file, "[", function, "] could not write '", path, "': ", std::strerror(errno));
}

}  // namespace

MemoryTracer::MemoryTracer(const ShardedModule& module, const MemoryTracerOptions& options) {
  TORCH_CHECK_VALUE(options.steps >= 0,
                    "[MemoryTracer] options.steps must not be negative; got ", options.steps);
  impl_.reset(new Impl{MemoryRecorder(module.state(), options.pss, options.steps)});
}

MemoryTracer::~MemoryTracer() = default;
MemoryTracer::MemoryTracer(MemoryTracer&&) noexcept = default;
MemoryTracer& MemoryTracer::operator=(MemoryTracer&&) noexcept = default;

void MemoryTracer::start_step() { impl_->recorder.start_step(); }

const std::vector<MemorySample>& MemoryTracer::samples() const {
  return impl_->recorder.timeline().samples;
}

const MemorySample& MemoryTracer::peak() const { return impl_->recorder.peak(); }
int64_t MemoryTracer::peak_model_bytes() const { return impl_->recorder.peak_model_bytes(); }
int64_t MemoryTracer::peak_other_bytes() const { return impl_->recorder.peak_other_bytes(); }
bool MemoryTracer::knows_other() const { return impl_->recorder.timeline().knows_other; }

void MemoryTracer::write_chrome_trace(const std::string& path) const {
  write_file("write_chrome_trace", path, chrome_trace(chrome_events(impl_->recorder.timeline())));
}

// Each rank's time begins with its process: ranks are aligned by the time of day.
void MemoryTracer::write_merged_chrome_trace(const std::string& path) const {
  using nlohmann::json;
  const ShardMesh& mesh = impl_->recorder.state().mesh();
  const MemoryTimeline timeline = impl_->recorder.timeline();
  const CollectiveTag tag{"trace of memory", Channel::kControl};
  const auto clocks = mesh.all_gather_bytes(std::to_string(timeline.clock_us), tag);
  int64_t first = timeline.clock_us;
  for (const std::string& clock : clocks) first = std::min<int64_t>(first, std::stoll(clock));
  const auto texts =
      mesh.all_gather_bytes(chrome_trace(chrome_events(timeline, timeline.clock_us - first)), tag);
  check_on_all_ranks(mesh, [&] {
    if (mesh.rank() != 0) return;
    json events = json::array();
    for (const std::string& text : texts) {
      json file = json::parse(text);
      for (json& event : file["traceEvents"]) events.push_back(std::move(event));
    }
    write_file("write_merged_chrome_trace", path, chrome_trace(events));
  });
}

void MemoryTracer::write_svg(const std::string& path) const {
  write_file("write_svg", path, memory_svg(last_step_of(impl_->recorder.timeline())));
}

void MemoryTracer::dump_memory_stats(const std::string& path) const {
  write_file("dump_memory_stats", path, memory_table(impl_->recorder.timeline()));
}

}  // namespace tessera
