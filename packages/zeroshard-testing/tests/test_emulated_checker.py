"""What the emulated accelerator's checker finds: as a model by brute force does, and case by case on the device."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zeroshard_testing.emulated.runtime import begin_test, extension, findings

pytestmark = pytest.mark.exhaustive

MOST_REPORTS = 100
ON_ONE_RANK = pytest.mark.ranks(
    1, backend="emulated", checks="no:races", reason="the test looks at what has been found by itself"
)


# The checker by itself, against a model.


class Model:
    """What comes before what, as the set of all launches that do, and by it every conflict that nothing orders."""

    def __init__(self, streams: int) -> None:
        self.known: list[frozenset[int]] = [frozenset()] * streams
        self.host: frozenset[int] = frozenset()
        self.moments: list[frozenset[int]] = []
        self.homes: list[int] = []
        self.sizes: list[int] = []
        self.uses: list[list[tuple[int, int, int, bool, int]]] = []
        self.recorded: list[set[int]] = []
        self.freed: dict[int, frozenset[int]] = {}
        self.launches = 0
        self.races: set[tuple[str, str]] = set()
        self.freed_in_use: set[tuple[str, str]] = set()

    def before(self, stream: int) -> frozenset[int]:
        return self.known[stream] | self.host

    def allocate(self, size: int, stream: int) -> None:
        for block in [one for one in self.freed if self.homes[one] == stream and size]:
            unfinished = self.freed[block] - self.before(stream)
            if unfinished and size > math.ceil(self.sizes[block] / 512) * 512:
                continue
            self.freed_in_use.update((f"free {block}", str(launch)) for launch in unfinished)
            del self.freed[block]
        self.homes.append(stream)
        self.sizes.append(size)
        self.uses.append([])
        self.recorded.append(set())

    def free(self, block: int) -> None:
        # The allocator waits for all that these streams have been given.
        ended = self.before(self.homes[block]).union(*map(self.before, self.recorded[block]))
        self.freed[block] = frozenset(launch for *_, launch in self.uses[block]) - ended

    def launch(self, stream: int, uses: list[tuple[int, int, int, bool]]) -> None:
        number, before = self.launches, self.before(stream)
        self.launches += 1
        for block, begin, end, writes in uses:
            for other_begin, other_end, other_writes, other in self.uses[block]:
                overlaps = begin < other_end and other_begin < end
                if overlaps and (writes or other_writes) and other != number and other not in before:
                    self.races.add((str(number), str(other)))
            self.uses[block].append((begin, end, writes, number))
        self.known[stream] = before | {number}


STREAMS = st.integers(0, 3)
BLOCKS = st.integers(0, 2)
USES = st.tuples(BLOCKS, st.integers(0, 7), st.integers(1, 4), st.booleans())
LAUNCHES = st.tuples(st.just("launch"), STREAMS, st.lists(USES, min_size=1, max_size=3))
ORDERS = st.one_of(
    st.tuples(st.just("record"), STREAMS),
    st.tuples(st.just("wait"), STREAMS, st.integers(0, 5)),
    st.tuples(st.just("host_wait"), st.integers(0, 5)),
)
MEMORY = st.one_of(
    st.tuples(st.just("renew"), BLOCKS, STREAMS, st.sampled_from([0, 8, 512, 513, 2000])),
    st.tuples(st.just("record_stream"), BLOCKS, STREAMS),
)


def run(program: list[tuple[Any, ...]]) -> tuple[Model, list[tuple[str, str, str]]]:
    """Run a program on the checker and on the model; of moments, the latest are waited for."""
    checker, model = extension().Checker(), Model(4)
    streams = [0, *(checker.new_stream() for _ in range(3))]
    assert len(set(streams)) == 4

    def allocate(size: int, stream: int) -> int:
        model.allocate(size, stream)
        return checker.allocate(size, streams[stream], f"allocation {len(model.homes)}")

    blocks = [allocate(8, stream) for stream in range(3)]
    for what, *arguments in program:
        if what == "launch":
            stream, drawn = arguments
            uses = [(blocks[place], begin, begin + size, writes) for place, begin, size, writes in drawn]
            title = str(model.launches)
            model.launch(stream, uses)
            checker.launch(streams[stream], uses, title)
        elif what == "record":
            model.moments.append(model.before(arguments[0]))
            assert checker.record(streams[arguments[0]]) == len(model.moments) - 1
        elif what == "renew":
            place, stream, size = arguments
            model.free(blocks[place])
            checker.free(blocks[place], f"free {blocks[place]}")
            blocks[place] = allocate(size, stream)
        elif what == "record_stream":
            place, stream = arguments
            model.recorded[blocks[place]].add(stream)
            checker.record_stream(blocks[place], streams[stream])
        elif model.moments:
            moment = max(0, len(model.moments) - 1 - arguments[-1])
            if what == "wait":
                model.known[arguments[0]] |= model.moments[moment]
                checker.wait(streams[arguments[0]], moment)
            else:
                model.host |= model.moments[moment]
                checker.host_wait(moment)
    return model, checker.reports()


def check(program: list[tuple[Any, ...]]) -> Model:
    """Hold what the checker reports against the model: the same accesses and frees, and no pair that is ordered."""
    model, reports = run(program)
    for name, expected in (("race", model.races), ("freed in use", model.freed_in_use)):
        found = {(later, earlier) for kind, later, earlier in reports if kind == name}
        assert found <= expected
        # What the checker no longer keeps comes before something that it does keep, so some pair is left of each.
        if len(reports) < MOST_REPORTS:
            assert {later for later, _ in found} == {later for later, _ in expected}
    return model


EXAMPLES = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@ON_ONE_RANK
@settings(EXAMPLES, max_examples=1000)
@given(st.lists(st.one_of(LAUNCHES, ORDERS), max_size=30))
def test_a_race_is_reported_where_the_model_finds_one(program):
    check(program)


@ON_ONE_RANK
@settings(EXAMPLES, max_examples=1000)
@given(st.lists(st.one_of(LAUNCHES, ORDERS, MEMORY), max_size=30))
def test_memory_freed_in_use_is_reported_where_the_model_finds_it(program):
    check(program)


@ON_ONE_RANK
@pytest.mark.parametrize("waits", [0.3, 0.6, 0.9])
def test_drawn_programs_show_both_what_is_ordered_and_what_is_not(waits):
    drawn, seen = random.Random(0), Counter()
    for _ in range(400):
        program = []
        for _ in range(15):
            stream = drawn.randrange(4)
            if drawn.random() < 0.3:
                size = drawn.choice([8, 512, 513, 2000])
                place = drawn.randrange(3)
                is_renewed = drawn.random() < 0.5
                program.append(("renew", place, stream, size) if is_renewed else ("record_stream", place, stream))
            if drawn.random() < waits:
                program += [("record", drawn.randrange(4)), ("wait", stream, 0)]
            use = (drawn.randrange(3), drawn.randrange(6), drawn.randrange(1, 3), drawn.random() < 0.4)
            program.append(("launch", stream, [use]))
        model = check(program)
        seen += Counter(race=bool(model.races), freed=bool(model.freed_in_use), right=not model.races)
    assert all(seen[name] > 10 for name in ("race", "freed", "right")), seen


@ON_ONE_RANK
@pytest.mark.parametrize("share_of_writes", [0, 0.1, 1])
def test_few_accesses_are_kept_of_long_programs_that_are_ordered(share_of_writes):
    checker, drawn = extension().Checker(), random.Random(0)
    streams = [0, *(checker.new_stream() for _ in range(3))]
    block = checker.allocate(64, 0, "allocation")
    most = 0
    for number in range(5000):
        stream = drawn.choice(streams)
        begin, end = sorted(drawn.sample(range(65), 2))
        checker.launch(stream, [(block, begin, end, drawn.random() < share_of_writes)], str(number))
        moment = checker.record(stream)
        for other in streams:
            checker.wait(other, moment)
        most = max(most, checker.accesses(block))
    assert most < 100
    assert checker.reports() == []


@ON_ONE_RANK
def test_few_accesses_are_kept_where_streams_take_turns():
    checker = extension().Checker()
    side = checker.new_stream()
    block = checker.allocate(64, 0, "allocation")
    for number in range(1000):
        for here, other in ((0, side), (side, 0)):
            checker.wait(here, checker.record(other))
            checker.launch(here, [(block, 0, 64, number % 10 == 0)], str(number))
    assert checker.accesses(block) < 5
    assert checker.reports() == []


@ON_ONE_RANK
def test_a_new_test_forgets_the_last_one():
    checker = extension().Checker()
    side = checker.new_stream()
    block, freed = checker.allocate(8, 0, "kept"), checker.allocate(8, 0, "freed")
    checker.launch(side, [(block, 0, 8, True), (freed, 0, 8, True)], "write")
    checker.record_stream(block, side)
    old = checker.record(side)
    checker.free(freed, "free")
    checker.begin_test()
    assert checker.reports() == []
    checker.launch(0, [(block, 0, 8, True)], "write in the next test")
    checker.allocate(8, 0, "takes what was freed")
    assert checker.reports() == []

    # A moment of the last test orders nothing in this one.
    checker.launch(side, [(block, 0, 4, False)], "read")
    checker.wait(0, old)
    checker.host_wait(old)
    checker.launch(0, [(block, 0, 4, True)], "write that is not ordered")
    assert [report[0] for report in checker.reports()] == ["race", "race"]
    # Nor does record_stream.
    checker.free(block, "free")
    checker.allocate(8, 0, "again")
    assert [report[0] for report in checker.reports()] == ["race", "race", "freed in use"]


@ON_ONE_RANK
def test_each_pair_of_places_is_reported_once():
    checker = extension().Checker()
    side = checker.new_stream()
    block = checker.allocate(8, 0, "allocation")
    for _ in range(3):
        checker.launch(0, [(block, 0, 8, True)], "here")
        checker.launch(side, [(block, 0, 8, True)], "there")
    assert Counter(checker.reports()) == Counter([("race", "there", "here"), ("race", "here", "there")])


# On the device. Each program is right with its edge, and without it something is found.


def ones(device: torch.device) -> torch.Tensor:
    return torch.ones(1000, device=device)


class Streams:
    """The current stream and two others."""

    def __init__(self, device: torch.device) -> None:
        self.current = torch.accelerator.current_stream()
        self.side, self.other = torch.Stream(device), torch.Stream(device)
        self.device = device

    def written_aside(self) -> torch.Tensor:
        """Return what the side stream has written, after it has waited for the current one."""
        x = ones(self.device)
        self.side.wait_stream(self.current)
        with self.side:
            x.add_(1)
        return x


def joins_the_side_stream(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    if edge:
        on.current.wait_stream(on.side)
    x.sum()


def waits_for_the_current_stream(on: Streams, edge: bool) -> None:
    x = ones(on.device)
    if edge:
        on.side.wait_stream(on.current)
    with on.side:
        x * 2


def records_its_event_after_the_write(on: Streams, edge: bool) -> None:
    x = ones(on.device)
    event = torch.Event(on.device)
    on.side.wait_stream(on.current)
    with on.side:
        if not edge:
            event.record()
        x.add_(1)
        if edge:
            event.record()
    on.current.wait_event(event)
    x.sum()


def records_its_event_again(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    event = on.side.record_event()
    with on.side:
        x.add_(1)
    if edge:
        event.record(on.side)
    on.current.wait_event(event)
    x.sum()


def waits_on_the_stream_that_reads(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    (on.current if edge else on.other).wait_stream(on.side)
    x.sum()


def waits_by_way_of_another_stream(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    on.other.wait_stream(on.side)
    if edge:
        on.current.wait_stream(on.other)
    x.sum()


def writes_disjoint_parts(on: Streams, edge: bool) -> None:
    x = ones(on.device)
    on.side.wait_stream(on.current)
    with on.side:
        x[:500].add_(1)
    x[500 if edge else 499 :].add_(1)


def only_reads(on: Streams, edge: bool) -> None:
    x = ones(on.device)
    on.side.wait_stream(on.current)
    with on.side:
        x * 2
    if edge:
        x * 3
    else:
        x.mul_(3)


def writes_a_view(on: Streams, edge: bool) -> None:
    x = ones(on.device)
    view = x.view(10, 100)[3]
    on.side.wait_stream(on.current)
    with on.side:
        view.zero_()
    if edge:
        on.current.wait_stream(on.side)
    x.sum()


def writes_by_a_foreach_operator(on: Streams, edge: bool) -> None:
    xs = [ones(on.device) for _ in range(3)]
    on.side.wait_stream(on.current)
    with on.side:
        torch._foreach_add_(xs, 1)
    if edge:
        on.current.wait_stream(on.side)
    xs[2].sum()


def copies_from_the_host_aside(on: Streams, edge: bool) -> None:
    with on.side:
        x = torch.ones(1000).pin_memory().to(on.device, non_blocking=True)
    if edge:
        on.current.wait_stream(on.side)
    x.sum()


def records_the_stream_that_uses_it(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    if edge:
        x.record_stream(on.side)
    del x
    ones(on.device)


def records_the_current_stream_for_memory_of_another(on: Streams, edge: bool) -> None:
    with on.side:
        x = ones(on.device)
    on.current.wait_stream(on.side)
    x.sum()
    if edge:
        x.record_stream(on.current)
    del x
    with on.side:
        ones(on.device)


def records_a_stream_that_comes_after_the_use(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    if edge:
        on.other.wait_stream(on.side)
    x.record_stream(on.other)
    del x
    ones(on.device)


def joins_before_it_frees(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    if edge:
        on.current.wait_stream(on.side)
    del x
    ones(on.device)


def joins_before_it_allocates(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    del x
    if edge:
        on.current.wait_stream(on.side)
    ones(on.device)


def allocates_more_than_was_freed(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    del x
    # 4,000 bytes take a block of 4,096.
    torch.empty(1025 if edge else 1024, device=on.device)


def allocates_on_another_stream(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    del x
    on.other.wait_stream(on.current)
    with on.other if edge else on.current:
        ones(on.device)


def joins_before_it_resizes_a_storage(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    if edge:
        on.current.wait_stream(on.side)
    x.untyped_storage().resize_(0)
    ones(on.device)


def joins_before_it_enlarges_a_storage(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    if edge:
        on.current.wait_stream(on.side)
    # It copies what is there.
    x.untyped_storage().resize_(8000)


def lets_the_host_wait_for_the_stream(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    (on.side if edge else on.other).synchronize()
    x.sum()


def lets_the_host_wait_before_another_stream_reads(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    (on.side if edge else on.current).synchronize()
    with on.other:
        x.sum()


def lets_the_host_wait_for_an_event(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    event = on.side.record_event()
    if not edge:
        with on.side:
            x.add_(1)
    event.synchronize()
    x.sum()


def lets_the_host_wait_for_the_device(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    if edge:
        torch.accelerator.synchronize()
    x.sum()


def takes_a_number_on_the_side_stream(on: Streams, edge: bool) -> None:
    x, y = on.written_aside(), ones(on.device)
    with on.side if edge else on.current:
        (x if edge else y)[0].item()
    x.sum()


def copies_to_the_host_on_the_side_stream(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    with on.side:
        if edge:
            x.cpu()
        else:
            torch.empty(1000, pin_memory=True).copy_(x, non_blocking=True)
    x.sum()


def polls_an_event_until_it_has_passed(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    event = on.side.record_event()
    for _ in range(100):
        if event.query() or not edge:
            break
    assert event.query() if edge else True
    x.sum()


def polls_a_stream_until_it_is_done(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    for _ in range(100):
        if on.side.query() or not edge:
            break
    x.sum()


def waits_for_a_future(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    future = torch.futures.Future(devices=[on.device])
    with on.side:
        future.set_result(x)
    (future.wait() if edge else future.value()).sum()


def waits_for_what_follows_a_future(on: Streams, edge: bool) -> None:
    x = on.written_aside()
    future = torch.futures.Future(devices=[on.device])
    after = future.then(lambda done: done.value().mul_(2))
    with on.side:
        future.set_result(x)
    (after if edge else future).wait().sum()


def trains_on_the_side_stream(on: Streams, edge: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1000, device=on.device))
    if edge:
        on.side.wait_stream(on.current)
    with on.side:
        loss = (weight * 2).sum()
        loss.backward()
    on.current.wait_stream(on.side)
    weight.grad.sum()


def lets_autograd_return_to_the_current_stream(on: Streams, edge: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1000, device=on.device))
    on.side.wait_stream(on.current)
    with on.side:
        loss = (weight * 2).sum()
    on.current.wait_stream(on.side)
    # The backward runs where the forward ran, and the current stream waits for it.
    with on.current if edge else on.side:
        loss.backward()
    weight.grad.sum()


RACES: list[Callable[[Streams, bool], None]] = [
    joins_the_side_stream,
    waits_for_the_current_stream,
    records_its_event_after_the_write,
    records_its_event_again,
    waits_on_the_stream_that_reads,
    waits_by_way_of_another_stream,
    writes_disjoint_parts,
    only_reads,
    writes_a_view,
    writes_by_a_foreach_operator,
    copies_from_the_host_aside,
    joins_before_it_enlarges_a_storage,
    lets_the_host_wait_for_the_stream,
    lets_the_host_wait_before_another_stream_reads,
    lets_the_host_wait_for_an_event,
    lets_the_host_wait_for_the_device,
    takes_a_number_on_the_side_stream,
    copies_to_the_host_on_the_side_stream,
    polls_an_event_until_it_has_passed,
    polls_a_stream_until_it_is_done,
    waits_for_a_future,
    waits_for_what_follows_a_future,
    trains_on_the_side_stream,
    lets_autograd_return_to_the_current_stream,
]
FREED: list[Callable[[Streams, bool], None]] = [
    records_the_stream_that_uses_it,
    records_the_current_stream_for_memory_of_another,
    records_a_stream_that_comes_after_the_use,
    joins_before_it_frees,
    joins_before_it_allocates,
    allocates_more_than_was_freed,
    allocates_on_another_stream,
    joins_before_it_resizes_a_storage,
]


CASES = [(one, "race") for one in RACES] + [(one, "freed in use") for one in FREED]


@ON_ONE_RANK
@pytest.mark.parametrize(("program", "kind"), CASES, ids=[one.__name__ for one, _ in CASES])
def test_a_program_is_right_that(device, program, kind):
    program(Streams(device), True)
    assert findings() == []
    begin_test()
    program(Streams(device), False)
    assert {one.kind for one in findings()} == {kind}


@ON_ONE_RANK
def test_findings_name_both_places_and_the_allocation(device):
    x = ones(device)  # allocation
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)  # write
    x.sum()  # read
    (found,) = findings()
    assert found.text == "a read on the default stream is not ordered after a write on side stream 1 of the same memory"
    lines = {place: _line(f"# {place}") for place in ("read", "write")}
    assert found.later.title == "aten::sum"
    assert found.later.call_site == f"{__file__}:{lines['read']}"
    assert found.earlier.title == "aten::add_"
    assert found.earlier.call_site == f"{__file__}:{lines['write']}"
    assert found.born.title == "allocation of 4000 bytes"
    assert found.born.frames[0][2] == "ones"
    assert f"{__file__}:{_line('# allocation')} in test_findings_name" in str(found)


@ON_ONE_RANK
def test_memory_that_is_freed_in_use_names_who_freed_it_and_who_uses_it(device):
    side = torch.Stream(device)
    x = ones(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        x.add_(1)  # use
    del x  # free
    y = ones(device)
    (found,) = findings()
    assert "memory was freed while side stream 1 may still use it" in found.text
    assert "record_stream() is missing" in found.text
    assert found.later.call_site == f"{__file__}:{_line('# free')}"
    assert found.earlier.call_site == f"{__file__}:{_line('# use')}"
    del y


def _line(mark: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  {mark}"))


@ON_ONE_RANK
def test_a_loop_is_reported_once_and_another_line_again(device):
    x = ones(device)
    side = torch.Stream(device)
    for _ in range(5):
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x.add_(1)
        x.sum()
    assert len(findings()) == 1
    x.mean()
    assert len(findings()) == 2


@ON_ONE_RANK
def test_a_backward_names_its_autograd_node(device):
    side = torch.Stream(device)
    weight = torch.nn.Parameter(ones(device))
    hidden = weight * weight
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        weight.data.zero_()
    hidden.sum().backward()
    titles = [one.later.title for one in findings()]
    assert "aten::mul in autograd node MulBackward0" in titles
    assert all(one.later.call_site for one in findings())


@pytest.mark.ranks(1, backend="emulated")
def test_what_another_test_has_left_is_no_finding():
    assert findings() == []
