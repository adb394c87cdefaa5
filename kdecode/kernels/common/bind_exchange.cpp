#include <nanobind/stl/optional.h>

#include <stdexcept>
#include <string>

#include "bind.h"
#include "exchange.h"

namespace kdecode {

namespace {

int checked(const SharedExchange& exchange, int rank) {
  if (rank >= 0 && rank < exchange.size()) return rank;
  throw std::out_of_range("Rank " + std::to_string(rank) + " of " + std::to_string(exchange.size()) + " does not exist.");
}

}  // namespace

void bind_shared_exchange(nb::module_& module) {
  nb::class_<ExchangeFailure> failure(module, "ExchangeFailure", "Who waited for whom, in vain.");
  nb::enum_<ExchangeFailure::Reason>(failure, "Reason")
      .value("silent", ExchangeFailure::kSilent)
      .value("late", ExchangeFailure::kLate)
      .value("reported", ExchangeFailure::kReported);
  failure.def_ro("reason", &ExchangeFailure::reason)
      .def_ro("waiter", &ExchangeFailure::waiter)
      .def_ro("awaited", &ExchangeFailure::awaited)
      .def_ro("number", &ExchangeFailure::number);
  nb::class_<SharedExchange>(module, "SharedExchange", "One rank's end of the memory in which ranks exchange their parts.")
      .def(nb::init<int, int, int, std::int64_t, bool, double, double>(), nb::arg("fd"), nb::arg("rank"), nb::arg("size"),
           nb::arg("part_bytes"), nb::arg("can_spin"), nb::arg("silence_s"), nb::arg("patience_s"))
      .def_static("segment_bytes", &SharedExchange::segment_bytes, nb::arg("size"), nb::arg("part_bytes"))
      .def_prop_ro("rank", &SharedExchange::rank)
      .def_prop_ro("size", &SharedExchange::size)
      .def_prop_ro("part_bytes", &SharedExchange::part_bytes)
      .def_prop_ro("silence_s", &SharedExchange::silence_s)
      .def_prop_ro("patience_s", &SharedExchange::patience_s)
      .def_prop_ro("number", &SharedExchange::number)
      .def_prop_ro("failure", &SharedExchange::failure)
      .def("heartbeat", [](const SharedExchange& self, int rank) { return self.heartbeat(checked(self, rank)); }, nb::arg("rank"))
      .def("fail", [](SharedExchange& self, int awaited) { self.fail(checked(self, awaited)); }, nb::arg("awaited"));
}

}  // namespace kdecode
