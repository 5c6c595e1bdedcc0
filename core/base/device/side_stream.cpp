#include "base/device/side_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera {

SideStream::SideStream(c10::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)) {}

c10::Event SideStream::run(const std::function<void()>& queue) const {
  c10::Event before(stream_.device_type());
  before.record(current_stream(stream_.device()));
  before.block(stream_);
  const c10::StreamGuard guard(stream_);
  queue();
  c10::Event after(stream_.device_type());
  after.record(stream_);
  return after;
}

const SideStream& SideStreams::of(c10::Device device) {
  const std::lock_guard lock(mutex_);
  return streams_.try_emplace(device.index(), device).first->second;
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace tessera
