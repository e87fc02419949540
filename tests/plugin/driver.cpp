// Loads the plug-in as PyTorch does, and calls it as a script on standard input says: a line a call,
// a line of answer for each. tests/plugin.rs writes the scripts and judges the answers.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Alloc = void *(*)(size_t, int, void *);
using Free = void (*)(void *, size_t, int, void *);
using PoolName = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(void *)>;

struct Block {
  void *pointer;
  size_t size;
  int device;
  void *stream;
};

void *library;

template <typename F> F symbol(const char *name) {
  void *found = dlsym(library, name);
  if (!found) {
    std::printf("missing %s\n", name);
    std::exit(3);
  }
  return reinterpret_cast<F>(found);
}

// What only the fake driver has; the plug-in has loaded it.
template <typename F> F fake(const char *name) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void *found = driver ? dlsym(driver, name) : nullptr;
  if (!found) {
    std::printf("missing %s\n", name);
    std::exit(3);
  }
  return reinterpret_cast<F>(found);
}

// The text of a call, released.
std::string taken(char *text) {
  if (!text) {
    return "null";
  }
  std::string copy = text;
  symbol<void (*)(char *)>("fraglab_torch_release_text")(text);
  return copy;
}

std::string allocate(std::map<std::string, Block> &blocks, std::istringstream &words) {
  std::string name;
  Block block{};
  uintptr_t stream = 0;
  words >> name >> block.size >> block.device >> stream;
  block.stream = reinterpret_cast<void *>(stream);
  try {
    block.pointer = symbol<Alloc>("fraglab_torch_alloc")(block.size, block.device, block.stream);
  } catch (const std::runtime_error &error) {
    return std::string("runtime_error ") + error.what();
  }
  blocks[name] = block;
  std::ostringstream out;
  out << reinterpret_cast<uintptr_t>(block.pointer);
  return out.str();
}

// What is live, by device and address. A block is entered after it was handed out and struck before it
// is freed, so that whatever overlaps here was in two hands at once.
class Ranges {
public:
  // Says whether the block overlaps another.
  bool enter(const Block &block) {
    std::lock_guard<std::mutex> guard(mutex);
    Key key = key_of(block);
    auto next = live.lower_bound(key);
    bool overlaps = next != live.end() && next->first.first == block.device &&
                    next->first.second < key.second + block.size;
    if (next != live.begin()) {
      auto before = std::prev(next);
      overlaps |= before->first.first == block.device &&
                  key.second < before->first.second + before->second;
    }
    live[key] = block.size;
    return overlaps;
  }

  void strike(const Block &block) {
    std::lock_guard<std::mutex> guard(mutex);
    live.erase(key_of(block));
  }

private:
  using Key = std::pair<int, uintptr_t>;
  static Key key_of(const Block &block) {
    return {block.device, reinterpret_cast<uintptr_t>(block.pointer)};
  }

  std::mutex mutex;
  std::map<Key, size_t> live;
};

// Many threads allocate and free. Blocks that overlap while both are live are counted.
std::string hammer(int threads, int rounds) {
  auto alloc = symbol<Alloc>("fraglab_torch_alloc");
  auto release = symbol<Free>("fraglab_torch_free");
  auto record = symbol<void (*)(void *, void *)>("fraglab_torch_record_stream");
  std::vector<std::thread> all;
  std::vector<int> refused(threads, 0), overlapping(threads, 0);
  Ranges ranges;
  for (int thread = 0; thread < threads; thread++) {
    all.emplace_back([=, &refused, &overlapping, &ranges] {
      std::vector<Block> held;
      uint64_t random = 88172645463325252ull + thread;
      for (int round = 0; round < rounds; round++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        if (held.size() > 20 || (random % 3 == 0 && !held.empty())) {
          Block block = held[random % held.size()];
          held[random % held.size()] = held.back();
          held.pop_back();
          ranges.strike(block);
          release(block.pointer, block.size, block.device, block.stream);
          continue;
        }
        Block block{nullptr, 1 + random % (4 << 20), int(random % 2), (void *)(random % 3)};
        try {
          block.pointer = alloc(block.size, block.device, block.stream);
        } catch (const std::runtime_error &) {
          refused[thread]++;
          continue;
        }
        overlapping[thread] += ranges.enter(block);
        if (random % 5 == 0) {
          record(block.pointer, (void *)7);
        }
        held.push_back(block);
      }
      for (Block block : held) {
        ranges.strike(block);
        release(block.pointer, block.size, block.device, block.stream);
      }
    });
  }
  int refused_in_all = 0, overlapping_in_all = 0;
  for (int thread = 0; thread < threads; thread++) {
    all[thread].join();
    refused_in_all += refused[thread];
    overlapping_in_all += overlapping[thread];
  }
  return "refused " + std::to_string(refused_in_all) + ", overlapping " +
         std::to_string(overlapping_in_all);
}

// Nanoseconds a pair of alloc and free, with some blocks live.
std::string bench(int live, long rounds) {
  auto alloc = symbol<Alloc>("fraglab_torch_alloc");
  auto release = symbol<Free>("fraglab_torch_free");
  std::vector<void *> held(live);
  auto size = [](long round) { return size_t(512 + (round * 7919) % (1 << 20)); };
  for (int at = 0; at < live; at++) {
    held[at] = alloc(size(at), 0, nullptr);
  }
  auto begin = std::chrono::steady_clock::now();
  for (long round = 0; round < rounds; round++) {
    void *&place = held[round % live];
    release(place, 0, 0, nullptr);
    place = alloc(size(round), 0, nullptr);
  }
  auto time = std::chrono::steady_clock::now() - begin;
  auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
  return std::to_string(ns / rounds);
}

std::string unescaped(std::istringstream &words) {
  std::string text, line;
  std::getline(words >> std::ws, line);
  for (size_t at = 0; at < line.size(); at++) {
    if (line.compare(at, 2, "\\n") == 0) {
      text += '\n', at++;
    } else {
      text += line[at];
    }
  }
  return text;
}

std::string pool(const std::string &command, std::istringstream &words) {
  int device = 0;
  PoolName name;
  words >> device >> name.first >> name.second;
  if (command == "pool_begin") {
    std::set<void *> streams;
    for (uintptr_t stream = 0; words >> stream;) {
      streams.insert(reinterpret_cast<void *>(stream));
    }
    // Large enough not to fit into the function object itself.
    std::string ballast(100, 'x');
    Filter filter = [streams, ballast](void *stream) { return streams.count(stream) > 0; };
    symbol<void (*)(int, PoolName, Filter)>("fraglab_torch_pool_begin")(device, name, filter);
  } else {
    std::string full = "fraglab_torch_" + command;
    symbol<void (*)(int, PoolName)>(full.c_str())(device, name);
  }
  return "done";
}

std::string run(std::map<std::string, Block> &blocks, const std::string &line) {
  std::istringstream words(line);
  std::string command, name;
  words >> command;
  if (command == "alloc") {
    return allocate(blocks, words);
  } else if (command == "free") {
    words >> name;
    Block block = blocks[name];
    symbol<Free>("fraglab_torch_free")(block.pointer, block.size, block.device, block.stream);
  } else if (command == "free_address") {
    uintptr_t address = 0;
    int device = 0;
    words >> address >> device;
    symbol<Free>("fraglab_torch_free")(reinterpret_cast<void *>(address), 1, device, nullptr);
  } else if (command == "record_stream") {
    uintptr_t stream = 0;
    words >> name >> stream;
    symbol<void (*)(void *, void *)>("fraglab_torch_record_stream")(
        blocks[name].pointer, reinterpret_cast<void *>(stream));
  } else if (command == "base") {
    size_t offset = 0, size = 0;
    words >> name >> offset;
    char *inside = static_cast<char *>(blocks[name].pointer) + offset;
    void *base = symbol<void *(*)(void *, size_t *)>("fraglab_torch_base_alloc")(inside, &size);
    return std::to_string(reinterpret_cast<uintptr_t>(base)) + " " + std::to_string(size);
  } else if (command == "init") {
    symbol<void (*)(int)>("fraglab_torch_init")(2);
  } else if (command == "reset") {
    symbol<void (*)()>("fraglab_torch_reset")();
  } else if (command == "memory_fraction") {
    double fraction = 0;
    int device = 0;
    words >> fraction >> device;
    symbol<void (*)(double, int)>("fraglab_torch_memory_fraction")(fraction, device);
  } else if (command.rfind("pool_", 0) == 0) {
    return pool(command, words);
  } else if (command == "configure") {
    std::string text = unescaped(words);
    return taken(symbol<char *(*)(const char *)>("fraglab_torch_configure")(text.c_str()));
  } else if (command == "stats" || command == "reset_peaks") {
    int device = 0;
    words >> device;
    if (command == "stats") {
      return taken(symbol<char *(*)(int)>("fraglab_torch_stats")(device));
    }
    symbol<void (*)(int)>("fraglab_torch_reset_peaks")(device);
  } else if (command == "mark" || command == "module_enter" || command == "module_leave") {
    std::string full = "fraglab_torch_" + command, text = unescaped(words);
    symbol<void (*)(const char *)>(full.c_str())(text.c_str());
  } else if (command == "finish") {
    return taken(symbol<char *(*)()>("fraglab_torch_finish")());
  } else if (command == "version") {
    return symbol<const char *(*)()>("fraglab_torch_version")() + std::string(" ") +
           std::to_string(symbol<int (*)()>("fraglab_torch_interface")());
  } else if (command == "fill") {
    // Only where pointers point to memory of the host: on the fake driver.
    int value = 0;
    words >> name >> value;
    std::memset(blocks[name].pointer, value, blocks[name].size);
  } else if (command == "filled") {
    int value = 0;
    words >> name >> value;
    Block block = blocks[name];
    const char *bytes = static_cast<const char *>(block.pointer);
    size_t same = 0;
    while (same < block.size && bytes[same] == char(value)) {
      same++;
    }
    return same == block.size ? "whole" : "differs at " + std::to_string(same);
  } else if (command == "kernel") {
    words >> name;
    Block block = blocks[name];
    fake<void (*)(uint64_t, size_t)>("fake_cuda_kernel")(
        reinterpret_cast<uint64_t>(block.pointer), block.size);
  } else if (command == "synchronizes") {
    return std::to_string(fake<uint64_t (*)()>("fake_cuda_synchronizes")());
  } else if (command == "capture") {
    words >> name;
    return fake<int (*)(int)>("fake_cuda_capture")(name == "on") ? "spoiled" : "whole";
  } else if (command == "hammer") {
    int threads = 0, rounds = 0;
    words >> threads >> rounds;
    return hammer(threads, rounds);
  } else if (command == "bench") {
    int live = 0;
    long rounds = 0;
    words >> live >> rounds;
    return bench(live, rounds);
  } else if (command == "torch_alloc") {
    // As PyTorch's libraries are in Python: loaded privately, with an exception of their own.
    std::string path;
    size_t size = 0;
    words >> path >> size;
    void *catcher = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!catcher) {
      return dlerror();
    }
    auto attempt = reinterpret_cast<const char *(*)(Alloc, size_t)>(dlsym(catcher, "attempt"));
    return attempt(symbol<Alloc>("fraglab_torch_alloc"), size);
  } else {
    return "unknown command";
  }
  return "done";
}

} // namespace

int main(int, char **arguments) {
  library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    std::printf("%s\n", dlerror());
    return 2;
  }
  std::map<std::string, Block> blocks;
  for (std::string line; std::getline(std::cin, line);) {
    std::printf("%s\n", run(blocks, line).c_str());
    std::fflush(stdout);
  }
}
