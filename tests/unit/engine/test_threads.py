"""Threads that share clients: one a core, fewer where the environment or other processes want it, and no error is lost."""

from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from cflpriv.engine import threads

WHERE: ContextVar[str] = ContextVar("where", default="outside")


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(threads, "cores", lambda: 4)
    monkeypatch.setattr(threads, "_SHARED", [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads._allowed.cache_clear()
    yield monkeypatch
    threads._allowed.cache_clear()


@pytest.mark.parametrize(("allowed", "most"), [("", 4), ("3", 3), ("9", 4), ("1", 1), ("2,1", 2), ("many", 4)])
def test_there_is_a_thread_a_core_unless_the_environment_allows_fewer(allowed: str, most: int, four_cores: pytest.MonkeyPatch) -> None:
    four_cores.setenv("OMP_NUM_THREADS", allowed)
    for parts in (1, 2, 100):
        calls: list[str] = []
        threads.together(lambda: calls.append(WHERE.get()), parts)  # noqa: B023
        assert calls == ["outside"] * min(parts, most)


@pytest.mark.usefixtures("four_cores")
def test_threads_see_the_context_of_the_caller() -> None:
    calls: list[str] = []
    token = WHERE.set("inside")
    try:
        threads.together(lambda: calls.append(WHERE.get()), 3)
    finally:
        WHERE.reset(token)
    assert calls == ["inside"] * 3


@pytest.mark.usefixtures("four_cores")
def test_a_process_beside_others_takes_one_core() -> None:
    calls: list[int] = []
    threads.one_core()
    threads.together(lambda: calls.append(1), 100)
    assert calls == [1]


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_an_error_of_any_thread_is_raised_after_all_have_ended(failing: int) -> None:
    waiting, ended = iter(range(4)), list[int]()

    def one() -> None:
        place = next(waiting)
        ended.append(place)
        if place == failing:
            raise ValueError(f"thread {place}")

    with pytest.raises(ValueError, match=f"thread {failing}"):
        threads.together(one, 100)
    assert sorted(ended) == [0, 1, 2, 3]
