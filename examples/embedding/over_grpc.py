"""Bytes over gRPC without generated code (`pip install grpcio`): `serving` and `connect`, as in `over_http`. Use TLS in production."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

SECONDS = 60.0  # for a request and its answer
CONNECTIONS = 512  # requests at a time; more are refused, and try again
METHOD = ("cflpriv.Coordinator", "Receive")
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1), ("grpc.max_reconnect_backoff_ms", 1000)]


@asynccontextmanager
async def serving(
    receive: Callable[[bytes], Awaitable[bytes]], port: int, largest: Callable[[], int], metrics: Callable[[], str] | None = None
) -> AsyncIterator[None]:
    """Answer each call by `receive`, and calls of `Metrics`. `largest`: the most bytes of a request now."""

    async def received(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if len(request) > largest():
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED)
        return await receive(request)

    async def counted(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return metrics().encode() if metrics is not None else b""

    methods = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in ((METHOD[1], received), ("Metrics", counted))}
    server = grpc.aio.server(options=[*OPTIONS, ("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=CONNECTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(METHOD[0], methods),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def connect(port: int) -> Callable[[bytes], Awaitable[bytes]]:
    """A function that sends a request and returns its answer. It raises OSError if there is none."""
    calls = []

    async def exchange(data: bytes) -> bytes:
        if not calls:  # a channel belongs to the loop that is running
            calls.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS).unary_unary("/" + "/".join(METHOD)))
        try:
            return bytes(await calls[0](data, timeout=SECONDS))
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(error.code().name) from error

    return exchange
