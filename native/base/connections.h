// The TCP connections of this process, whichever library has opened them.
//
// The processes of a job are connected twice: with JAX's coordination service, and
// with each other for collectives on CPUs (Gloo). A process of a job that failed
// asks who is still connected, and closes what a collective waits for
// (_jax/connections.py).
//
// Guarantees
//   * Nothing is changed by looking: no Python socket is made, which might make the
//     connection of another library non-blocking.
//   * ShutDown closes the connection between the two addresses that it is given, or
//     none. Another thread may close a descriptor and open another file under its
//     number at any moment, so the addresses are compared on a duplicate, and that
//     duplicate is shut down.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

namespace hostcall {

/// Both addresses are the bytes of a sockaddr_in or a sockaddr_in6.
struct Connection {
  int descriptor;
  std::string local;
  std::string peer;
};

/// One end of a connection; empty if this is none of TCP.
inline std::string AddressOf(int descriptor,
                             int (*ask)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  // The kernel's text of the address; its type is what the function asks for.
  auto* const bytes = reinterpret_cast<sockaddr*>(&address);
  if (ask(descriptor, bytes, &size) != 0 || size > sizeof(address)) return {};
  const bool known = address.ss_family == AF_INET || address.ss_family == AF_INET6;
  if (!known) return {};
  return {reinterpret_cast<const char*>(&address), size};
}

/// The connection of a descriptor; nothing if it is not a connected TCP socket.
inline std::optional<Connection> ConnectionOf(int descriptor) {
  int type = 0;
  socklen_t size = sizeof(type);
  const int code = getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size);
  if (code != 0 || type != SOCK_STREAM) return std::nullopt;
  Connection connection{descriptor, AddressOf(descriptor, &getsockname),
                        AddressOf(descriptor, &getpeername)};
  if (connection.local.empty() || connection.peer.empty()) return std::nullopt;
  return connection;
}

/// All of them; nothing if the system does not list descriptors.
inline std::optional<std::vector<Connection>> Connections() {
  DIR* const folder = opendir("/dev/fd");
  if (folder == nullptr) return std::nullopt;
  std::vector<Connection> connections;
  while (const dirent* const entry = readdir(folder)) {
    char* end = nullptr;
    const long number = std::strtol(entry->d_name, &end, 10);
    if (end == entry->d_name || *end != '\0') continue;  // "." and ".."
    if (auto connection = ConnectionOf(static_cast<int>(number))) {
      connections.push_back(*std::move(connection));
    }
  }
  closedir(folder);
  return connections;
}

/// Closes a connection for both sides, as the end of this process would. Whoever
/// has it open reads its end, and closes the descriptor. False if it is gone.
inline bool ShutDown(const Connection& connection) {
  const int duplicate = fcntl(connection.descriptor, F_DUPFD_CLOEXEC, 0);
  if (duplicate < 0) return false;
  const auto now = ConnectionOf(duplicate);
  const bool is_same =
      now && now->local == connection.local && now->peer == connection.peer;
  const bool closed = is_same && shutdown(duplicate, SHUT_RDWR) == 0;
  close(duplicate);
  return closed;
}

}  // namespace hostcall
