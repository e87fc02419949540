// Stands for libtorch_python.so: turns exceptions of a call into what the program sees.

#include "c10.hpp"

#include <cstddef>
#include <stdexcept>

static std::string said;

extern "C" const char *attempt(void *(*alloc)(size_t, int, void *), size_t size) {
  try {
    alloc(size, 0, nullptr);
    said = "granted";
  } catch (const c10::OutOfMemoryError &error) {
    said = "OutOfMemoryError from " + error.where() + ": " + error.what();
  } catch (const std::exception &error) {
    said = std::string("another exception: ") + error.what();
  }
  return said.c_str();
}
