"""The generated code is of the messages that are committed."""

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from router.forward.picker.wire import kv_router_picker_pb2

WIRE = Path(kv_router_picker_pb2.__file__).parent


def test_generated_code_is_current(tmp_path):
    found = tmp_path / "messages"
    # In a process of its own: NIXL, of other tests, is not loaded beside this compiler.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{WIRE}"]
    command += [f"--descriptor_set_out={found}", str(WIRE / "kv_router_picker.proto")]
    subprocess.run(command, check=True, timeout=60)
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
