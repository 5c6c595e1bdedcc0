#pragma once

#include <optional>
#include <vector>

namespace tessera {

/// Returns the descriptors that this process has open; none where /proc is missing.
std::vector<int> open_descriptors();

/// The port numbers of a TCP socket; 0: none.
struct TcpPorts {
  int local = 0;
  int peer = 0;
};

/// Returns null if `descriptor` is no TCP socket.
std::optional<TcpPorts> tcp_ports_of(int descriptor);

bool is_listening(int descriptor);

/// Keeps these sockets of a rank from its children: programs that it starts do not have them, and a
/// forked child has /dev/null in their place, also for connections that listening ones accept
/// later.
///
/// A connection closes when the last process that has it closes it. So if a child had those of a
/// rank that was killed, the other ranks would wait for it until the timeout.
void keep_from_children(const std::vector<int>& sockets);

/// Makes a listening socket ignore all new connections from now on. Accepted ones continue.
void ignore_new_connections(int listener);

}  // namespace tessera
