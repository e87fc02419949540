// Stands for libc10.so.

#include "c10.hpp"

#include <utility>

namespace c10 {

Error::Error(SourceLocation where, std::string message)
    : message(std::move(message)), place(std::string(where.function) + " in " + where.file) {}

const char *Error::what() const noexcept { return message.c_str(); }

} // namespace c10
