#include "program.h"

#include <stdexcept>
#include <string>

namespace kdecode {

void Program::run(int first, int last) {
  if (first < 0 || last < first || last > size()) {
    throw std::out_of_range("Steps [" + std::to_string(first) + ", " + std::to_string(last) + ") of a program of " +
                            std::to_string(size()) + " steps do not exist.");
  }
  if (first == last) return;
  struct Range {
    const Entry* first;
    const Entry* last;
  } range{steps_.data() + first, steps_.data() + last};
  pool_.run(
      [](void* context, Worker& worker) {
        const Range& range = *static_cast<const Range*>(context);
        for (const Entry* entry = range.first; entry != range.last; ++entry) {
          if (entry != range.first) worker.barrier();  // the end of the job is the last step's
          entry->function(entry->args, worker);
        }
      },
      &range);
}

}  // namespace kdecode
