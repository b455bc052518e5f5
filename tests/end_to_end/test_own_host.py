"""README's way to a host of one's own, step by step, over real ssh, scp and sshd; and what goes wrong on it."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_agent.protocol.messages import NATIVE_STAGES
from tests.console.sshd import Sshd, make_key, until
from tests.end_to_end.hosts import AGENT, REPOSITORY, OwnHost, Workstation, node_table
from tests.needs import need
from tests.remote_agent import checkpoints

pytestmark = [pytest.mark.ssh, pytest.mark.timeout(240)]

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SENTENCE = "A fixed sentence about warm GPUs."

NOISE = r"""
printf '\033[33m*** only /data is persistent ***\033[0m\n{"jsonrpc": "2.0", "id": 1, "result": {}}\n'
printf '\nGLOWPLUG-SYNC 0123456789abcdef 1 1\n{"jsonrpc":"2.0","method":"event","params":{}}\n\377\376 half a line'
echo 'bash: warning: setlocale: LC_ALL: cannot change locale (xx_XX)' >&2
trap 'echo "{\"bye\": true}"' EXIT
set -x
"""
"""For a .bashrc: colour, JSON, a false mark, bytes that are no UTF-8, a trace of each command, words at the end."""

FOREIGN = {"fish": ".config/fish/config.fish", "csh": ".cshrc"}
"""Shells that are not POSIX, with the file that each reads before any command."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that takes the default request of 128 tokens."""
    return checkpoints.write_llama(tmp_path_factory.mktemp("models") / "llama", max_position_embeddings=256)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent's single file as ``make dist`` builds it."""
    spec = importlib.util.spec_from_file_location("build_artefacts", REPOSITORY / "deploy" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    folder = tmp_path_factory.mktemp("dist")
    build.build_pyz(folder / build.PYZ_NAME)
    return folder / str(build.PYZ_NAME)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, agent: Path) -> Iterator[OwnHost]:
    """A host whose login shell says nothing, with the agent in place."""
    host = OwnHost(tmp_path_factory.mktemp("quiet"))
    host.put(agent)
    yield host.start()
    host.close()


@pytest.fixture
def plain(quiet: OwnHost) -> Iterator[OwnHost]:
    """The quiet host, on which nothing is warm."""
    yield quiet
    quiet.release_all()


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory, agent: Path) -> Iterator[OwnHost]:
    """A host whose login shell is bash with a .bashrc that no protocol should have to bear."""
    directory = tmp_path_factory.mktemp("noisy")
    host = OwnHost(directory, shell="bash", environment={"BASH_ENV": str(directory / "home" / ".bashrc")})
    host.put(agent)
    (host.home / ".bashrc").write_text(NOISE)
    yield host.start()
    host.close()


@pytest.fixture
def workstation(tmp_path: Path) -> Workstation:
    return Workstation(tmp_path / "workstation")


def recipes(model: Path) -> str:
    """Return recipes of a fleet.toml: a causal model, and the published encoder."""
    return (
        f'[recipes.llama]\nmodel = {{ path = "{model}" }}\ndevices = ["cpu"]\n'
        f'[recipes.embed]\nmodel = {{ path = "{checkpoints.minilm_folder()}" }}\ndevices = ["cpu"]\n'
        f'request = {{ kind = "encode", prompt = "{SENTENCE}" }}\n'
    )


# --- the verbs ---


def test_every_verb_answers_with_a_document_and_an_exit_code(
    plain: OwnHost, noisy: OwnHost, workstation: Workstation, model: Path
) -> None:
    """check, probe, warm, show, history, status, park, release, on a host quiet at login and one that is not."""
    names = ["quiet", "noisy"]
    workstation.configure(node_table("quiet", plain.sshd) + node_table("noisy", noisy.sshd) + recipes(model))

    def ask(*argv: str) -> Any:
        said = workstation.glowplug(*argv, "--json")
        assert said.code == 0, said
        return said.document

    check = ask("config", "check")
    assert (check["problems"], check["nodes"], check["recipes"]) == ([], names, ["llama", "embed"])
    probes = ask("probe", *names)["nodes"]
    assert [(one["error"], one["probe"]["cpu_count"]) for one in probes] == [(None, os.cpu_count())] * 2

    first = ask("warm", "llama", *names)["runs"]
    assert [run["node"] for run in first] == names
    for run in first:
        assert (run["status"], run["tier_to"], run["failure"]) == ("ready", "standby", None)
        assert [stage["name"] for stage in run["stages"]] == list(NATIVE_STAGES)
        assert {stage["status"] for stage in run["stages"]} == {"done"}
        assert sum(stage["attributed_ns"] for stage in run["stages"]) + run["unattributed_ns"] == run["wall_ns"]
    again = ask("warm", "llama", *names)["runs"]
    assert [(run["status"], run["tier_from"]) for run in again] == [("ready", "standby")] * 2
    assert len({run["output"] for run in (*first, *again)}) == 1

    listed = ask("history")["runs"]
    assert sorted(listed, key=lambda run: run["started_ns"]) == listed[::-1]
    assert {run["run_uid"]: run for run in listed} == {run["run_uid"]: run for run in (*first, *again)}
    (third,) = ask("warm", "llama", "noisy")["runs"]
    assert ask("show", third["run_uid"]) == {"run": third, "previous": again[1]}
    held = ask("status")["nodes"]
    left_by = [again[0]["run_uid"], third["run_uid"]]
    assert [[one["run_uid"] for one in node["residents"]] for node in held] == [[uid] for uid in left_by]
    parked = workstation.glowplug("park", "quiet", "llama")
    assert (parked.code, parked.err.splitlines()[-1]) == (
        1,
        "glowplug: llama on cpu has nothing on a GPU: the driver parks processes on NVIDIA GPUs alone",
    )
    for node in held:
        assert ask("release", node["node"])["released"] == node["residents"]
    assert [(node["runs"], node["residents"]) for node in ask("status", *names)["nodes"]] == [([], [])] * 2


# --- README by the letter ---


def block(language: str, before: str) -> str:
    """Return README's first code block of that language after the words ``before``."""
    found = re.search(rf"```{language}\n(.*?)```", README[README.index(before) :], re.DOTALL)
    assert found is not None
    return found[1]


def test_readme_leads_from_a_new_host_to_a_warm_model(
    plain: OwnHost, agent: Path, model: Path, workstation: Workstation
) -> None:
    """Every command that README names for a host of one's own, in its order, does what README says it does."""
    first = README[
        README.index("## First warm-up of a host of your own") : README.index("## Plan a rollout and carry it out")
    ]
    commands = re.findall(r"`(glowplug [a-z][^`]*|ssh [^`]*)`", first)
    assert commands == [
        "glowplug config path",
        "glowplug config example",
        "glowplug config check",
        "glowplug deploy gpu-1",
        "ssh gpu-1",
        "glowplug probe gpu-1",
        "glowplug warm llama gpu-1",
        "glowplug show RUN",
        "glowplug release gpu-1",
        "glowplug park gpu-1",
        "glowplug warm llama gpu-1",
        "glowplug verify gpu-1 --recipe llama",
        "glowplug cache list gpu-1",
    ]
    workstation.know(plain, "gpu-1")
    (plain.home / AGENT).unlink()
    (workstation.directory / "dist").mkdir()
    shutil.copy(agent, workstation.directory / "dist")
    put = workstation.shell(block("sh", "The same by hand"))
    assert put.code == 0, put
    assert (plain.home / AGENT).read_bytes() == agent.read_bytes()

    path = Path(workstation.glowplug("config", "path").out.strip())
    assert path == workstation.config
    text = block("toml", "The least that works").replace("/opt/venv/bin/python", sys.executable)
    workstation.configure(text.replace("/models/llama-2-7b", str(model)))
    check, deploy, _, probe, warm = (workstation.shell(command) for command in commands[2:7])
    assert (check.code, deploy.code, probe.code, warm.code) == (0, 0, 0, 0), (check, deploy, probe, warm)
    assert "1 node, 1 recipe, no mistake" in check.out
    assert probe.out.startswith("gpu-1 ")
    assert f"{os.cpu_count()} CPUs" in probe.out
    assert "✔ ready" in warm.out
    assert [stage for stage in NATIVE_STAGES if f" {stage} " not in warm.err] == []

    run = workstation.glowplug("history", "--json").document["runs"][0]
    assert run["run_uid"][:8] in warm.out
    show = workstation.shell(commands[7].replace("RUN", run["run_uid"][:8]))
    verify = workstation.shell(commands[11])
    assert verify.code == 0, verify
    park, release = workstation.shell(commands[9]), workstation.shell(commands[8])
    assert (show.code, release.code) == (0, 0), (show, release)
    assert all(stage in show.out for stage in (*NATIVE_STAGES, "unattributed"))
    assert "released" in release.out
    assert park.code == 1
    assert "has nothing on a GPU" in park.err
    cache = workstation.shell(commands[12])
    assert cache.code == 0, cache


def test_readme_s_rollout_is_planned(workstation: Workstation) -> None:
    """For the least configuration, once its node has the tag that the rollout selects."""
    least = block("toml", "The least that works").replace("[nodes.gpu-1]", '[nodes.gpu-1]\ntags = ["eu"]')
    workstation.configure(least + block("toml", "## Plan a rollout and carry it out"))
    section = README[README.index("## Plan a rollout and carry it out") : README.index("## Verbs")]
    (plan, *_) = re.findall(r"`(glowplug rollout [^`]*)`", section)

    planned = workstation.shell(plan)

    assert planned.code == 0, planned
    assert "gpu-1" in planned.out
    assert "no history" in planned.out


def test_the_example_of_the_configuration_is_free_of_mistakes(workstation: Workstation) -> None:
    """What ``config example`` prints passes ``config check`` where it is written to ``config path``."""
    workstation.configure(workstation.glowplug("config", "example").out)

    assert workstation.glowplug("config", "check").code == 0


def test_the_noisy_shell_is_noisy(noisy: OwnHost, workstation: Workstation) -> None:
    """What is passed over elsewhere is really there: on stdout and stderr, before and after a command."""
    workstation.know(noisy, "gpu-1")
    said = workstation.shell("ssh gpu-1 true | tr -d '\\377\\376'")

    assert "GLOWPLUG-SYNC 0123456789abcdef 1 1" in said.out
    assert '{"bye": true}' in said.out
    assert "+ true" in said.err


@pytest.mark.parametrize("shell", FOREIGN)
def test_a_shell_that_is_not_posix_starts_the_agent(
    tmp_path: Path, agent: Path, workstation: Workstation, shell: str
) -> None:
    """fish and csh, each with a configuration that prints; found by the alias in ssh's own configuration."""
    binary = need(shell, shell)
    host = OwnHost(tmp_path / "host", shell=binary)
    host.put(agent)
    settings = host.home / FOREIGN[shell]
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("echo '{\"motd\": true}'\n")
    workstation.know(host.start(), "gpu-1")
    workstation.configure("[nodes.gpu-1]\n")
    try:
        assert '{"motd": true}' in workstation.shell("ssh gpu-1 true").out
        said = workstation.glowplug("probe", "gpu-1", "--json")
    finally:
        host.close()

    assert said.code == 0, said
    assert said.document["nodes"][0]["probe"]["cpu_count"] == os.cpu_count()


# --- the published encoder ---


def test_a_published_encoder_answers_with_the_embedding_of_transformers(
    plain: OwnHost, workstation: Workstation, model: Path
) -> None:
    """all-MiniLM-L6-v2, warmed over the whole chain, shows the first values and the norm that transformers gives."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    workstation.configure(node_table("x", plain.sshd) + recipes(model))
    said = workstation.glowplug("warm", "embed", "x", "--json")
    assert said.code == 0, said
    (run,) = said.document["runs"]

    folder = str(checkpoints.minilm_folder())
    inputs = AutoTokenizer.from_pretrained(folder, local_files_only=True)(SENTENCE, return_tensors="pt")
    with torch.inference_mode():
        expected = AutoModel.from_pretrained(folder, local_files_only=True)(**inputs).last_hidden_state[0].mean(0)
    shown = re.fullmatch(r"embedding of 384 values, mean-pooled, norm (\S+): (.*)", run["output"])
    assert shown is not None, run["output"]
    assert float(shown[1]) == pytest.approx(float(expected.norm()), abs=1e-5)
    assert [float(word) for word in shown[2].split()] == pytest.approx(expected[:8].tolist(), abs=1e-5)
    stages = {stage["name"]: stage for stage in run["stages"]}
    sizes = {name: tensor.nbytes for name, tensor in checkpoints.read_tensors(Path(folder)).items()}
    assert stages["weights"]["bytes"] == sum(sizes.values())
    assert stages["first_request"]["extra"]["dimension"] == 384


# --- what goes wrong ---


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    """A server alone: nothing may ever be started on it."""
    server = Sshd(tmp_path / "server").start()
    yield server
    server.stop()


@pytest.mark.parametrize("verb", [("probe", "x"), ("status",), ("warm", "llama", "x")], ids=" ".join)
def test_a_host_key_that_is_not_known_is_shown_and_never_accepted(
    server: Sshd, workstation: Workstation, model: Path, verb: tuple[str, ...]
) -> None:
    """Exit code 3 with the fingerprint that ssh-keygen prints; no login, and no file that would know the key now."""
    server.known_hosts.unlink()
    workstation.configure(node_table("x", server) + recipes(model))
    said = workstation.glowplug(*verb)

    assert said.code == 3, said
    assert f"is not known: ED25519 {server.fingerprint()}" in said.out + said.err
    assert server.logins() == 0
    assert not server.known_hosts.exists()
    data = server.host_key.with_suffix(".pub").read_text().split()[1]
    files = [path for path in workstation.directory.rglob("*") if path.is_file()]
    assert [path for path in files if data.encode() in path.read_bytes()] == []


def test_a_host_key_that_has_changed_is_a_hard_stop(
    tmp_path: Path, server: Sshd, workstation: Workstation, model: Path
) -> None:
    """Exit code 3 after one try, whatever the verb waits for; known_hosts stays as it is."""
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text().split()
    line = f"[127.0.0.1]:{server.port} {other[0]} {other[1]}\n"
    server.known_hosts.write_text(line)
    workstation.configure(node_table("x", server) + recipes(model))
    said = [workstation.glowplug(*verb) for verb in (("probe", "x"), ("warm", "llama", "x"))]

    for one in said:
        assert (one.code, one.out) == (3, ""), one
        assert f"has changed: it shows ED25519 {server.fingerprint()}" in one.err
    assert server.logins() == 0
    assert server.log.read_text().count("Received disconnect from") == len(said)
    assert server.known_hosts.read_text() == line


def test_a_python_without_torch_fails_the_run_naming_what_to_install(
    tmp_path: Path, plain: OwnHost, workstation: Workstation, model: Path
) -> None:
    """Exit code 1, stage init; the one line names the package and the Python that lacks it."""
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True, timeout=60)
    python = str(bare / "bin" / "python")
    workstation.configure(node_table("x", plain.sshd, python) + recipes(model))
    said = workstation.glowplug("warm", "llama", "x", "--json")
    (run,) = said.document["runs"]

    assert (said.code, run["status"]) == (1, "failed"), said
    assert (run["failure"]["code"], run["failure"]["stage"]) == ("missing_package", "init")
    assert "torch" in run["failure"]["detail"]
    assert python in run["failure"]["detail"]
    assert sum(stage["attributed_ns"] for stage in run["stages"]) + run["unattributed_ns"] == run["wall_ns"]


def test_a_python_that_is_not_there_is_told_in_the_shells_own_words(
    noisy: OwnHost, workstation: Workstation, model: Path
) -> None:
    """Exit code 3; what the host's shell said is shown, whatever noise came before it."""
    python = "/opt/nowhere/bin/python"
    workstation.configure(node_table("x", noisy.sshd, python) + recipes(model))
    said = workstation.glowplug("probe", "x")

    assert (said.code, said.out) == (3, ""), said
    assert "no agent" in said.err
    assert re.search(rf"{python}: (not found|No such file or directory)", said.err), said.err


# --- README on the host itself; last, since it ends the agent ---


def test_readme_does_without_a_console_on_the_host_itself(
    quiet: OwnHost, workstation: Workstation, model: Path
) -> None:
    """preflight, load, run, status, release and stop over plain ssh, as they stand in README, on a CPU."""
    script = block("sh", "On the host itself, without a console")
    for words, here in (("/opt/venv/bin/python", sys.executable), ("/models/llama-2-7b", str(model))):
        script = script.replace(words, here)
    (quiet.home / "llama.toml").write_text(f'model = {{ path = "{model}" }}\ndevices = ["cpu"]\n')
    workstation.know(quiet, "gpu-1")
    said = workstation.shell(f"ssh gpu-1 {shlex.quote('set -e; ' + script.replace('cuda:0', 'cpu'))}")

    assert said.code == 0, said
    assert said.out.rstrip().endswith("the agent has ended")
    until(lambda: not quiet.processes(), "everything ends with the agent")
