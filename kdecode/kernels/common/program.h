// A program: the native steps of a plan in order, run by one call.
#pragma once

#include <vector>

#include "threads.h"

namespace kdecode {

using StepFunction = void (*)(const void* args, Worker&);

class Program {
 public:
  explicit Program(Pool& pool) : pool_(pool) {}

  // `args` must outlive the program; it is read on every run.
  void add(StepFunction function, const void* args) { steps_.push_back({function, args}); }
  int size() const { return static_cast<int>(steps_.size()); }
  // Runs steps [first, last), with a barrier after each; std::out_of_range unless 0 <= first <= last <= size().
  void run(int first, int last);

 private:
  struct Entry {
    StepFunction function;
    const void* args;
  };
  Pool& pool_;
  std::vector<Entry> steps_;
};

}  // namespace kdecode
