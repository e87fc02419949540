// The part of the plug-in that only C++ can do: throw an exception that PyTorch understands, and
// call the std::function that says which streams a graph capture concerns.
//
// Nothing of PyTorch is needed to build this. Its exception is found at run time, by the names that
// its libraries export; where they are not, a std::runtime_error says the same.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cxxabi.h>
#include <dlfcn.h>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <typeinfo>

namespace {

// c10::SourceLocation: passed by value, in memory, as this is.
struct SourceLocation {
  const char *function;
  const char *file;
  uint32_t line;
};

using Construct = void (*)(void *self, SourceLocation where, std::string message);
using Destroy = void (*)(void *self);

// Its destructor is not exported, but it is virtual, and the first that std::exception declares.
void destroy(void *self) {
  auto *table = *static_cast<Destroy **>(self);
  table[0](self);
}

// An exception of c10 is no larger: c10::Error has some 150 bytes.
constexpr size_t EXCEPTION_BYTES = 4096;

// Python loads extensions and what they need privately, so a search of the global scope finds
// nothing: the libraries are asked by name, and only if they are loaded.
void *find(const char *symbol) {
  if (void *found = dlsym(RTLD_DEFAULT, symbol)) {
    return found;
  }
  static const char *const LIBRARIES[] = {"libc10.so", "libc10_cuda.so", "libtorch_cuda.so",
                                          "libtorch_python.so", "libtorch_cpu.so"};
  for (const char *library : LIBRARIES) {
    if (void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) {
      void *found = dlsym(handle, symbol);
      dlclose(handle);
      if (found) {
        return found;
      }
    }
  }
  return nullptr;
}

// Constructs a c10::Error and throws it as a c10::OutOfMemoryError, which adds nothing to it.
// Returns if PyTorch's libraries do not have what that takes.
void throw_torch(const std::string &message) {
  auto *type = static_cast<std::type_info *>(find("_ZTIN3c1016OutOfMemoryErrorE"));
  auto construct = reinterpret_cast<Construct>(
      find("_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"));
  void **table = static_cast<void **>(find("_ZTVN3c1016OutOfMemoryErrorE"));
  if (!type || !construct) {
    return;
  }
  void *exception = abi::__cxa_allocate_exception(EXCEPTION_BYTES);
  std::memset(exception, 0, EXCEPTION_BYTES);
  try {
    construct(exception, SourceLocation{"fraglab_torch_alloc", "fraglab", 0}, message);
  } catch (...) {
    abi::__cxa_free_exception(exception);
    return;
  }
  if (table) {
    // What a virtual call sees begins behind the offset and the type.
    void *entries = table + 2;
    std::memcpy(exception, &entries, sizeof entries);
  }
  abi::__cxa_throw(exception, type, destroy);
}

// PyTorch passes its std::function by value, which by the Itanium ABI is a pointer to a copy that is
// the caller's to destroy. Copied and called here, it is taken to be laid out as libstdc++ lays it
// out: two words of the function object or a pointer to it, a manager and an invoker. PyTorch for
// Linux is built with libstdc++, and so has this file to be; with another library graph captures
// would not work.
using Filter = std::function<bool(void *)>;
#ifdef __GLIBCXX__
static_assert(sizeof(Filter) == 4 * sizeof(void *), "std::function of another library");
#endif

} // namespace

// Throws; the text is copied. `is_memory`: memory is out, else something else is wrong.
extern "C" [[noreturn]] void fraglab_throw(const char *text, size_t length, bool is_memory) {
  std::string message(text, length);
  if (is_memory) {
    throw_torch(message);
  }
  throw std::runtime_error(message);
}

// A copy of the function behind the pointer; null if there is no memory for it.
extern "C" void *fraglab_filter_copy(const void *filter) noexcept {
  try {
    return new Filter(*static_cast<const Filter *>(filter));
  } catch (...) {
    return nullptr;
  }
}

// Whether requests on the stream go to the pool. A function that throws says no.
extern "C" bool fraglab_filter_picks(const void *filter, void *stream) noexcept {
  try {
    return (*static_cast<const Filter *>(filter))(stream);
  } catch (...) {
    return false;
  }
}

extern "C" void fraglab_filter_drop(void *filter) noexcept { delete static_cast<Filter *>(filter); }
