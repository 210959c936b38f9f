"""Link one ELF object file of x86-64 to code and data that can be mapped anywhere.

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


class _Section(NamedTuple):
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


def link(file: bytes, exported: Sequence[str]) -> Linked:
    """Link an object file. Raises ValueError for a relocation that is not known."""
    return _Linker(file).link(exported)


class _Linker:
    """Lays out the sections of one file, and relocates them."""

    def __init__(self, file: bytes) -> None:
        if file[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", file, 18)[0] != 62:
            raise ValueError("no object file of x86-64")
        self._file = file
        offset = struct.unpack_from("<Q", file, 40)[0]
        count = struct.unpack_from("<H", file, 60)[0]
        self._sections = [
            _Section(*_SECTION.unpack_from(file, offset + i * _SECTION.size)) for i in range(count)
        ]
        self._symbols = self._read_symbols()
        self._content = bytearray()
        self._places: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._stubs: dict[int, int] = {}
        self._relative: list[int] = []

    def link(self, exported: Sequence[str]) -> Linked:
        loaded = [i for i, each in enumerate(self._sections) if self._is_loaded(each)]
        relocations = list(self._relocations(loaded))
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

    def _is_loaded(self, section: _Section) -> bool:
        is_content = section.kind in (_PROGBITS, _NOBITS) and section.flags & _ALLOC
        return bool(is_content and section.size) and self._section_name(section) != _UNWINDING

    def _section_name(self, section: _Section) -> str:
        names = self._sections[struct.unpack_from("<H", self._file, 62)[0]]
        return self._text(names.offset + section.name)

    def _text(self, offset: int) -> str:
        return self._file[offset : self._file.index(b"\0", offset)].decode()

    def _read_symbols(self) -> list[_Symbol]:
        (table,) = [each for each in self._sections if each.kind == _SYMTAB]
        names = self._sections[table.link].offset
        found = []
        for offset in range(table.offset, table.offset + table.size, _SYMBOL.size):
            name, _, _, section, value, _ = _SYMBOL.unpack_from(self._file, offset)
            found.append(_Symbol(self._text(names + name), section, value))
        return found

    def _relocations(self, loaded: Sequence[int]) -> Iterator[_Relocation]:
        for section in self._sections:
            if section.kind != _RELA or section.info not in loaded:
                continue
            for at in range(section.offset, section.offset + section.size, _RELOCATION_ENTRY.size):
                place, info, addend = _RELOCATION_ENTRY.unpack_from(self._file, at)
                yield _Relocation(section.info, place, info & 0xFFFFFFFF, info >> 32, addend)

    def _place(self, sections: Sequence[int]) -> None:
        for i in sections:
            section = self._sections[i]
            self._align(max(section.align, 1))
            self._places[i] = len(self._content)
            content = self._file[section.offset : section.offset + section.size]
            self._content += bytes(section.size) if section.kind == _NOBITS else content

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
