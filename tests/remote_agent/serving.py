"""A host whose recipes serve: an agent of its own on this machine, the example server, and servers that misbehave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from remote_agent.agentd.launch import connect
from remote_agent.agentd.paths import StateDir
from remote_agent.client import open_client
from remote_agent.protocol.messages import (
    Actor,
    FirstRequest,
    ModelSource,
    Recipe,
    RunStartParams,
    Serve,
    SubscribeParams,
    SubscribeResult,
)
from tests.remote_agent import checkpoints
from tests.remote_agent.agentd.agents import REPOSITORY, Watcher

EXAMPLES = REPOSITORY / "docs" / "examples"
PROMPT_TOKENS, NEW_TOKENS = 16, 4

BAD_SERVERS = """
import http.server
import socket

def returns(model, tokenizer, context):
    print("nothing to do here", flush=True)

def raises(model, tokenizer, context):
    raise RuntimeError("no more workers")

def waits(model, tokenizer, context):
    context.stop.wait()

def accepts(model, tokenizer, context):
    with socket.create_server((context.host, context.port)):
        context.stop.wait()

class Empty(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(503, "still warming")

    def do_POST(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"choices": [{"text": ""}]}')

    def log_message(self, *arguments):
        pass

def empty(model, tokenizer, context):
    with http.server.HTTPServer((context.host, context.port), Empty) as server:
        context.on_stop(server.shutdown)
        server.serve_forever(0.05)
"""


class Host:
    """An agent of its own state directory, and a client that follows it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, StateDir(folder / "state" / "glowplug-agent")
        self.model = checkpoints.write_llama(folder / "llama")
        (folder / "bad_servers.py").write_text(BAD_SERVERS)
        self._runs = 0

    def agent(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(
            [sys.executable, "-m", "remote_agent", *arguments], cwd=self.folder, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def glowplug(self, params: RunStartParams, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a console's verb; node ``x`` is this host, and the run's recipe is in its configuration."""
        serve, config = serve_of(params), self.folder / "fleet.toml"
        transport = ["env", f"PYTHONPATH={REPOSITORY}"]
        config.write_text(
            f"[nodes.x]\ntransport = {json.dumps(transport)}\npython = {json.dumps(sys.executable)}\n"
            f'agent = ["-m", "remote_agent"]\nstate_directory = {json.dumps(str(self.state.root))}\n'
            f"[recipes.tiny]\nmodel = {{ path = {json.dumps(str(self.model))} }}\n"
            f'devices = ["cpu"]\ntarget_tier = "resident"\n[recipes.tiny.serve]\n'
            f"entry = {json.dumps(serve.entry)}\npath = {json.dumps(serve.path)}\nport = {serve.port}\n"
        )
        options = ["--config", str(config), "--history", str(self.folder / "history.db")]
        return subprocess.run(
            [sys.executable, "-m", "console", *options, *arguments], cwd=REPOSITORY, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def start(self) -> Watcher:
        """Start the agent, if it does not run, and return a client that is told its events from now on."""
        with open_client(self.state, "test"):
            link = connect(self.state)
        assert link is not None
        link.settimeout(90.0)
        client = Watcher(link, self.state)
        client.greeting = client.hello("test")
        client.call("subscribe", SubscribeParams("", client.greeting.newest_seq, samples=False), SubscribeResult)
        return client

    def params(
        self, name: str = "tiny", tier: Any = "resident", devices: tuple[str, ...] = ("cpu",), **serve: Any
    ) -> RunStartParams:
        """Return a run that serves the model by the example server, or as ``serve`` says."""
        self._runs += 1
        settings = {"entry": "completion_server:serve", "path": str(EXAMPLES), "port": free_port(), **serve}
        recipe = Recipe(
            name,
            ModelSource(str(self.model)),
            devices=devices,
            target_tier=tier,
            request=FirstRequest(prompt_tokens=PROMPT_TOKENS, max_new_tokens=NEW_TOKENS),
            serve=Serve(**settings),
        )
        return RunStartParams(f"serve-run-{self._runs:04}", recipe, Actor("ann", "laptop"))


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
    return port


def is_open(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def serve_of(params: RunStartParams) -> Serve:
    assert params.recipe.serve is not None
    return params.recipe.serve
