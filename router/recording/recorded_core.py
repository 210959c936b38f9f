"""A recorder around the `handle` of a core: it records each command and each decision, in order.

A command is recorded before it is executed, a decision after it with its outcome. Reports of
callers that raise an error, without a change, are not recorded.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec.structs import replace

from router.core.admission import Admission
from router.core.commands import (
    Admit,
    AnyHandled,
    ApplySlice,
    Command,
    Decision,
    Free,
    OutputBlock,
    Placing,
    PrefillComplete,
    Search,
)
from router.core.core import RouterCore
from router.errors import KvRouterError
from router.protocol.values import HashArray, Scope, pack_hashes
from router.recording.entries import Entry, recordable, result_of

Record: TypeAlias = Callable[[Entry], None]


class RecordedCore:
    """A core whose commands are recorded: its `handle` and searches of its index pass here.

    `record` receives each input that a replaying core needs.
    """

    __slots__ = ("_handle", "_is_deciding", "_record", "core")

    def __init__(self, core: RouterCore, record: Record) -> None:
        self.core = core
        self._record = record
        self._handle = core.handle
        self._is_deciding = False
        core.wrap(self.handle)
        core.index.on_search = self._note_search

    def release(self) -> None:
        """Record no more: commands reach the core directly again."""
        self.core.wrap(self._handle)
        self.core.index.on_search = None

    def handle(self, command: Command[Any], now_s: float) -> AnyHandled:
        """Execute a command on the core, and record it."""
        if isinstance(command, Decision):
            return self._decide(command, now_s)
        entry = Entry(recordable(command), now_s if command.has_time else 0.0)
        is_late = isinstance(command, ApplySlice | PrefillComplete | OutputBlock | Free)
        if not is_late:
            self._record(entry)
        handled = self._handle(command, now_s)
        # Callers try a slice after every message; only those that exist are recorded.
        if is_late and handled[0] is not False:
            self._record(entry)
        return handled

    def _decide(self, command: Command[Any], now_s: float) -> AnyHandled:
        if isinstance(command, Admit) and not len(self.core.waiting):
            return self._handle(command, now_s)
        if isinstance(command, Placing) and command.prompt is None:
            command = replace(command, prompt=self.core.hashed(command.request))
        self._is_deciding = True
        try:
            handled = self._handle(command, now_s)
        except KvRouterError as error:
            self._note(command, now_s, error)
            raise
        finally:
            self._is_deciding = False
        self._note(command, now_s, handled[0])
        return handled

    def _note(self, command: Command[Any], now_s: float, reply: object) -> None:
        entry = Entry(recordable(command), now_s, result_of(self.core, command, reply))
        if isinstance(reply, Admission):
            entry = replace(entry, request_id=reply.request_id, isl_tokens=reply.isl_tokens)
        self._record(entry)

    def _note_search(self, scope: Scope, sequence_hashes: HashArray) -> None:
        if not self._is_deciding:
            self._record(Entry(Search(scope, pack_hashes(sequence_hashes))))
