"""Bytes over HTTP/1.1 with the standard library: `serving` a coordinator or a helper, `connect` to it. Use TLS in production."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

SECONDS = 60.0  # for a request and its answer
CONNECTIONS = 512  # more are closed at once, and try again
NO_ANSWER = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


@asynccontextmanager
async def serving(
    receive: Callable[[bytes], Awaitable[bytes]], port: int, largest: Callable[[], int], metrics: Callable[[], str] | None = None
) -> AsyncIterator[None]:
    """Answer each POST by `receive`, and GET /metrics. `largest`: the most bytes of a request now."""
    free = asyncio.Semaphore(CONNECTIONS)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not free.locked():
                async with free, asyncio.timeout(SECONDS):
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    if head.startswith(b"get /metrics ") and metrics is not None:
                        answer = metrics().encode()
                    elif head.startswith(b"post / "):
                        length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
                        if not 0 <= length <= largest():
                            return
                        answer = await receive(await reader.readexactly(length))
                    else:
                        return
                    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
                    await writer.drain()
        except (OSError, TimeoutError, *NO_ANSWER):
            pass  # the other side went away, or sent no request
        finally:
            writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", port, backlog=CONNECTIONS):
        yield


def connect(port: int) -> Callable[[bytes], Awaitable[bytes]]:
    """A function that sends a request and returns its answer. It raises OSError or TimeoutError if there is none."""

    async def exchange(data: bytes) -> bytes:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
                await writer.drain()
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                return await reader.readexactly(int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]))
            except NO_ANSWER as error:
                raise ConnectionError("no answer") from error
            finally:
                writer.close()

    return exchange
