"""The generated code is of the messages that are committed."""

from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from router.forward.picker.wire import kv_router_picker_pb2

WIRE = Path(kv_router_picker_pb2.__file__).parent
INCLUDED = Path(grpc_tools.__file__).parent / "_proto"


def test_generated_code_is_current(tmp_path):
    found = tmp_path / "messages"
    arguments = [f"-I{WIRE}", f"-I{INCLUDED}", f"--descriptor_set_out={found}"]
    assert protoc.main(["protoc", *arguments, str(WIRE / "kv_router_picker.proto")]) == 0
    (made,) = FileDescriptorSet.FromString(found.read_bytes()).file
    kept = FileDescriptorProto()
    kv_router_picker_pb2.DESCRIPTOR.CopyToProto(kept)
    assert _without_json_names(made) == _without_json_names(kept), "run `make epp-messages`"


def _without_json_names(file):
    """The compiler adds them to what it writes, but not to the code that it generates."""
    waiting = list(file.message_type)
    while waiting:
        message = waiting.pop()
        waiting += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file
