"""`pytest --processes N`: tests in N processes, which are forked when all tests are collected.

A process takes the next file when it has finished one; reports go to the first process, which
prints them. With pytest-xdist, every process imports and collects everything: 23 s each.
"""

import atexit
import gc
import os
import pickle
import random
import selectors
import signal
import struct
from itertools import groupby, pairwise

import pytest

_NUMBER = struct.Struct("<I")


def pytest_addoption(parser):
    parser.addoption("--processes", type=int, default=1, help="number of test processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    processes = session.config.getoption("--processes")
    if processes == 1 or session.config.option.collectonly:
        return None
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    gc.freeze()
    parent = _Parent(session, files)
    try:
        for _ in range(min(processes, len(files))):
            parent.fork()
        parent.follow()
    finally:
        parent.kill()
    return True


class _Parent:
    """Processes at work, and what they have reported."""

    def __init__(self, session, files):
        self._session, self._files = session, files
        self._queue = _queue(len(files))
        self._selector = selectors.DefaultSelector()
        self._children = {}

    def fork(self):
        _refuse_threads()
        receiving, sending = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receiving)
            _work(self._session, self._files, self._queue, os.fdopen(sending, "wb"))
        os.close(sending)
        self._children[pid] = _Child(pid, receiving)
        self._selector.register(receiving, selectors.EVENT_READ, self._children[pid])

    def follow(self):
        while self._children:
            for key, _ in self._selector.select():
                if not self._take_message(key.data):
                    self._selector.unregister(key.fd)
                    self._end(key.data)
            if self._session.shouldfail:
                raise self._session.Failed(self._session.shouldfail)

    def kill(self):
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _take_message(self, child):
        """Read one message. Returns False at the end."""
        length = child.read(_NUMBER.size)
        if not length:
            return False
        kind, value = pickle.loads(child.read(*_NUMBER.unpack(length)))
        if kind == "file":
            child.left = [item.nodeid for item in self._files[value]]
        else:
            self._report(child, value)
        return True

    def _report(self, child, data):
        config = self._session.config
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        ids = {"nodeid": report.nodeid, "location": report.location}
        if report.when == "setup":
            config.hook.pytest_runtest_logstart(**ids)
        config.hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            config.hook.pytest_runtest_logfinish(**ids)
            child.left.remove(report.nodeid)

    def _end(self, child):
        """Report the tests that a process has left as failed: it crashed in the first one."""
        del self._children[child.pid]
        os.close(child.source)
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        for nodeid in child.left:
            location = (nodeid.partition("::")[0], None, nodeid)
            self._session.config.hook.pytest_runtest_logreport(
                report=pytest.TestReport(
                    nodeid, location, {}, "failed", f"its process ended with {status}", "call"
                )
            )


class _Child:
    def __init__(self, pid, source):
        self.pid, self.source = pid, source
        self.left = []
        """Ids of the tests of its file that have not ended."""

    def read(self, size):
        """Read this number of bytes, or fewer at the end."""
        parts = []
        while size and (part := os.read(self.source, size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _refuse_threads():
    """Refuse to fork a process with threads: locks that they hold stay held in the child."""
    threads = len(os.listdir("/proc/self/task")) - 1
    if threads:
        raise pytest.UsageError(
            f"collecting tests has started {threads} threads, with which it cannot be forked: "
            "set OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false, as the "
            "Makefile does, and import libraries that start threads within tests"
        )


def _queue(count):
    """Return a pipe with numbers, of which several processes read one after the other."""
    receiving, sending = os.pipe()
    os.write(sending, b"".join(map(_NUMBER.pack, range(count))))
    os.close(sending)
    return receiving


def _work(session, files, queue, results):
    """Run files until none is left, and end this process."""
    try:
        _become_worker(session.config, results)
        while number := os.read(queue, _NUMBER.size):
            (index,) = _NUMBER.unpack(number)
            _send(results, "file", index)
            for item, following in pairwise([*files[index], None]):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the parent has to go on, and names the tests
        session.config.get_terminal_writer().line("a process of tests failed")
        os._exit(1)
    os._exit(0)


def _become_worker(config, results):
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Reporter(config, results))
    random.seed()


class _Reporter:
    """Sends what happens to the parent."""

    def __init__(self, config, results):
        self._config, self._results = config, results

    def pytest_runtest_logreport(self, report):
        hook = self._config.hook
        _send(
            self._results,
            "report",
            hook.pytest_report_to_serializable(config=self._config, report=report),
        )


def _send(results, kind, value):
    message = pickle.dumps((kind, value))
    results.write(_NUMBER.pack(len(message)) + message)
    results.flush()
