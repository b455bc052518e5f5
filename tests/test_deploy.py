"""The files under deploy/ fit the agent: what they start is started here."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the agent's single file where an upload puts it."""
    home = tmp_path_factory.mktemp("home")
    folder = home / ".local" / "share" / "glowplug"
    folder.mkdir(parents=True)
    script = "import sys; sys.path.insert(0, sys.argv[1]); import build; from pathlib import Path"
    command = f"{script}; build.build_pyz(Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", command, DEPLOY, folder / "glowplug-agent.pyz"], check=True)
    return home


@pytest.fixture
def unit() -> configparser.ConfigParser:
    """The systemd unit, read."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "glowplug-agent.service").read_text(encoding="utf-8"))
    return parser


def entrypoint() -> list[str]:
    """Return the container's entry point."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    argv: list[str] = json.loads(line)
    return argv


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="gp-") as folder:
        yield Path(folder)


def starts_and_ends(command: list[str], environment: dict[str, str], state: Path) -> tuple[int, str]:
    """Start an agent in the foreground, connect once it says that it listens, end it; return its exit code and log."""
    agent = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert agent.stdout is not None
    log = ""
    try:
        while "listens" not in log and (line := agent.stdout.readline()):
            log += line
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(state / "run" / "control.sock"))
        agent.send_signal(signal.SIGTERM)
        log += agent.communicate(timeout=DEADLINE_S)[0]
    finally:
        agent.kill()
        agent.communicate()
    return agent.returncode, log


def test_the_unit_starts_an_agent_that_ends_when_it_is_told(
    home: Path, unit: configparser.ConfigParser, short_folder: Path
) -> None:
    """ExecStart, with the home in its place, is an agent in the foreground; SIGTERM ends it with success."""
    command = shlex.split(unit["Service"]["ExecStart"].replace("%h", str(home)))
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": python, "HOME": str(home), "XDG_STATE_HOME": str(short_folder)}

    code, log = starts_and_ends(command, environment, short_folder / "glowplug-agent")
    assert code == 0, log


def test_the_unit_leaves_alone_what_must_outlive_the_agent(unit: configparser.ConfigParser) -> None:
    """systemd ends the agent's own process alone, and takes another agent's lock for success."""
    from remote_agent.agentd.launch import ALREADY_RUNS

    assert unit["Service"]["KillMode"] == "process"
    assert unit["Service"]["RestartPreventExitStatus"] == str(ALREADY_RUNS)
    assert unit["Service"]["SuccessExitStatus"] == str(ALREADY_RUNS)


def test_the_containers_entry_point_starts_an_agent(home: Path, short_folder: Path) -> None:
    """As a container does it: no home, no user's environment, the state where the image's environment says."""
    pyz = home / ".local" / "share" / "glowplug" / "glowplug-agent.pyz"
    python, agent, *rest = entrypoint()
    environment = {"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(short_folder)}

    assert (python, agent) == ("python3", "/opt/glowplug/glowplug-agent.pyz")
    code, log = starts_and_ends([sys.executable, str(pyz), *rest], environment, short_folder / "glowplug-agent")
    assert code == 0, log


def test_the_manifest_fits_the_image() -> None:
    """Volumes, mounts, labels and the state's place agree among the manifest and the image."""
    service, workload = manifests()
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    labels = workload["spec"]["template"]["metadata"]["labels"]

    assert (service["kind"], workload["kind"]) == ("Service", "StatefulSet")
    assert labels == workload["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert workload["spec"]["serviceName"] == service["metadata"]["name"]
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert f"ENV XDG_STATE_HOME={mounts['state']}\n" in (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}


def test_the_nodes_that_the_comments_show_can_be_configured(tmp_path: Path) -> None:
    """The lines for fleet.toml in the manifest and the Containerfile are valid configuration."""
    from console.config import load

    shown = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    lines = re.findall(r"^#   (\[nodes.*|transport = .*|agent = .*)$", shown, re.MULTILINE)
    path = tmp_path / "fleet.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = load(path)

    assert len(lines) == 3
    assert [node.name for node in config.nodes] == ["gpu-0"]
