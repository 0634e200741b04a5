"""Running a coroutine from anywhere: in scripts, and in notebooks, whose own event loop is running already."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
S = TypeVar("S")


def run_apart(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on an event loop in a thread of its own.

    Both are gone at the end, so that forks after it find neither.

    Args:
        make: Gives the coroutine.

    Returns:
        What the coroutine does; what it raises is raised. Ctrl-C cancels it.
    """
    loop, result = asyncio.new_event_loop(), Future[T]()
    task = loop.create_task(_settle(make, result))
    thread = threading.Thread(target=_turn, args=(loop, task), name="lit_data remote", daemon=True)
    thread.start()
    try:
        return result.result()
    except BaseException:
        if not result.done():
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()


async def call_each(
    call: Callable[[S], Coroutine[Any, Any, T]], items: Sequence[S], most: int
) -> list[T]:
    """Call for each item, and end all calls at the first that raises.

    Args:
        call: Gives the coroutine of an item.
        items: What to call for.
        most: How many calls are under way at a time.

    Returns:
        The results, in the order of the items.
    """
    results: dict[int, T] = {}

    async def work(numbered: Iterator[tuple[int, S]]) -> None:
        for number, item in numbered:
            results[number] = await call(item)

    waiting = iter(enumerate(items))  # one for all
    tasks = [asyncio.ensure_future(work(waiting)) for _ in range(min(most, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[number] for number in range(len(items))]


def _turn(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    try:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _settle(make: Callable[[], Coroutine[Any, Any, T]], result: "Future[T]") -> None:
    try:
        value = await make()
    except asyncio.CancelledError:
        result.cancel()
        raise
    except BaseException as error:
        result.set_exception(error)
    else:
        result.set_result(value)
