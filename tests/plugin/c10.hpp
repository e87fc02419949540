// What the plug-in needs of PyTorch's exceptions, as their library declares them: names, virtual
// functions and their order, and a base with data of its own.

#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace c10 {

struct SourceLocation {
  const char *function;
  const char *file;
  uint32_t line;
};

class Error : public std::exception {
  std::string message;
  std::string place;

public:
  Error(SourceLocation where, std::string message);
  const char *what() const noexcept override;
  const std::string &where() const { return place; }
};

class OutOfMemoryError : public Error {
  using Error::Error;
};

} // namespace c10
