"""Signals of a process that has no configuration to read again, and its sockets."""

import socket
import subprocess
import sys

from router.runtime.http_server.server import listening

RUN = """
import asyncio, os, signal
from router.runtime.http_server.server import run_until_signal

async def run(stop):
    print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGHUP)
    if not IS_STARTED_WITH_NOHUP:
        await asyncio.wait_for(stop.wait(), 60)

signal.signal(signal.SIGHUP, signal.SIG_IGN if IS_STARTED_WITH_NOHUP else signal.SIG_DFL)
run_until_signal(run)
"""


BUSY = """
import asyncio, time
from router.runtime.http_server import server

async def run(stop):
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
    print("done", flush=True)

server.CLOSING_S = 0.1
server.run_until_signal(run)
"""


def said(*, is_started_with_nohup):
    program = RUN.replace("IS_STARTED_WITH_NOHUP", str(is_started_with_nohup))
    return subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_closed_terminal_stops_the_server():
    assert said(is_started_with_nohup=False) == "False\n"


def test_nohup_ignores_a_closed_terminal():
    assert said(is_started_with_nohup=True) == "True\n"


def test_process_ends_whatever_its_threads_do():
    ended = subprocess.run([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, b"done\n")


def test_bodies_are_sent_without_waiting_for_an_acknowledgement():
    with listening("127.0.0.1", 0) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with client, server:
            assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
