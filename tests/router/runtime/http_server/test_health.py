"""`kv-router health`, against real routers; and how it finds out where they listen."""

import asyncio
import json

import pytest

from router import cli
from router.runtime.http_server.health import HealthQuery, health_query_at, problem, started_with
from router.runtime.process.settings import INDEXER_PREFIX, ROUTER_PREFIX
from support.fleets.direct import DirectRouter
from support.processes.certificates import Authority
from support.processes.servers import free_port
from worker_agent import cli as agent_cli


@pytest.fixture
def files(tmp_path):
    authority = Authority(tmp_path)
    cert_file, key_file = authority.issue("router")
    return {
        "tls_cert_file": cert_file, "tls_key_file": key_file,
        "tls_client_ca_file": str(authority.path),
    }  # fmt: skip


@pytest.mark.parametrize("secured", [0, 2, 3])
async def test_health_check_needs_no_token(files, secured, capsys):
    fields = dict(list(files.items())[:secured])
    router = DirectRouter(**fields)
    asked = HealthQuery("127.0.0.1", router.config.http.http_port, secured > 0, secured > 2)
    async with router.running() if not secured else served(router):
        assert await asyncio.to_thread(problem, asked) is None
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in fields.items()]
        port = f"--http-port={router.config.http.http_port}"
        status = await asyncio.to_thread(cli.main, ["health", "serve", port, *flags])
        assert status == 0
        status = await asyncio.to_thread(cli.main, ["health", "serve", port, *flags, "--json"])
        assert (status, json.loads(capsys.readouterr().out)["healthy"]) == (0, True)
        wrong = flags or [f"--tls-cert-file={files['tls_cert_file']}"]
        if not secured:  # asked in TLS, it does not understand
            assert await asyncio.to_thread(cli.main, ["health", "serve", port, *wrong]) == 1


def served(router):
    """Behind TLS, where its own client does not get in."""
    router.is_up = lambda: asyncio.sleep(0, router.service.host.status is not None)
    return router.running()


@pytest.mark.parametrize("main", [cli.main, agent_cli.main])
def test_health_without_a_server_is_an_error(main, capsys):
    command = "serve" if main is cli.main else "run"
    port = free_port()
    assert main(["health", command, f"--http-port={port}"]) == 1
    assert f"not healthy: 127.0.0.1:{port}: " in capsys.readouterr().err
    port = free_port()
    assert main(["health", "--json", command, f"--http-port={port}"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["healthy"], answer["address"]) == (False, f"127.0.0.1:{port}")
    assert "refused" in answer["reason"]


@pytest.mark.parametrize("main", [cli.main, agent_cli.main])
def test_health_help_sends_no_request(main, capsys):
    with pytest.raises(SystemExit) as end:
        main(["health", "--help"])
    assert end.value.code == 0
    assert "health [options] [COMMAND" in capsys.readouterr().out


def test_health_check_uses_the_configured_address(tmp_path):
    file = tmp_path / "router.toml"
    file.write_text("http_port = 1\nhost = '0.0.0.0'\nnonsense = 1\n")
    environment = {"KV_ROUTER_CONFIG": str(file), "KV_ROUTER_INDEXER_HTTP_PORT": "2"}
    assert health_query_at([], environment, ROUTER_PREFIX, 9) == HealthQuery(
        "127.0.0.1", 1, False, False
    )
    assert health_query_at([], environment, INDEXER_PREFIX, 9).port == 2
    assert health_query_at([], {}, INDEXER_PREFIX, 9).port == 9
    flags = ["--http-port", "3", "--name", "x", "--host=10.0.0.1", "--tls-cert-file=c"]
    assert health_query_at(flags, environment, ROUTER_PREFIX, 9) == HealthQuery(
        "10.0.0.1", 3, True, False
    )


def test_health_check_reads_the_options_of_process_1(tmp_path):
    file = tmp_path / "cmdline"
    assert started_with("kv-router", file) == []
    file.write_bytes(b"/usr/bin/python3\0/usr/local/bin/kv-router\0indexer\0--http-port=7\0")
    assert started_with("kv-router", file) == ["indexer", "--http-port=7"]
    assert started_with("kv-worker-agent", file) == []
