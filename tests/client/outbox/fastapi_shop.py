"""An application on FastAPI with each way to a session, to be run by uvicorn under load.

`POST /WAY/N?is_refused=…` places order N: its row, a message with N as its body, and a rollback when it
is refused. A way is what the dependency is, what the endpoint is, and whose session it has.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated

import sqlalchemy as sa
import sqlmodel
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from qmq_client import Message, NoTransactionError, Producer, current_session, transactional
from tests.client.world import SUBJECT, Order, prepare

#: More connections than requests at once: a plain session in a coroutine waits for one on the loop.
POOL = {"pool_size": 20}

engine = sa.create_engine(os.environ["SHOP_DATABASE"], **POOL)
async_engine = create_async_engine(os.environ["SHOP_ASYNC_DATABASE"], **POOL)
prepare(engine)
prepare(async_engine.sync_engine)
producer = Producer(engine, os.environ["SHOP_BROKER"])
async_producer = Producer(async_engine, os.environ["SHOP_BROKER"])


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield
    await asyncio.gather(producer.close_async(), async_producer.close_async())
    await async_engine.dispose()


app = FastAPI(lifespan=lifespan)


def in_a_thread() -> Iterator[Session]:
    with Session(engine) as session, session.begin():
        yield session


async def on_the_loop() -> AsyncIterator[Session]:
    with Session(engine) as session, session.begin():
        yield session


def of_sqlmodel() -> Iterator[sqlmodel.Session]:
    with sqlmodel.Session(engine) as session, session.begin():
        yield session


async def asynchronous() -> AsyncIterator[AsyncSession]:
    async with AsyncSession(async_engine) as session, session.begin():
        yield session


InAThread = Annotated[Session, Depends(in_a_thread)]
OnTheLoop = Annotated[Session, Depends(on_the_loop)]
OfSqlmodel = Annotated[sqlmodel.Session, Depends(of_sqlmodel)]
Asynchronous = Annotated[AsyncSession, Depends(asynchronous)]


def end(is_refused: bool) -> None:
    if is_refused:
        raise HTTPException(409)


def place(session: Session, n: str, is_refused: bool) -> None:
    session.execute(sa.insert(Order).values(label=n))
    time.sleep(0)  # another thread's turn
    producer.send(Message(SUBJECT, n), session=session)
    end(is_refused)


async def place_with_turns(session: Session, n: str, is_refused: bool) -> None:
    session.execute(sa.insert(Order).values(label=n))
    await asyncio.sleep(0)
    producer.send(Message(SUBJECT, n), session=session)
    await asyncio.sleep(0)
    end(is_refused)


@app.post("/thread-thread/{n}")
def thread_thread(session: InAThread, n: str, is_refused: bool) -> None:
    place(session, n, is_refused)


@app.post("/thread-loop/{n}")
async def thread_loop(session: InAThread, n: str, is_refused: bool) -> None:
    await place_with_turns(session, n, is_refused)


@app.post("/loop-thread/{n}")
def loop_thread(session: OnTheLoop, n: str, is_refused: bool) -> None:
    place(session, n, is_refused)


@app.post("/loop-loop/{n}")
async def loop_loop(session: OnTheLoop, n: str, is_refused: bool) -> None:
    await place_with_turns(session, n, is_refused)


@app.post("/sqlmodel/{n}")
def with_sqlmodel(session: OfSqlmodel, n: str, is_refused: bool) -> None:
    place(session, n, is_refused)


@app.post("/awaited/{n}")
async def awaited(session: Asynchronous, n: str, is_refused: bool) -> None:
    await session.execute(sa.insert(Order).values(label=n))
    await async_producer.send(Message(SUBJECT, n), session=session)
    await asyncio.sleep(0)
    end(is_refused)


@app.post("/forgotten/{n}")
async def forgotten(session: Asynchronous, n: str, is_refused: bool) -> None:
    """Without `await`: the flush of the commit writes it."""
    session.add(Order(label=n))
    async_producer.send(Message(SUBJECT, n), session=session)
    await asyncio.sleep(0)
    end(is_refused)


@app.post("/decorated/{n}")
def decorated(n: str, is_refused: bool) -> None:
    @transactional(producer)
    def work() -> None:
        current_session().execute(sa.insert(Order).values(label=n))
        time.sleep(0)
        producer.send(Message(SUBJECT, n))
        end(is_refused)

    work()


@app.post("/decorated-loop/{n}")
async def decorated_loop(n: str, is_refused: bool) -> None:
    @transactional(async_producer)
    async def work() -> None:
        await current_session().execute(sa.insert(Order).values(label=n))
        await asyncio.sleep(0)
        await async_producer.send(Message(SUBJECT, n))
        end(is_refused)

    await work()


@app.post("/unnamed-thread/{n}")
def unnamed_thread(session: InAThread, n: str) -> None:
    """Nobody says whose transaction it is, so the call is refused."""
    session.execute(sa.insert(Order).values(label=n))
    time.sleep(0)
    try:
        producer.send(Message(SUBJECT, n))
    except NoTransactionError as error:
        raise HTTPException(422, str(error)) from error


@app.post("/unnamed-loop/{n}")
async def unnamed_loop(session: Asynchronous, n: str) -> None:
    await session.execute(sa.insert(Order).values(label=n))
    try:
        await async_producer.send(Message(SUBJECT, n))
    except NoTransactionError as error:
        raise HTTPException(422, str(error)) from error


@app.get("/alive")
def alive() -> str:
    """Reads nothing."""
    return "yes"


@app.post("/flush")
def flush() -> bool:
    return bool(producer.flush(60)) and bool(async_producer.flush(60))
