"""The ZMQ context of a process that follows engines, and how many of them it can hold."""

import logging
import resource

import zmq

from router.publisher.zmq_sockets import Context

log = logging.getLogger(__name__)

_SOCKETS_PER_ENGINE = 7
"""Events, replays, load; and a pair for each connection that is being watched."""

_FILES_PER_ENGINE = 10
"""One a socket, and one a connection."""

_OTHER_FILES = 256


def open_context(max_engines: int) -> Context:
    """One context for so many followers, with one thread for all their connections; to be closed.

    Raises this process's limit on open files as far as it has to be, and is allowed to be; what
    does not fit is warned of, and then fails one connection at a time.
    """
    context: Context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, _SOCKETS_PER_ENGINE * max_engines + _SOCKETS_PER_ENGINE)
    allowed = _raise_file_limit(_FILES_PER_ENGINE * max_engines + _OTHER_FILES)
    fitting = max((allowed - _OTHER_FILES) // _FILES_PER_ENGINE, 0)
    if fitting < max_engines:
        log.warning(
            "%d open files are allowed, enough for %d engines of %d: raise `ulimit -Hn`",
            allowed,
            fitting,
            max_engines,
        )
    return context


def _raise_file_limit(wanted: int) -> int:
    """The limit on open files, once it is as wanted or as high as it gets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, wanted)
    allowed = min(max(soft, wanted), hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
