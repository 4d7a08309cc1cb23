// The module that Python loads. One translation unit: torch's headers take most of the time that it takes to compile.
#include "checker.cpp"
#include "device.cpp"
#include "kernels.cpp"
#include "collectives.cpp"

namespace emulated {
namespace {

py::object described(const SitePtr& site) {
  if (!site) return py::none();
  auto found = std::static_pointer_cast<const PythonSite>(site);
  return py::make_tuple(found->title, found->lines(), found->of_main_thread);
}

py::list reports() {
  py::list all;
  for (const Report& one : Device::get().checker.reports())
    all.append(py::make_tuple(one.kind, one.text, described(one.later), described(one.earlier), described(one.born)));
  return all;
}

py::dict costs() {
  Costs now;
  {
    std::lock_guard lock(Device::get().mutex);
    now = Device::get().costs;
  }
  py::list waits;
  for (const HostWait& one : now.host_waits) waits.append(described(one.site));
  py::dict all;
  all["kernels"] = now.kernels;
  all["collectives"] = py::cast(now.collectives);
  all["host_waits"] = waits;
  all["allocated_bytes"] = now.allocated;
  all["peak_bytes"] = now.peak;
  return all;
}

void reset_costs() {
  std::lock_guard lock(Device::get().mutex);
  Costs& costs = Device::get().costs;
  costs.kernels = 0;
  costs.collectives.clear();
  costs.host_waits.clear();
  costs.peak = costs.allocated;
}

// The checker by itself, for tests that compare it with a model of what is ordered.
void bind_checker(py::module_& module) {
  struct Held {
    Checker checker;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Moment> moments;
  };
  auto named = [](const std::string& title) {
    auto site = std::make_shared<PythonSite>();
    site->title = title;
    return site;
  };
  py::class_<Held>(module, "Checker")
      .def(py::init([] {
        auto held = std::make_unique<Held>();
        held->checker.begin_test();
        return held;
      }))
      .def("new_stream", [](Held& held) { return held.checker.new_stream(); })
      .def("allocate", [named](Held& held, size_t size, StreamId stream, const std::string& title) {
        held.blocks.push_back(std::make_unique<Block>());
        held.checker.allocated(*held.blocks.back(), size, stream, named(title));
        return held.blocks.size() - 1;
      })
      .def("free", [named](Held& held, size_t block, const std::string& title) { held.checker.freed(*held.blocks.at(block), named(title)); })
      .def("record_stream", [](Held& held, size_t block, StreamId stream) { held.checker.record_stream(*held.blocks.at(block), stream); })
      .def("launch", [named](Held& held, StreamId stream, const std::vector<std::tuple<size_t, int64_t, int64_t, bool>>& uses, const std::string& title) {
        std::vector<Use> found;
        for (auto& [block, begin, end, writes] : uses) found.push_back({held.blocks.at(block).get(), begin, end, writes});
        held.checker.launch(stream, found, named(title));
      })
      .def("record", [](Held& held, StreamId stream) {
        held.moments.push_back(held.checker.now(stream));
        return held.moments.size() - 1;
      })
      .def("wait", [](Held& held, StreamId stream, size_t moment) { held.checker.wait(stream, held.moments.at(moment)); })
      .def("host_wait", [](Held& held, size_t moment) { held.checker.host_wait(held.moments.at(moment)); })
      .def("accesses", [](Held& held, size_t block) { return held.blocks.at(block)->accesses.size(); })
      .def("begin_test", [](Held& held) { held.checker.begin_test(); })
      .def("reports", [](Held& held) {
        std::vector<std::tuple<std::string, std::string, std::string>> all;
        for (const Report& one : held.checker.reports()) all.emplace_back(one.kind, one.later->title, one.earlier->title);
        return all;
      });
}

}  // namespace
}  // namespace emulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace emulated;
  module.def("install", [] {
    install_device();
    install_kernels();
  });
  bind_backend(module);
  bind_checker(module);
  module.def("complete", [](uint64_t ticket, const std::string& error) { Device::get().tickets.complete(ticket, error); },
             py::call_guard<py::gil_scoped_release>());
  module.def("begin_test", [] {
    Device::get().checker.begin_test();
    Device::get().tickets.forget_errors();
    Device::get().checks = true;
    Device::get().forbids_host_waits = false;
    Device::get().taken_from_pool = 0;
    set_current_stream(0);
    reset_costs();
  });
  module.def("unraised_error", [] { return Device::get().tickets.unraised(); });
  module.def("raised_errors", [] { return Device::get().tickets.raised(); });
  module.def("reports", &reports);
  module.def("costs", &costs);
  module.def("reset_costs", &reset_costs);
  module.def("check_accesses", [](bool on) { Device::get().checks = on; });
  module.def("forbid_host_waits", [](bool on) { return Device::get().forbids_host_waits.exchange(on); });
  module.def("drop_edge", [](const std::vector<std::string>& frames) {
    Device::get().watches_edges = true;
    Device::get().dropped_edge = frames;
  });
  module.def("edges", [] {
    std::lock_guard lock(Device::get().mutex);
    return std::vector<std::vector<std::string>>(Device::get().edges.begin(), Device::get().edges.end());
  });
}
