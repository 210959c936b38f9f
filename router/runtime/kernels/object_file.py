"""Link ELF object files of x86-64 to code and data that can be mapped anywhere.

    code: sections of code and constants, stubs of calls │ page │ data: imports, variables

Code reaches data relative to itself, so that only data has to be changed when it is mapped: the
addresses of imports (functions of Python and of libc) and pointers into the image.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PAGE_BYTES = 4096

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION_ENTRY = struct.Struct("<QQq")
_PROGBITS, _SYMTAB, _RELA, _NOBITS = 1, 2, 4, 8
_WRITE, _ALLOC = 1, 2
_ABSOLUTE, _RELATIVE, _CALL = 1, 2, 4
_IMPORTS = (9, 41, 42)  # GOTPCREL, GOTPCRELX, REX_GOTPCRELX
_RELATIVE_64 = 24
_UNWINDING = ".eh_frame"
_STUB = b"\xff\x25"  # jmp *[rip + …]


class Linked(NamedTuple):
    """What is mapped, and what is to be filled in."""

    content: bytes
    code_bytes: int
    symbols: dict[str, int]
    """Where each exported function starts."""

    imports: dict[str, int]
    """The place of the address of each import."""

    relative: list[int]
    """Places of pointers into the image, which hold their distance from its start."""


class _Header(NamedTuple):
    """A section's header, as it is in a file."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class _Section(NamedTuple):
    flags: int
    align: int
    content: bytes
    is_loaded: bool


class _Relocation(NamedTuple):
    section: int
    offset: int
    kind: int
    symbol: int
    addend: int


class _Symbol(NamedTuple):
    name: str
    section: int
    value: int


def link(files: Sequence[bytes], exported: Sequence[str]) -> Linked:
    """Link object files, none of which needs another one.

    Raises ValueError for a relocation that is not known.
    """
    return _Linker(files).link(exported)


class _Object:
    """Reads one file, of which sections and symbols are numbered after those of others."""

    def __init__(self, file: bytes, first_section: int, first_symbol: int) -> None:
        if file[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", file, 18)[0] != 62:
            raise ValueError("no object file of x86-64")
        self._file = file
        offset = struct.unpack_from("<Q", file, 40)[0]
        count = struct.unpack_from("<H", file, 60)[0]
        self._headers = [
            _Header(*_SECTION.unpack_from(file, offset + i * _SECTION.size)) for i in range(count)
        ]
        self._names = self._headers[struct.unpack_from("<H", file, 62)[0]].offset
        self._first_section, self._first_symbol = first_section, first_symbol

    def sections(self) -> Iterator[_Section]:
        for each in self._headers:
            is_empty = each.kind == _NOBITS
            content = self._file[each.offset : each.offset + each.size]
            yield _Section(
                each.flags, each.align, bytes(each.size) if is_empty else content,
                self._is_loaded(each),
            )  # fmt: skip

    def symbols(self) -> Iterator[_Symbol]:
        (table,) = [each for each in self._headers if each.kind == _SYMTAB]
        names = self._headers[table.link].offset
        for offset in range(table.offset, table.offset + table.size, _SYMBOL.size):
            name, _, _, section, value, _ = _SYMBOL.unpack_from(self._file, offset)
            number = section + self._first_section if section else 0
            yield _Symbol(self._text(names + name), number, value)

    def relocations(self) -> Iterator[_Relocation]:
        for section in self._headers:
            if section.kind != _RELA or not self._is_loaded(self._headers[section.info]):
                continue
            for at in range(section.offset, section.offset + section.size, _RELOCATION_ENTRY.size):
                place, info, addend = _RELOCATION_ENTRY.unpack_from(self._file, at)
                number, symbol = section.info + self._first_section, info >> 32
                yield _Relocation(
                    number, place, info & 0xFFFFFFFF, symbol + self._first_symbol, addend
                )

    def _is_loaded(self, section: _Header) -> bool:
        is_content = section.kind in (_PROGBITS, _NOBITS) and section.flags & _ALLOC
        name = self._text(self._names + section.name)
        return bool(is_content and section.size) and name != _UNWINDING

    def _text(self, offset: int) -> str:
        return self._file[offset : self._file.index(b"\0", offset)].decode()


class _Linker:
    """Lays out the sections of all files, and relocates them."""

    def __init__(self, files: Sequence[bytes]) -> None:
        self._sections: list[_Section] = []
        self._symbols: list[_Symbol] = []
        found: list[_Relocation] = []
        for file in files:
            each = _Object(file, len(self._sections), len(self._symbols))
            self._sections += each.sections()
            self._symbols += each.symbols()
            found += each.relocations()
        self._imports: dict[str, int] = {}
        self._relocations = [each._replace(symbol=self._one(each.symbol)) for each in found]
        self._content = bytearray()
        self._places: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._stubs: dict[int, int] = {}
        self._relative: list[int] = []

    def link(self, exported: Sequence[str]) -> Linked:
        loaded = [i for i, each in enumerate(self._sections) if each.is_loaded]
        relocations = self._relocations
        self._place([i for i in loaded if not self._sections[i].flags & _WRITE])
        self._add_stubs(relocations)
        self._align(PAGE_BYTES)
        code_bytes = len(self._content)
        self._add_slots(relocations)
        self._place([i for i in loaded if self._sections[i].flags & _WRITE])
        self._align(PAGE_BYTES)
        for symbol, stub in self._stubs.items():
            self._write(stub + 2, self._slots[symbol] - stub - 6)
        for each in relocations:
            self._relocate(each)
        names = {each.name: i for i, each in enumerate(self._symbols) if each.section}
        symbols = {name: self._address(names[name]) for name in exported}
        slots = self._slots.items()
        imports = {self._symbols[i].name: slot for i, slot in slots if self._is_import(i)}
        for i, slot in slots:
            if not self._is_import(i):
                self._point(slot, self._address(i))
        return Linked(bytes(self._content), code_bytes, symbols, imports, self._relative)

    def _one(self, symbol: int) -> int:
        """Return the one symbol for an import that several files have."""
        if not self._is_import(symbol):
            return symbol
        return self._imports.setdefault(self._symbols[symbol].name, symbol)

    def _is_import(self, symbol: int) -> bool:
        return not self._symbols[symbol].section

    def _add_stubs(self, relocations: Sequence[_Relocation]) -> None:
        for each in relocations:
            is_call = each.kind == _CALL and self._is_import(each.symbol)
            if is_call and each.symbol not in self._stubs:
                self._stubs[each.symbol] = len(self._content)
                self._content += _STUB.ljust(8, b"\xcc")

    def _add_slots(self, relocations: Sequence[_Relocation]) -> None:
        for each in relocations:
            is_wanted = each.kind in _IMPORTS or each.symbol in self._stubs
            if is_wanted and each.symbol not in self._slots:
                self._slots[each.symbol] = len(self._content)
                self._content += bytes(8)

    def _place(self, sections: Sequence[int]) -> None:
        for i in sections:
            section = self._sections[i]
            self._align(max(section.align, 1))
            self._places[i] = len(self._content)
            self._content += section.content

    def _align(self, to: int) -> None:
        self._content += bytes(-len(self._content) % to)

    def _address(self, symbol: int) -> int:
        found = self._symbols[symbol]
        if found.section not in self._places:
            raise ValueError(f"{found.name} is in no section that is loaded")
        return self._places[found.section] + found.value

    def _point(self, place: int, to: int) -> None:
        struct.pack_into("<Q", self._content, place, to)
        self._relative.append(place)

    def _relocate(self, each: _Relocation) -> None:
        place, symbol, kind = self._places[each.section] + each.offset, each.symbol, each.kind
        if kind in _IMPORTS:
            self._write(place, self._slots[symbol] + each.addend - place)
        elif kind == _CALL and symbol in self._stubs:
            self._write(place, self._stubs[symbol] + each.addend - place)
        elif kind in (_RELATIVE, _CALL):
            self._write(place, self._address(symbol) + each.addend - place)
        elif kind == _RELATIVE_64:
            distance = self._address(symbol) + each.addend - place
            struct.pack_into("<q", self._content, place, distance)
        elif kind == _ABSOLUTE and self._sections[each.section].flags & _WRITE:
            self._point(place, self._address(symbol) + each.addend)
        else:
            raise ValueError(f"relocation {kind} of {self._symbols[symbol].name} is not known")

    def _write(self, place: int, distance: int) -> None:
        struct.pack_into("<i", self._content, place, distance)
