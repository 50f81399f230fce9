"""Define the pytest plugin for tests that must not synchronise with the GPU, or only a limited number of times.

    @pytest.mark.no_cuda_sync
    @pytest.mark.max_cuda_syncs(2, allow=["engine.sampler.*"])
    def test_step(): …

    def test_counts(cuda_syncs): …; assert cuda_syncs.count == 1

Every pytest run on a machine with dcpbench loads this file: it imports nothing but pytest until a test uses it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import unittest
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from dcpbench.syncs.live.checked import SyncCheck

MODES = ("auto", "live", "dry-run", "off")
INI = "cuda_sync_mode"
FIXTURE = "cuda_syncs"
NO, MAX = "no_cuda_sync", "max_cuda_syncs"
CHECKED: pytest.StashKey[SyncCheck] = pytest.StashKey()
UNUSED = "cuda_syncs_unused"  # property of a test that put nothing on the virtual GPU
UNMEASURED = "cuda_syncs_unmeasured"  # property of a test that uses operators that were never measured: their names


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the ini setting of the same name."""
    parser.addini(INI, "auto, live, dry-run or off: how CUDA synchronisation is looked for in marked tests")
    parser.getgroup("dcpbench").addoption(
        "--cuda-sync-mode",
        metavar="MODE",
        default=None,
        help="How marked tests are checked for CUDA synchronisation: auto (live where there is a CUDA device, else by "
        f"a dry run), live, dry-run or off. Default: {INI} of the ini file, else auto.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, and refuse an unknown mode."""
    config.addinivalue_line("markers", f"{NO}(*, allow=[], threads='current'): the test must not wait for the GPU.")
    config.addinivalue_line(
        "markers", f"{MAX}(n, *, allow=[], threads='current'): the test may wait for the GPU n times, not more often."
    )
    if get_mode(config) not in MODES:
        raise pytest.UsageError(f"cuda_sync_mode = {get_mode(config)!r} is none of {', '.join(MODES)}")


def get_mode(config: pytest.Config) -> str:
    """Return the mode of the command line, else of the configuration."""
    return config.getoption("--cuda-sync-mode") or str(config.getini(INI)) or "auto"


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Read every mark, so that a wrong one ends the run before the first test."""
    for item in items:
        _parse_limit(item)


def pytest_report_collectionfinish(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    """Return which detector is active, if a test uses one."""
    used = sum(_needs_check(item) for item in items)
    if not used or get_mode(config) == "off":
        return [f"cuda syncs: off, tests that are not checked: {used}"] if used else []
    from dcpbench.errors import CapacityError
    from dcpbench.show.text import format_count
    from dcpbench.syncs.live.checked import resolve_mode

    try:
        return [f"cuda syncs: {resolve_mode(get_mode(config))[1]}, {format_count(used, 'test')}"]
    except CapacityError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Set up fixtures inside the dry run, because they create tensors on the GPU; their waits do not count."""
    if _needs_check(item) and get_mode(item.config) != "off":
        from dcpbench.errors import UsageError
        from dcpbench.syncs.live.checked import SyncCheck

        _, allow, threads = _parse_limit(item)
        try:
            checked = SyncCheck(get_mode(item.config), threads=threads, allow=allow, root=item.config.rootpath)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        item.stash[CHECKED] = checked
        item.stash[CHECKED].start()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """End the dry run after the last fixture."""
    try:
        return (yield)
    finally:
        if CHECKED in item.stash:
            item.stash[CHECKED].stop()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Watch the test function, and nothing around it."""
    if CHECKED not in pyfuncitem.stash:
        return (yield)
    with _check_body(pyfuncitem):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Watch methods of unittest.TestCase, which call setUp and tearDown around themselves."""
    if not isinstance(item, pytest.Function) or CHECKED not in item.stash:
        return (yield)
    if item.cls is None or not issubclass(item.cls, unittest.TestCase):
        return (yield)
    original = item.obj
    item.obj = _make_checked_method(item, original)
    if inspect.iscoroutinefunction(original):
        # pytest leaves these to unittest, which takes them from the instance.
        setattr(item.instance, item.name, item.obj)
    try:
        return (yield)
    finally:
        item.obj = original


def pytest_terminal_summary(terminalreporter: Any) -> None:  # noqa: ANN401  (a class private to pytest)
    """Name the tests that never touched the GPU, and operators that were never measured: these tests prove less."""
    reports = [r for group in terminalreporter.stats.values() for r in group if isinstance(r, pytest.TestReport)]
    called = [r for r in reports if r.when == "call"]
    unused = [r.nodeid for r in called if (UNUSED, True) in r.user_properties]
    unmeasured = [(r.nodeid, value) for r in called for name, value in r.user_properties if name == UNMEASURED]
    if unused or unmeasured:
        terminalreporter.section("cuda syncs")
    if unused:
        terminalreporter.line("These tests put nothing on the virtual GPU, so that nothing could synchronise in them.")
        terminalreporter.line("Let them make their tensors with device='cuda', inside the test or its fixtures.")
        _write_list(terminalreporter, unused)
    if unmeasured:
        terminalreporter.line("These tests use operators of which it was never measured whether they wait.")
        terminalreporter.line("None of their waits is counted; run the tests with --cuda-sync-mode live on a GPU.")
        _write_list(terminalreporter, [f"{nodeid}: {names}" for nodeid, names in unmeasured])


def _write_list(terminalreporter: Any, lines: Sequence[str]) -> None:  # noqa: ANN401  (a class private to pytest)
    """Write indented lines and a blank line, which separates them from further indented lines of pytest."""
    for line in lines:
        terminalreporter.line(f"  {line}")
    terminalreporter.line("")


@pytest.fixture(name=FIXTURE)
def cuda_syncs(request: pytest.FixtureRequest) -> SyncCheck:
    """Return what synchronises with the GPU in this test: `count`, `syncs`, `text()` and `report()`."""
    from dcpbench.syncs.live.checked import SyncCheck

    item: pytest.Item = request.node
    return item.stash[CHECKED] if CHECKED in item.stash else SyncCheck("off", threads="current", allow=())


def _make_checked_method(item: pytest.Function, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def run_coroutine(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the test's own)
        with _check_body(item):
            return await method(*args, **kwargs)

    return run_coroutine if inspect.iscoroutinefunction(method) else _check_body(item)(method)


@contextlib.contextmanager
def _check_body(item: pytest.Item) -> Iterator[None]:
    """Watch the body, and fail a test that passed but synchronised more often than its mark allows; the lines are the
    message.
    """
    checked = item.stash[CHECKED]
    with checked.record_call():
        yield
    limit = _parse_limit(item)[0]  # a test may mark itself
    item.user_properties.append((FIXTURE, checked.count))
    if checked.unused:
        item.user_properties.append((UNUSED, True))
    if checked.unmeasured:
        item.user_properties.append((UNMEASURED, ", ".join(checked.unmeasured)))
    if limit is not None and checked.count > limit:
        allowed = f"at most {limit}" if limit else "none"
        times = "1 CUDA synchronisation" if checked.count == 1 else f"{checked.count} CUDA synchronisations"
        pytest.fail(f"{times} where {allowed} may be, {checked.reason}:\n\n{checked.text()}", pytrace=False)


def _needs_check(item: pytest.Item) -> bool:
    return _find_mark(item) is not None or FIXTURE in getattr(item, "fixturenames", ())


def _find_mark(item: pytest.Item) -> pytest.Mark | None:
    """Return the mark that is closest to the test: its own takes precedence over its class's."""
    return next((mark for mark in item.iter_markers() if mark.name in {NO, MAX}), None)


def _parse_limit(item: pytest.Item) -> tuple[int | None, tuple[str, ...], str]:
    """Return (maximum synchronisations, functions that may synchronise, threads) of a test; None for any number."""
    mark = _find_mark(item)
    if mark is None:
        return None, (), "current"
    try:
        return (no_cuda_sync if mark.name == NO else max_cuda_syncs)(*mark.args, **mark.kwargs)
    except (TypeError, ValueError) as error:
        usage = (
            f"{NO} or {NO}(allow=['engine.sampler.*'])" if mark.name == NO else f"{MAX}(2, allow=['engine.sampler.*'])"
        )
        raise pytest.UsageError(f"{item.nodeid}: {error}; write @pytest.mark.{usage}") from None


def no_cuda_sync(*, allow: Sequence[str] = (), threads: str = "current") -> tuple[int, tuple[str, ...], str]:
    """Return the limit of a mark; Python's error about its arguments names the function, which is named as the mark."""
    return max_cuda_syncs(0, allow=allow, threads=threads)


def max_cuda_syncs(n: int, *, allow: Sequence[str] = (), threads: str = "current") -> tuple[int, tuple[str, ...], str]:
    """Return the limit of a mark; raise ValueError for values that it cannot have."""
    given: object = n
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise ValueError(f"{n!r} is no number of synchronisations")
    globs: Sequence[object] = allow
    if isinstance(allow, str) or not all(isinstance(glob, str) and glob.strip() for glob in globs):
        raise ValueError(f"allow={allow!r} is no list of globs")
    if threads not in {"current", "all"}:
        raise ValueError(f"threads={threads!r} is neither 'current' nor 'all'")
    return n, tuple(allow), threads
