#pragma once

#include <sys/types.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "launcher/unique_fd.h"

namespace tessera::tools {

struct ChildOptions {
  std::vector<std::string> command;
  std::vector<std::string> environment;  ///< NAME=value
  std::vector<int> cores;                ///< empty: not bound
  bool inherit_stdin = false;            ///< else /dev/null, or `input`
  int input = -1;                        ///< its stdin, if it is not -1
};

/// A started program, the leader of its own process group.
struct Child {
  pid_t pid = -1;
  UniqueFd out;
  UniqueFd err;
};

/// A program could not be executed; `error` is the errno.
struct ExecError : std::runtime_error {
  ExecError(const std::string& what, int error) : std::runtime_error(what), error(error) {}
  int error;
};

/// Returns the arguments as exec() takes them. They point into `texts`.
std::vector<char*> argument_pointers(const std::vector<std::string>& texts);

/// Starts a program. It is killed when the calling thread ends.
///
/// Returns when the program runs. Throws `ExecError`, or `std::system_error` if no process can be
/// made for it.
Child start_child(const ChildOptions& options);

}  // namespace tessera::tools
