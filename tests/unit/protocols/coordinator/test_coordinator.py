"""The coordinator on its loop: sums, restarts, deadlines, attempts, groups, back-pressure, rosters, counters."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cflpriv.protocols.coordinator import (
    Coordinator,
    CoordinatorLimits,
    DurableClient,
    DurableHelper,
    SumPlan,
    UploadSettled,
    UploadTask,
    applied,
    invite,
    join,
    metrics,
    read_roster_version,
    removed,
    renew,
    sign_roster,
    take_part,
)
from cflpriv.protocols.coordinator import messages as c
from cflpriv.protocols.errors import HelpersFailed, LocalError, RemoteError, TooFewClients
from cflpriv.protocols.keys import Identity, Roster
from cflpriv.protocols.one_message import Contribution, HelperPolicy, Policy
from cflpriv.protocols.one_message import messages as m

from .world import AUTHORITY, COORDINATOR, DIMENSION, HOLDERS, IDENTITIES, MODEL, ROSTER, SESSION, levels

PUBLIC = AUTHORITY.public()
PLAN = SumPlan((0, 1, 2, 3), (MODEL,), DIMENSION, 1.0)
QUICK = CoordinatorLimits(retry_seconds=0.02)


@dataclass
class Federation:
    """Parties in one process; `down` are helpers that do not answer."""

    folder: Path
    roster: Roster = ROSTER
    session: bytes = SESSION
    limits: CoordinatorLimits = QUICK
    down: set[int] = field(default_factory=set)
    now: Callable[[], float] = time.time
    names: tuple[bytes, ...] = ()
    helpers: dict[int, DurableHelper] = field(default_factory=dict)

    def helper(self, number: int, identity: Identity | None = None) -> DurableHelper:
        place = self.folder / f"helper{number}"
        return DurableHelper(place, identity or HOLDERS[number], PUBLIC, COORDINATOR.public(), HelperPolicy(self.session))

    def start(self, roster: Roster | None = None, version: int = 1) -> Coordinator:
        for number in range(4):
            if number not in self.helpers:
                self.helpers[number] = self.helper(number)

        async def ask(number: int, data: bytes) -> bytes:
            await asyncio.sleep(0)
            if number in self.down:
                raise ConnectionError
            return self.helpers[number].receive(data)

        signed = sign_roster(AUTHORITY, version, self.roster if roster is None else roster)
        return Coordinator(
            self.folder / f"coordinator{self.session.hex()}",
            COORDINATOR,
            PUBLIC,
            self.session,
            ask,
            roster=signed,
            limits=self.limits,
            clock=self.now,
        )

    def client(self, number: int, identity: Identity | None = None) -> DurableClient:
        return DurableClient(self.folder / f"client{number}", identity or IDENTITIES[number], PUBLIC, self.session)

    async def take_part(self, server: Coordinator, number: int, through: int = 0, identity: Identity | None = None) -> None:
        client = self.client(number, identity)
        try:
            await take_part(client, server.receive, work_of(number, self.session, self.names), through=through)
        finally:
            client.close()

    async def upload(self, server: Coordinator, number: int) -> None:
        """A client goes away once its upload has an answer."""
        client = self.client(number)
        while True:
            match client.answered(await server.receive(client.request())):
                case UploadTask() as task:
                    client.enter(task, *await work_of(number, self.session, self.names)(task.slot))
                case UploadSettled():
                    client.close()
                    return
                case seconds:
                    await asyncio.sleep(seconds)

    def close(self) -> None:
        for helper in self.helpers.values():
            helper.close()
        self.helpers.clear()


def work_of(
    number: int, session: bytes = SESSION, names: tuple[bytes, ...] = ()
) -> Callable[[Any], Coroutine[Any, Any, tuple[Policy, Contribution]]]:
    async def work(slot: Any) -> tuple[Policy, Contribution]:
        return Policy(session, "active", MODEL, names=(slot[0], *names)), Contribution(levels(number, slot[0]), is_levels=True)

    return work


def expected(members: Any, number: int) -> list[int]:
    return [int(value) for value in sum(levels(client, number) for client in members)]


def _run(play: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(play, 120))


def test_rounds_and_groups_and_the_same_result_after_a_restart(tmp_path: Path) -> None:
    federation = Federation(tmp_path)

    async def first() -> None:
        async with federation.start() as server:
            clients = [asyncio.create_task(federation.take_part(server, number, through=1)) for number in range(6)]
            groups = [SumPlan(cohort, (MODEL,), DIMENSION, 1.0) for cohort in ((0, 2, 4), (1, 3, 5))]
            both = await asyncio.gather(*(server.sum(0, plan, label=label) for label, plan in enumerate(groups)))
            assert [one.block().tolist() for one in both] == [expected(plan.cohort, 0) for plan in groups]
            assert len({one.terms.slot for one in both}) == 2
            whole = await server.sum(1, SumPlan(tuple(range(6)), (MODEL,), DIMENSION, 1.0))
            assert whole.block().tolist() == expected(range(6), 1)
            await asyncio.gather(*clients)

    async def second() -> None:
        async with federation.start() as server:
            again = await server.sum(1, PLAN)
            assert again.block().tolist() == expected(range(6), 1)
            assert (await server.sum(0, PLAN, label=1)).survivors == (1, 3, 5)
            with pytest.raises(LocalError, match="old-round"):
                await server.sum(0, PLAN, label=7)

    _run(first())
    federation.close()
    _run(second())
    federation.close()


def _sum_of(folder: Path, plan: SumPlan, work: Callable[[int], Callable[[Any], Coroutine[Any, Any, Any]]]) -> Any:
    """The sum of a plan, which a second coordinator of the folder returns again."""
    federation, sums = Federation(folder), list[Any]()

    async def part(server: Coordinator, number: int) -> None:
        client = federation.client(number)
        try:
            await take_part(client, server.receive, work(number), through=0)
        finally:
            client.close()

    async def play() -> None:
        async with federation.start() as server:
            clients = [asyncio.create_task(part(server, number)) for number in plan.cohort]
            sums.append(await server.sum(0, plan))
            await asyncio.gather(*clients)
        async with federation.start() as server:
            sums.append(await server.sum(0, plan))

    try:
        _run(play())
    finally:
        federation.close()
    assert sums[0].levels.tolist() == sums[1].levels.tolist()
    return sums[0]


def test_a_plan_has_blocks_that_clients_choose_from(tmp_path: Path) -> None:
    def work(number: int) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        async def chosen(slot: Any) -> Any:
            blocks = (0,) if number < 3 else (1,)
            return Policy(SESSION, "active", MODEL, names=(0,)), [Contribution(levels(number, 0), 1.0, block, True) for block in blocks]

        return chosen

    total = _sum_of(tmp_path, replace(PLAN, clusters=2), work)
    assert total.block(0).tolist() == expected(range(3), 0)
    assert [total.weight(block) for block in (0, 1)] == [3, 1]
    assert total.block(1).tolist() == [0] * DIMENSION, "a block of one client stays closed"


def test_a_plan_has_noise_that_clients_insist_on_and_a_list_of_clients(tmp_path: Path) -> None:
    def work(number: int) -> Callable[[Any], Coroutine[Any, Any, Any]]:
        async def drawn(slot: Any) -> Any:
            return Policy(SESSION, "active", MODEL, names=(0,), noise=24), Contribution(levels(number, 0), is_levels=True)

        return drawn

    plan = replace(PLAN, noise=24, listed=True)
    total = _sum_of(tmp_path / "noised", plan, work)
    far = np.abs(total.block() - np.array(expected(range(4), 0)))
    assert 0 < far.max() <= 4 * 13 * 24, "all three draws of four sums of noise are 0 with a probability below 1e-5"
    assert m.names(total.terms.cohort) == PLAN.cohort


def test_a_coordinator_that_is_stopped_at_any_time_goes_on(tmp_path: Path) -> None:
    """Stops by time, here between the stages of the loop; `test_restarts` has the points of writes."""
    federation = Federation(tmp_path)

    async def play() -> None:
        current: list[Coordinator] = []

        async def exchange(data: bytes) -> bytes:
            await asyncio.sleep(0)
            if not current:
                raise ConnectionError
            try:
                return await current[0].receive(data)
            except LocalError as error:
                raise ConnectionError from error

        async def part(number: int) -> None:
            client = federation.client(number)
            await take_part(client, exchange, work_of(number), through=0)
            client.close()

        clients = [asyncio.create_task(part(number)) for number in range(4)]
        stops = 0
        for pause in [*(0.003 * step for step in range(1, 40)), 60.0]:
            server = federation.start()
            current.append(server)
            try:
                total = await asyncio.wait_for(server.sum(0, PLAN), pause)
            except TimeoutError:
                stops += 1
                current.clear()
                await server.close()
                continue
            assert total.block().tolist() == expected(range(4), 0)
            break
        assert stops >= 2
        await asyncio.gather(*clients)
        current.clear()
        await server.close()

    _run(play())
    federation.close()


def test_a_deadline_ends_the_wait_for_clients_and_survives_a_restart(tmp_path: Path) -> None:
    now = [1000.0]
    federation = Federation(tmp_path, now=lambda: now[0])

    async def play() -> None:
        server = federation.start()
        await asyncio.gather(*(federation.upload(server, number) for number in range(3)), begun(server))
        await server.close()
        now[0] += 61.0
        async with federation.start() as server:
            late = federation.client(3)
            assert late.answered(await server.receive(late.request())) == QUICK.retry_seconds
            total = await server.sum(0, PLAN, seconds=60.0)
            assert total.survivors == (0, 1, 2)
            late.close()

    async def begun(server: Coordinator) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.sum(0, PLAN, seconds=60.0), 1.0)

    _run(play())
    federation.close()


def test_later_attempts_take_slots_of_their_own(tmp_path: Path) -> None:
    now = [0.0]
    federation = Federation(tmp_path, now=lambda: now[0])

    async def play() -> None:
        async with federation.start() as server:
            with pytest.raises(TooFewClients):
                await asyncio.gather(server.sum(0, PLAN, seconds=0.05, attempts=2), passing(4, 0.1))
            assert list(server.rounds.ended) == [(0, 0), (0, 1)]
            with pytest.raises(TooFewClients):  # the same when asked again
                await server.sum(0, PLAN, attempts=2)
            clients = [asyncio.create_task(federation.take_part(server, number)) for number in range(4)]
            assert (await server.sum(0, PLAN, attempts=3)).terms.slot == (0, 2)
            await asyncio.gather(*clients)

    async def passing(steps: int, seconds: float) -> None:
        for _ in range(steps):
            await asyncio.sleep(0.05)
            now[0] += seconds

    _run(play())
    federation.close()


def test_an_attempt_after_a_closed_one_is_over_the_same_clients(tmp_path: Path) -> None:
    federation = Federation(tmp_path)

    async def play() -> None:
        async with federation.start() as server:
            slot = server.rounds
            clients = [asyncio.create_task(federation.upload(server, number)) for number in range(3)]
            task = asyncio.create_task(server.sum(0, PLAN, seconds=1.0, patience=0.3))
            await asyncio.gather(*clients)
            while not any(attempt.closing and len(attempt.outbox) and not attempt.waiting for attempt in slot.attempts.values()):
                federation.down = set()
                await asyncio.sleep(0)
            federation.down = {0, 1}
            with pytest.raises(HelpersFailed, match="too-few-helpers"):
                await task
            federation.down = set()
            (done,) = server.rounds.ended.values()
            assert done.closed
            again = [asyncio.create_task(federation.take_part(server, number, through=1)) for number in range(4)]
            total = await server.sum(0, PLAN, attempts=2)
            assert total.survivors == (0, 1, 2), "client 3 is not invited"
            assert total.terms.minimum == 3
            assert total.block().tolist() == expected(range(3), 0)
            await server.sum(1, PLAN)
            await asyncio.gather(*again)

    _run(play())
    federation.close()


def test_clients_take_part_until_the_last_attempt_at_a_round_has_ended(tmp_path: Path) -> None:
    """And no longer: also where all attempts failed, or the coordinator is gone."""
    now = [0.0]
    federation = Federation(tmp_path, now=lambda: now[0])

    async def late(server: Coordinator) -> None:
        """The deadline of an attempt passes when two clients have uploaded."""
        while not any(len(attempt.digests) == 2 for attempt in server.rounds.attempts.values()):
            await asyncio.sleep(0.01)
        now[0] += 61.0

    async def play() -> None:
        async with federation.start() as server:
            first = [asyncio.create_task(federation.take_part(server, number)) for number in range(2)]
            total = asyncio.create_task(server.sum(0, PLAN, seconds=60.0, attempts=2))
            await late(server)
            while len(server.rounds.ended) < 1:
                await asyncio.sleep(0.01)
            others = [asyncio.create_task(federation.take_part(server, number)) for number in range(2, 4)]
            assert (await total).terms.slot == (0, 1)
            assert (await total).survivors == (0, 1, 2, 3)
            await asyncio.gather(*first, *others)
            again = [asyncio.create_task(federation.take_part(server, number, through=1)) for number in range(2)]
            with pytest.raises(TooFewClients):
                await asyncio.gather(server.sum(1, PLAN, seconds=60.0), late(server))
            await asyncio.gather(*again)

        async def gone(data: bytes) -> bytes:
            raise ConnectionError

        client = federation.client(0)
        await take_part(client, gone, work_of(0), through=1, patience=0.1)
        client.close()

    _run(play())
    federation.close()


def test_helpers_may_restart_and_one_may_stay_away(tmp_path: Path) -> None:
    federation = Federation(tmp_path, down={0, 3})

    async def back() -> None:
        await asyncio.sleep(0.3)
        federation.helpers[0].close()
        federation.helpers[0] = federation.helper(0)
        federation.down = {3}

    async def play() -> None:
        async with federation.start() as server:
            clients = [asyncio.create_task(federation.take_part(server, number)) for number in range(4)]
            total, _ = await asyncio.gather(server.sum(0, PLAN, patience=3.0), back())
            assert total.block().tolist() == expected(range(4), 0)
            assert total.terms.present == (0, 1, 2)
            federation.down = {1, 2, 3}
            with pytest.raises(HelpersFailed, match="too-few-helpers"):
                await server.sum(1, PLAN, patience=0.2)
            await asyncio.gather(*clients)

    _run(play())
    federation.close()


def test_too_many_requests_are_told_when_to_come_again(tmp_path: Path) -> None:
    federation = Federation(tmp_path, limits=CoordinatorLimits(waiting=1, requests=2, retry_seconds=0.02), down={0, 1, 2, 3})

    async def play() -> None:
        async with federation.start() as server:
            several = [c.encode(c.WorkPoll(number, None, 0)) for number in range(8)]
            server._log.add({"x": b"y"})
            async with server._committing:  # the disk is slow
                tasks = [asyncio.create_task(server.receive(data)) for data in several]
                await asyncio.sleep(0.01)
            answers = [c.decode_from_coordinator(await task) for task in tasks]
            codes = [answer.code for answer in answers if isinstance(answer, c.ComeAgain)]
            assert codes.count("busy") == 6
            federation.down = set()
            task = asyncio.create_task(server.sum(0, PLAN))
            await asyncio.gather(*(federation.take_part(server, number) for number in range(4)))
            assert (await task).block().tolist() == expected(range(4), 0)

    _run(play())
    federation.close()


def test_an_upload_that_waits_for_helpers_is_told_to_wait(tmp_path: Path) -> None:
    federation = Federation(tmp_path, limits=CoordinatorLimits(waiting=1, retry_seconds=0.02))

    async def play() -> None:
        async with federation.start() as server:
            task = asyncio.create_task(server.sum(0, PLAN))
            while not server.rounds.attempts:
                await asyncio.sleep(0.01)
            federation.down = {0, 1, 2, 3}
            clients = [federation.client(number) for number in range(4)]
            for number, client in enumerate(clients):
                given = client.answered(await server.receive(client.request()))
                assert isinstance(given, UploadTask)
                client.enter(given, *(await work_of(number)(given.slot)))
            codes = []
            for client in clients:
                answer = await server.receive(client.request())
                codes.append(client.answered(answer))
                await asyncio.sleep(0.05)
            assert codes.count(QUICK.retry_seconds) == 2, "one is being delivered, one waits"
            federation.down = set()
            for client in clients:
                while isinstance(client.answered(await server.receive(client.request())), float) and client._last().upload:  # type: ignore[union-attr]
                    await asyncio.sleep(0.02)
                client.close()
            assert (await task).block().tolist() == expected(range(4), 0)

    _run(play())
    federation.close()


def test_what_a_coordinator_refuses(tmp_path: Path) -> None:
    federation = Federation(tmp_path)

    async def play() -> None:
        async with federation.start() as server:
            task = asyncio.create_task(server.sum(0, PLAN))
            while not server.rounds.attempts:
                await asyncio.sleep(0.01)
            uploads = {}
            for number in range(4):
                client = federation.client(number)
                given = client.answered(await server.receive(client.request()))
                assert isinstance(given, UploadTask)
                client.enter(given, *(await work_of(number)(given.slot)))
                uploads[number] = client.request()
                client.close()

            async def code(data: bytes) -> str:
                answer = c.decode_from_coordinator(await server.receive(data))
                return answer.code if isinstance(answer, c.RequestRefused) else type(answer).__name__

            good = c.decode_to_coordinator(uploads[0], 1 << 20)
            assert isinstance(good, c.SendUpload)
            message = m.decode_upload(good.upload, server.rounds.attempts[0, 0].opened.terms)

            def changed(**fields: Any) -> bytes:
                upload = m.encode(type(message)(**{name: getattr(message, name) for name in message.__struct_fields__} | fields))
                return c.encode(c.SendUpload(0, 0, upload))

            assert await code(b"") == "malformed"
            assert await code(changed(signature=bytes(64))) == "bad-signature"
            assert await code(changed(client=1)) == "bad-signature"
            assert await code(changed(client=5)) == "not-invited"
            assert await code(c.encode(c.SendUpload(0, 0, b"x"))) == "malformed"
            assert await code(c.encode(c.SendUpload(0, 1, good.upload))) == "wrong-slot"
            assert await code(c.encode(c.SendUpload(1, 0, good.upload))) == "wrong-slot"
            assert await code(uploads[0]) == "UploadAccepted"
            assert await code(changed(vector=bytes(len(message.vector)))) == "second-message"
            first = await server.receive(uploads[1])
            assert await server.receive(uploads[1]) == first
            for number in (2, 3):
                await server.receive(uploads[number])
            await task
            assert await server.receive(uploads[1]) == first, "the same after the sum"
            assert await code(changed(vector=bytes(len(message.vector)))) == "second-message"

    _run(play())
    federation.close()


def test_a_late_upload_gets_an_answer_however_large_it_is(tmp_path: Path) -> None:
    """Also after a restart, when no sum is under way, and in the end when its round is forgotten."""
    federation = Federation(tmp_path, limits=CoordinatorLimits(retry_seconds=0.02, kept_rounds=0))
    plan, large = SumPlan((0, 1, 2, 3), (MODEL,), 100_000, 1.0), Contribution(np.zeros(100_000))

    async def play() -> None:
        async with federation.start() as server:
            clients = [federation.client(number) for number in range(4)]
            task = asyncio.create_task(server.sum(0, plan, seconds=1.0))
            while not server.rounds.attempts:
                await asyncio.sleep(0.01)
            for number, client in enumerate(clients):
                given = client.answered(await server.receive(client.request()))
                assert isinstance(given, UploadTask)
                client.enter(given, Policy(SESSION, "active", MODEL, names=(0,)), large)
                if number < 3:
                    assert client.answered(await server.receive(client.request())) == UploadSettled((0, 0), "")
            await task
        async with federation.start() as server:
            late = clients[3].request()
            assert len(late) <= server.largest_request
            assert c.decode_from_coordinator(await server.receive(late)) == c.RequestRefused("too-late")
            with pytest.raises(TooFewClients):
                await server.sum(1, PLAN, seconds=0.0)
            assert len(late) <= server.largest_request
            assert clients[3].answered(await server.receive(late)) == UploadSettled((0, 0), "old-slot")
            assert clients[3].request() != late
            for client in clients:
                client.close()

    _run(play())
    federation.close()


def test_keys_and_clients_come_and_go_between_rounds(tmp_path: Path) -> None:
    roster = Roster(ROSTER.keys[:4], ROSTER.holder, ROSTER.others)
    federation = Federation(tmp_path, roster=roster)
    joining, renewed, new_helper = Identity.create(4), Identity.create(1), Identity.create(0)

    async def play() -> None:
        async with federation.start() as server:
            clients = [asyncio.create_task(federation.take_part(server, number)) for number in range(4)]
            await server.sum(0, PLAN)
            await asyncio.gather(*clients)
            for wish in (join(joining, invite(AUTHORITY, "site 4")), renew(IDENTITIES[1], renewed), renew(HOLDERS[2], new_helper)):
                first = await server.receive(c.encode(wish))
                assert isinstance(c.decode_from_coordinator(first), c.WishNoted)
                assert await server.receive(c.encode(wish)) == first
            stranger = renew(Identity.create(0), Identity.create(0))
            assert c.decode_from_coordinator(await server.receive(c.encode(stranger))) == c.RequestRefused("not-on-roster")
        async with federation.start() as server:  # requests survive as well
            assert len(server.wishes) == 3
            later = removed(applied(roster, server.wishes, PUBLIC), 0)
            server.publish(sign_roster(AUTHORITY, 2, later))
            assert server.wishes == []
            with pytest.raises(RemoteError, match="old-roster"):
                server.publish(sign_roster(AUTHORITY, 1, roster))
            federation.helpers[2].close()
            federation.helpers[2] = federation.helper(2, new_helper)
            who = {1: renewed, 2: IDENTITIES[2], 3: IDENTITIES[3], 4: joining}
            tasks = [asyncio.create_task(federation.take_part(server, number, 1, identity)) for number, identity in who.items()]
            total = await server.sum(1, SumPlan((0, 1, 2, 3, 4), (MODEL,), DIMENSION, 1.0), seconds=2.0)
            assert total.survivors == (1, 2, 3, 4)
            assert total.terms.present == (0, 1, 2, 3)
            assert total.block().tolist() == expected((1, 2, 3, 4), 1)
            await asyncio.gather(*tasks)

    _run(play())
    federation.close()


def test_helpers_answer_their_coordinator_alone(tmp_path: Path) -> None:
    helper = Federation(tmp_path).helper(1)
    signed = sign_roster(AUTHORITY, 2, ROSTER)

    def code(data: bytes) -> str:
        return c.decode_helper_answer(helper.receive(data), 1 << 20).code

    assert code(c.ask_helper(COORDINATOR, 1, 0, b"", signed)) == ""
    assert code(c.ask_helper(AUTHORITY, 1, 0, b"", signed)) == "bad-signature"
    assert code(c.ask_helper(COORDINATOR, 0, 0, b"", signed)) == "wrong-helper"
    assert code(c.ask_helper(COORDINATOR, 1, 0, b"", sign_roster(AUTHORITY, 1, ROSTER))) == "old-roster"
    assert code(c.ask_helper(COORDINATOR, 1, 0, b"x", sign_roster(AUTHORITY, 3, ROSTER))) == "old-roster"
    assert code(c.ask_helper(COORDINATOR, 1, 1, b"", sign_roster(COORDINATOR, 3, ROSTER))) == "bad-signature"
    assert code(c.ask_helper(COORDINATOR, 1, 1, b"", sign_roster(AUTHORITY, 3, Roster(ROSTER.keys)))) == "not-on-roster"
    assert code(c.ask_helper(COORDINATOR, 1, 0, b"x", signed)) == "malformed"
    assert code(b"") == "malformed"
    helper.close()


def test_a_client_refuses_what_its_policy_and_record_refuse(tmp_path: Path) -> None:
    federation = Federation(tmp_path)

    async def play() -> None:
        async with federation.start() as server:
            task = asyncio.create_task(server.sum(0, PLAN, seconds=0.5))
            while not server.rounds.attempts:
                await asyncio.sleep(0.01)
            client = federation.client(0)
            given = client.answered(await server.receive(client.request()))
            assert isinstance(given, UploadTask)
            contribution = Contribution(np.zeros(DIMENSION))
            with pytest.raises(RemoteError, match="minimum-too-low"):
                client.enter(given, Policy(SESSION, "active", MODEL, min_cohort=4), contribution)
            with pytest.raises(RemoteError, match="too-little-noise"):
                client.enter(given, Policy(SESSION, "active", MODEL, noise=24), contribution)
            with pytest.raises(RemoteError, match="unlisted-model"):
                client.enter(given, Policy(SESSION, "active", bytes(31) + b"x"), contribution)
            client.skip(given)
            with pytest.raises(RemoteError, match="wrong-slot"):
                client.enter(given, Policy(SESSION, "active", MODEL), contribution)
            assert isinstance(client.answered(await server.receive(client.request())), float)
            client.close()
            with pytest.raises(TooFewClients):
                await task

    _run(play())
    federation.close()


def test_a_client_takes_no_answer_to_what_it_did_not_ask(tmp_path: Path) -> None:
    client = Federation(tmp_path).client(0)
    for message in (c.UploadAccepted(0, 0, bytes(32)), c.WishNoted(bytes(32)), c.RequestRefused("x")):
        with pytest.raises(RemoteError):
            client.answered(c.encode(message))
    with pytest.raises(RemoteError, match="bad-signature"):
        client.answered(c.encode(c.ComeAgain("idle", 1.0, sign_roster(COORDINATOR, 1, ROSTER))))
    assert client.answered(c.encode(c.ComeAgain("idle", 1.0, sign_roster(AUTHORITY, 2, ROSTER)))) == 1.0
    with pytest.raises(RemoteError, match="old-roster"):
        client.answered(c.encode(c.ComeAgain("idle", 1.0, sign_roster(AUTHORITY, 1, ROSTER))))
    assert isinstance(UploadSettled((0, 0), ""), UploadSettled)
    client.close()


def test_a_folder_is_of_one_session_and_needs_a_roster(tmp_path: Path) -> None:
    async def ask(number: int, data: bytes) -> bytes:
        raise ConnectionError

    async def play() -> None:
        async with Coordinator(tmp_path, COORDINATOR, PUBLIC, SESSION, ask) as server:
            with pytest.raises(LocalError, match="no-roster"):
                await server.sum(0, PLAN)
        with pytest.raises(LocalError, match="other-session"):
            Coordinator(tmp_path, COORDINATOR, PUBLIC, bytes(16), ask)
        async with Coordinator(tmp_path, COORDINATOR, PUBLIC, SESSION, ask, roster=sign_roster(AUTHORITY, 1, ROSTER)) as server:
            assert server.rounds.roster == read_roster_version(sign_roster(AUTHORITY, 1, ROSTER), PUBLIC)

    _run(play())


SAMPLE = re.compile(r'^(?P<name>[a-z_]+)(?P<labels>\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? (?P<value>-?[0-9.]+)$')


def test_counters_and_log_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cflpriv.coordinator")
    federation = Federation(tmp_path)

    async def play() -> None:
        async with federation.start() as server:
            clients = [asyncio.create_task(federation.take_part(server, number)) for number in range(4)]
            await server.sum(0, PLAN)
            await asyncio.gather(*clients)
            server.rounds.count("uploads_left_out_total", code='a"b\\c\n')
            text = metrics(server)
        described: dict[str, str] = {}
        values: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                described[line.split()[2]] = line.split()[3]
            elif not line.startswith("# HELP "):
                sample = SAMPLE.match(line)
                assert sample, line
                assert sample["name"] in described
                values[sample["name"] + (sample["labels"] or "")] = float(sample["value"])
        assert values['cflpriv_coordinator_requests_total{code="ok",kind="SendUpload"}'] == 4
        assert values['cflpriv_coordinator_sums_total{code="ok"}'] == 1
        assert values["cflpriv_coordinator_round"] == 0
        assert set(described.values()) == {"counter", "gauge"}
        events = {record.event: record.fields for record in caplog.records if hasattr(record, "event")}  # type: ignore[attr-defined]
        assert events["ended"] == {"round": 0, "sum": 0, "code": "ok", "members": 4, "liars": []}
        for record in caplog.records:
            if hasattr(record, "event"):
                assert json.loads(record.getMessage().removeprefix(record.event)) == record.fields  # type: ignore[attr-defined]

    _run(play())
    federation.close()


def test_a_set_that_helpers_may_have_signed_is_kept_over_attempts_that_end_earlier(tmp_path: Path) -> None:
    now = [0.0]
    federation = Federation(tmp_path, now=lambda: now[0])
    clients = {number: federation.client(number) for number in range(4)}
    roster = sign_roster(AUTHORITY, 1, ROSTER)

    def announced() -> dict[int, bytes]:
        return {number: asked(number, b"") for number in range(4)}

    def asked(number: int, message: bytes) -> bytes:
        answer = federation.helpers[number].receive(c.ask_helper(COORDINATOR, number, 0, message, roster))
        return c.decode_helper_answer(answer, 1 << 24).message

    async def upload(server: Coordinator, number: int) -> None:
        client = clients[number]
        task = client.answered(await server.receive(client.request()))
        assert isinstance(task, UploadTask)
        client.enter(task, *await work_of(number)(task.slot))
        assert isinstance(client.answered(await server.receive(client.request())), UploadSettled)

    async def play() -> None:
        async with federation.start() as server:
            rounds = server.rounds
            rounds.begin(0)
            rounds.open(0, 0, PLAN, announced(), 10.0)
            for number in range(3):
                await upload(server, number)
            now[0] = 10.0
            for heard in (True, False):  # uploads are delivered; helpers sign the set, and none is heard
                answers = {number: asked(number, message) for number, message in rounds.step((0, 0), now[0]).items()}
                rounds.answered((0, 0), answers if heard else {})
            assert rounds.ended[0, 0].closed
            rounds.open(0, 0, PLAN, announced(), 20.0)
            now[0] = 20.0
            rounds.step((0, 1), now[0])  # nobody came
            assert not rounds.ended[0, 1].closed
            slot = rounds.open(0, 0, PLAN, announced(), 30.0)
            opened = rounds.attempts[slot].opened
            assert opened.cohort == (0, 1, 2)
            assert opened.terms.minimum == 3

    _run(play())
    for client in clients.values():
        client.close()
    federation.close()


def test_limits_are_checked_and_whole_seconds_are_seconds(tmp_path: Path) -> None:
    for wrong in ({"waiting": 0}, {"requests": 0}, {"retry_seconds": -1.0}, {"retry_seconds": float("nan")}, {"kept_rounds": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CoordinatorLimits(**wrong)
    federation = Federation(tmp_path, limits=CoordinatorLimits(retry_seconds=2), now=lambda: 0)

    async def play() -> None:
        async with federation.start() as server:
            client = federation.client(0)
            assert client.answered(await server.receive(client.request())) == 2.0
            task = asyncio.create_task(server.sum(0, PLAN, seconds=600))
            while not server.rounds.attempts:
                await asyncio.sleep(0.01)
            assert isinstance(client.answered(await server.receive(client.request())), UploadTask)
            task.cancel()
            client.close()

    _run(play())
    federation.close()


def test_an_upload_whose_sender_went_away_ends_the_wait_for_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tmp_path)

    async def play() -> None:
        async with federation.start() as server:
            task = asyncio.create_task(server.sum(0, PLAN, seconds=100))
            clients = [asyncio.create_task(federation.upload(server, number)) for number in range(3)]
            await asyncio.gather(*clients)
            last = federation.client(3)
            invited = last.answered(await server.receive(last.request()))
            assert isinstance(invited, UploadTask)
            last.enter(invited, *await work_of(3)(invited.slot))
            while (attempt := server.rounds.attempts[0, 0]).waiting or attempt.delivering:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # the sum waits for client 3
            commit = server._commit

            async def slow() -> None:
                await asyncio.sleep(0.05)
                await commit()

            monkeypatch.setattr(server, "_commit", slow)
            sending = asyncio.create_task(server.receive(last.request()))
            await asyncio.sleep(0.01)
            sending.cancel()
            monkeypatch.setattr(server, "_commit", commit)
            assert (await asyncio.wait_for(task, 10)).survivors == (0, 1, 2, 3)
            last.close()

    _run(play())
    federation.close()


def test_strangers_take_no_place_and_an_invitation_or_a_key_has_one(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    stranger, site = Identity.create(0), Identity.create(6)
    invitation = invite(AUTHORITY, "site 6")

    async def play() -> None:
        async with federation.start() as server:

            async def asked(request: Any) -> str:
                answer = c.decode_from_coordinator(await server.receive(c.encode(request)))
                return answer.code if isinstance(answer, c.RequestRefused) else type(answer).__name__

            before = len(server.rounds.log)
            assert await asked(join(stranger, invite(stranger, "me"))) == "bad-signature"
            assert await asked(renew(stranger, Identity.create(0))) == "not-on-roster"
            assert len(server.rounds.log) == before
            wish = join(site, invitation)
            assert await asked(wish) == "WishNoted"
            assert await asked(join(stranger, invitation)) == "invitation-used"
            first, second = (renew(IDENTITIES[1], Identity.create(1)) for _ in range(2))
            assert await asked(first) == "WishNoted"
            assert await asked(second) == "request-waits"
            assert {c.encode(one) for one in server.wishes} == {c.encode(wish), c.encode(first)}
            server.decline(first)
            assert await asked(second) == "WishNoted"
            server.publish(sign_roster(AUTHORITY, 2, applied(ROSTER, server.wishes, PUBLIC)))
            assert server.wishes == []
            assert [await asked(one) for one in (wish, second)] == ["WishNoted", "WishNoted"], "the same answers after it was granted"
            assert await asked(join(stranger, invitation)) == "invitation-used"
            assert await asked(first) == "not-on-roster"
            assert server.wishes == []

    _run(play())
    federation.close()


def test_folders_go_from_session_to_session_and_remember_digests(tmp_path: Path) -> None:
    async def play(federation: Federation, rounds: int, who: range) -> None:
        async with federation.start() as server:
            clients = [asyncio.create_task(federation.take_part(server, number, rounds - 1)) for number in who]
            for number in range(rounds):
                total = await server.sum(number, PLAN, seconds=1.0)
                assert total.survivors == tuple(who)
                assert total.block().tolist() == expected(who, number)
            await asyncio.gather(*clients)

    first = Federation(tmp_path, names=(b"of the data",))
    _run(play(first, 1, range(4)))
    first.close()
    other = Federation(tmp_path, session=b"another session!")
    _run(play(other, 3, range(4)))
    other.close()
    third = Federation(tmp_path, session=b"a third session!", names=(b"of the data",))
    with pytest.raises(HelpersFailed):  # helpers remember the set of the first session
        _run(play(third, 1, range(3)))
    third.close()
    for federation in (first, other):
        with pytest.raises(LocalError, match="old-session"):
            federation.client(0)
        with pytest.raises(LocalError, match="old-session"):
            federation.helper(0)
    with pytest.raises(ValueError, match="session"):
        DurableClient(tmp_path / "client0", IDENTITIES[0], PUBLIC, b"short")


def test_a_helper_writes_a_set_at_once_however_many_names_its_clients_give(tmp_path: Path) -> None:
    names = tuple(bytes([number]) * 32 for number in range(200))
    federation = Federation(tmp_path, names=names)

    async def play() -> None:
        async with federation.start() as server:
            before = [helper._log.frames for helper in federation.helpers.values()]
            clients = [asyncio.create_task(federation.take_part(server, number)) for number in range(4)]
            assert (await server.sum(0, PLAN)).survivors == (0, 1, 2, 3)
            await asyncio.gather(*clients)
            for helper, frames in zip(federation.helpers.values(), before, strict=True):
                assert sum("/summed/" in name for name in helper._log) == 1 + len(names)
                assert helper._log.frames - frames < 20

    _run(play())
    federation.close()
