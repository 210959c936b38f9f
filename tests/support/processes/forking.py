"""Processes forked from one that has imported what they need.

Each is as real as one started by hand, `python -m MODULE ARGUMENTS` with an environment, an output
and a death of its own, but for the seconds that imports take.
"""

import atexit
import fcntl
import gc
import importlib
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache

PRELOADED = {
    "router": (
        "router.cli",
        "router.forward.service",
        "router.service.indexer",
        "router.tools.recordings.record",
    ),
    "worker_agent": (
        "worker_agent.cli",
        "worker_agent.reference.agent",
        "worker_agent.bridge.agent",
    ),
    "numba": ("numba", "numba.core.typing.templates"),
}


class Forked:
    """A forked process, handled as one of `subprocess` is."""

    def __init__(self, template, pid):
        self.pid = pid
        self.returncode = None
        self._template = template

    def poll(self):
        if self.returncode is None:
            self.returncode = self._template.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout=None):
        from support.processes.servers import until  # of tests: this file runs without its folder

        try:
            limit_s = math.inf if timeout is None else timeout
            until(lambda: self.poll() is not None, limit_s, poll_s=0.005)
        except TimeoutError:
            raise subprocess.TimeoutExpired(str(self.pid), timeout) from None
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


class Template:
    """A process that has imported a module, and becomes others like it.

    Test processes that were forked after its start share it, one exchange at a time.
    """

    def __init__(self, module):
        self._module, self._owner = module, os.getpid()
        self._lock = threading.Lock()
        self._processes_lock = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this is
        self._process = subprocess.Popen(
            [sys.executable, __file__, module], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def fork(self, arguments, log, program=None, environment=None):
        """Run the module with these arguments, here and with today's environment, or another one;
        or a file that does so in a way of its own.
        """
        started = self._module if program is None else str(program)
        environment = dict(os.environ) if environment is None else environment
        request = [started, arguments, str(log), environment, os.getcwd()]
        return Forked(self, self.ask({"fork": request}))

    def ask(self, request):
        with self._lock:
            fcntl.lockf(self._processes_lock, fcntl.LOCK_EX)
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                return json.loads(self._process.stdout.readline())
            finally:
                fcntl.lockf(self._processes_lock, fcntl.LOCK_UN)

    def close(self):
        if os.getpid() == self._owner:
            self._process.communicate()
            self._processes_lock.close()


@cache
def template(module):
    """One for all tests of this process."""
    made = Template(module)
    atexit.register(made.close)
    return made


def serve(requests):
    """Fork and report ended processes. Returns, in every forked process only, what it shall run."""
    for line in requests:
        match json.loads(line):
            case {"fork": request}:
                pid = os.fork()
                if pid == 0:
                    return request
                tell(pid)
            case {"ended": pid}:
                ended, status = os.waitpid(pid, os.WNOHANG)
                tell(os.waitstatus_to_exitcode(status) if ended else None)
    return None


def tell(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def become(started, arguments, log, environment, directory):
    """What a new interpreter would find, and then its program."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, output, output)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [started, *arguments]
    if started.endswith(".py"):
        runpy.run_path(started, run_name="__main__")
    else:
        runpy.run_module(started, run_name="__main__", alter_sys=True)


def main():
    for module in PRELOADED[sys.argv[1]]:
        importlib.import_module(module)
    gc.freeze()
    if request := serve(sys.stdin):
        become(*request)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    main()
