"""fleet.toml: what is read, what is refused, and on which line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.config import load, parse
from console.config_lines import key_lines, line_of
from console.config_nodes import shell_problem
from console.errors import ConfigError, UsageError
from remote_agent.protocol.messages import NATIVE_STAGES

REPOSITORY = Path(__file__).parents[2]
PATH = Path("fleet.toml")


def problems(text: str, path: Path = PATH) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse(text, path)
    assert error.value.exit_code == 2
    return list(error.value.problems)


def test_storage_that_nodes_share_is_counted() -> None:
    """One load at a time where no number is said; the defaults' group is every node's that names none."""
    nodes = "[nodes.a]\n[nodes.b]\nstorage_group = 'nas-2'\n"
    text = f"[defaults]\nstorage_group = 'nas-1'\n{nodes}[storage_groups]\nnas-2 = 3\n"
    config = parse(text, Path("fleet.toml"))

    assert [node.storage_group for node in config.nodes] == ["nas-1", "nas-2"]
    assert config.storage_groups == {"nas-1": 1, "nas-2": 3}


def test_defaults_hold_where_a_node_says_nothing(tmp_path: Path) -> None:
    """A node's own setting wins; a program's node takes none of SSH's."""
    (tmp_path / "key").write_text("a key")
    text = """
[defaults]
user = "ops"
port = 2200
identity = "key"
python = ["conda", "run", "python"]
tags = ["all-of-us"]
hold_budget = "80%"
[nodes.a]
host = "h"
[nodes.b]
host = "h"
user = "me"
tags = ["b"]
python = "/usr/bin/python3"
hold_budget = "60 GB"
[nodes.c]
transport = ["docker", "exec", "-i", "c"]
"""
    config = parse(text, tmp_path / "fleet.toml")
    a, b, c = config.nodes

    assert (a.user, a.port, a.identity) == ("ops", 2200, (str(tmp_path / "key"),))
    assert a.python == ("conda", "run", "python")
    assert (a.hold_budget, b.hold_budget) == ("80%", "60 GB")
    assert (b.user, b.python, b.tags) == ("me", ("/usr/bin/python3",), ("all-of-us", "b"))
    assert (c.user, c.port, c.identity, c.tags) == (None, None, (), ("all-of-us",))


def test_several_wrong_values_of_one_table_are_told_together() -> None:
    """Also beside a value that does not even have its type, or is missing."""
    text = """\
[recipes."a b"]
model = { path = "/m" }
devices = ["gpu", "cpu", "tpu"]
dtype = "int3"
deadlines = { weights = -1, wieghts = 1 }
environment = { "A=B" = "x" }
request = { batch = 0, prompt_tokens = 0, max_new_tokens = "two", sampling = { temperature = 101 } }
"""
    assert [line.partition(": ")[2] for line in problems(text)] == [
        "recipes.a b.name: 'a b' must be 1..64 letters, digits, '.', '_' or '-'",
        "recipes.a b.devices: 'gpu' is not auto, all, cpu, cuda:N or a GPU UUID",
        "recipes.a b.devices: 'tpu' is not auto, all, cpu, cuda:N or a GPU UUID",
        "recipes.a b.dtype: 'int3' is not one of: auto, float32, float16, bfloat16",
        "recipes.a b.deadlines.weights: -1.0 must be above 0 seconds",
        f"recipes.a b.deadlines.wieghts: is not a stage; stages are {', '.join(NATIVE_STAGES)}",
        "recipes.a b.environment: 'A=B' is not a variable name",
        "recipes.a b.request.max_new_tokens: expected an integer, got text",
        "recipes.a b.request.sampling.temperature: 101.0 is not within 0..100",
        "recipes.a b.request.batch: 0 is not within 1..4096",
        "recipes.a b.request.prompt_tokens: 0 is not within 1..1048576",
    ]


def test_every_mistake_is_told_at_once_with_its_line() -> None:
    """One raise names them all, in the file's order."""
    text = """\
[defaults]
prot = 5
jump = "no such hop"
[nodes.gpu-1]
host = "-oProxyCommand=x"
port = 99999
usr = "x"
python = [
  "python3",
  "a'b",
]
recipes = ["lama"]
[nodes."bad name"]
transport = ["kubectl"]
host = "x"
[nodes.GPU-1]
agent = "$(rm)"
[recipes.llama]
model = { path = "", pth = 1 }
request.shapes = [
  { batch = 1 },
  { batch = 0 },
]
[nodez]
"""
    assert problems(text) == [
        "fleet.toml:2: defaults.prot: unknown key; did you mean port?",
        "fleet.toml:3: defaults.jump: 'no such hop' is neither a node nor [user@]host[:port]",
        "fleet.toml:5: nodes.gpu-1.host: '-oProxyCommand=x' is not a host name or address",
        "fleet.toml:6: nodes.gpu-1.port: 99999 is not within 1..65535",
        "fleet.toml:7: nodes.gpu-1.usr: unknown key; did you mean user?",
        'fleet.toml:8: nodes.gpu-1.python: "a\'b" holds a single quote, which a remote shell could act on',
        "fleet.toml:12: nodes.gpu-1.recipes[0]: no recipe 'lama'; did you mean llama?",
        "fleet.toml:13: nodes.bad name: a node's name must be 1..64 letters, digits, '.', '_' or '-', "
        "the first a letter or digit",
        "fleet.toml:15: nodes.bad name.host: is for SSH and can't stand beside transport",
        "fleet.toml:16: nodes.GPU-1: differs from gpu-1 in case only",
        "fleet.toml:17: nodes.GPU-1.agent: '$(rm)' holds '$', which a remote shell could act on",
        "fleet.toml:19: recipes.llama.model.pth: unknown key; did you mean path?",
        "fleet.toml:19: recipes.llama.model.path: must name a file or directory on the host",
        "fleet.toml:22: recipes.llama.request.shapes[1].batch: 0 is not within 1..4096",
        "fleet.toml:24: nodez: unknown key; did you mean nodes?",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = \n", "fleet.toml:1: not TOML"),
        ("[nodes.a]\n\nhost = 'x\n", "fleet.toml:3: not TOML"),
        ("[nodes.a]\n[nodes.a]\n", "fleet.toml:2: not TOML: Cannot declare"),
        ("x = [\n" * 3000, "not TOML"),
        ("nodes = 3\n", "fleet.toml:1: nodes: expected tables [nodes.NAME]"),
        ("[nodes]\na = 3\n", "fleet.toml:2: nodes.a: expected a table, got an integer"),
        ("[nodes.all]\n", "fleet.toml:1: nodes.all: 'all' stands for every node"),
        ("[nodes.a]\nport = true\n", "fleet.toml:2: nodes.a.port: expected an integer, got a boolean"),
        ("[nodes.a]\nhost = 'me@h'\n", "fleet.toml:2: nodes.a.host: 'me@h' is not a host name or address; a user goes"),
        ("[nodes.a]\nuser = '-lroot'\n", "fleet.toml:2: nodes.a.user: '-lroot' is not a user name"),
        ("[nodes.a]\nidentity = '/no/such/key'\n", "fleet.toml:2: nodes.a.identity: no such file: /no/such/key"),
        ("[nodes.a]\nssh_config = '/no/such/file'\n", "fleet.toml:2: nodes.a.ssh_config: no such file: /no/such/file"),
        ("[nodes.a]\nknown_hosts = 'none'\n", "fleet.toml:2: nodes.a.known_hosts: host keys are always checked"),
        ("[nodes.a]\ntransport = []\n", "fleet.toml:2: nodes.a.transport: name at least one"),
        ("[nodes.a]\ntransport = 'ssh a'\n", "fleet.toml:2: nodes.a.transport: expected a list, got text"),
        ("[defaults]\nhold_budget = 'much'\n", "fleet.toml:2: defaults.hold_budget: 'much' is neither a percentage"),
        ("[nodes.a]\nstorage_group = 'n 1'\n", "fleet.toml:2: nodes.a.storage_group: 'n 1': a group's name must be"),
        ("[nodes.a]\nstorage_group = 'n'\n[storage_groups]\nn = 0\n", "fleet.toml:4: storage_groups.n: expected a"),
        ("[nodes.a]\nstorage_group = 'n'\n[storage_groups]\nn1 = 1\n", "fleet.toml:4: storage_groups.n1: no node has"),
        ("storage_groups = 3\n", "fleet.toml:1: storage_groups: expected a table [storage_groups]"),
        ("[nodes.a]\nstate_directory = 'relative'\n", "fleet.toml:2: nodes.a.state_directory: 'relative' must begin"),
        ("[nodes.a]\ntags = ['ok', 'not ok']\n", "fleet.toml:2: nodes.a.tags[1]: a tag must be"),
        ("[nodes.a]\njump = 'a'\n", "fleet.toml:2: nodes.a.jump: jumps in a circle"),
        ("[nodes.a]\njump = 'b'\n[nodes.b]\njump = 'a'\n", "fleet.toml:2: nodes.a.jump: jumps in a circle"),
        ("[nodes.a]\njump = 'b'\n[nodes.b]\ntransport = ['x']\n", "fleet.toml:2: nodes.a.jump: b has a transport"),
        ("[defaults]\nparallel = 0\n", "fleet.toml:2: defaults.parallel: 0 is not within"),
        ("[recipes.r]\n", "fleet.toml:1: recipes.r.model: is required"),
        ("[recipes.'b d']\nmodel = { path = 'm' }\n", "fleet.toml:1: recipes.b d.name: 'b d' must be"),
        ("[recipes.r]\nname = 's'\nmodel = { path = 'm' }\n", "fleet.toml:2: recipes.r.name: a recipe's name is"),
        ("[nodes.\"\\u001b[2J\"]\n", "fleet.toml:1: nodes.: a node's name must"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_line(text: str, problem: str) -> None:
    """One mistake a case: where it is, and what it is."""
    assert any(problem in told for told in problems(text)), problems(text)


def test_ssh_s_configuration_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    """Relative to fleet.toml, for the defaults as for a node, and passed on to a node's hops."""
    (tmp_path / "ssh_config").touch()
    text = "[defaults]\nssh_config = 'ssh_config'\n[nodes.a]\njump = 'x'\n[nodes.b]\nssh_config = false\n"
    config = parse(text, tmp_path / "fleet.toml")

    assert [node.ssh_config for node in config.nodes] == [str(tmp_path / "ssh_config"), False]
    assert config.node("a").hops[0].ssh_config == str(tmp_path / "ssh_config")


@pytest.mark.parametrize("item", ["'", '"', "\\", "$HOME", "`id`", "a!b", "a\nb", "a\tb", "\x1b[2J", ""])
def test_what_a_shell_could_act_on_is_refused_by_name(item: str) -> None:
    """No such character reaches a remote command line."""
    assert shell_problem(item)
    assert shell_problem("/opt/my python;rm -rf *|&<>(){}é") is None


def test_the_hint_for_a_missing_file_makes_its_folder_too(tmp_path: Path) -> None:
    """As a shell reads it, in a folder that is not there and whose name has a space."""
    path = tmp_path / "Application Support" / "glowplug" / "fleet.toml"
    with pytest.raises(ConfigError) as error:
        load(path)
    command = str(error.value).split("`")[1]
    python, folder = shlex.quote(sys.executable), shlex.quote(str(REPOSITORY))
    script = f'glowplug() {{ PYTHONPATH={folder} {python} -m console "$@"; }}; {command}'
    subprocess.run(["sh", "-c", script], check=True, timeout=60)

    assert load(path).nodes


def test_files_that_can_not_be_read_say_why(tmp_path: Path) -> None:
    """Missing, a directory, not UTF-8, too big, a name no system has."""
    binary, big = tmp_path / "binary.toml", tmp_path / "big.toml"
    binary.write_bytes(b"# ok\n# \xff\n")
    big.write_text("#" * (1 << 20) + "\n")
    wanted = {
        tmp_path / "missing.toml": "no such file; `mkdir -p ",
        tmp_path: "is a directory",
        binary: "binary.toml:2: is not UTF-8 text: byte 0xff",
        big: "is over 1048576 bytes",
        tmp_path / "nul\0": "null byte",
    }
    for path, text in wanted.items():
        with pytest.raises(ConfigError, match=re.escape(text)):
            load(path)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    os.mkfifo(tmp_path / "fleet.toml")

    with pytest.raises(ConfigError, match="is not a regular file"):
        load(tmp_path / "fleet.toml")


def test_a_huge_name_or_number_is_cut_and_what_is_wrong_is_still_said() -> None:
    """The mistake is readable although the name before it is endless."""
    endless = "a" * 100_000
    told = problems(f"[nodes.{endless}]\nhost = 'h'\nport = 0x{'f' * 5000}\nconnect_timeout_s = nan\n")
    told += problems(f"[recipes.r]\nmodel = {{path = '/m'}}\ndtype = 0x{'f' * 5000}\n")

    assert all(len(line) < 400 for line in told)
    for what in ("a node's name must be", "does not fit 64 bits", "expected a finite number, got nan", "not one of"):
        assert any(what in line for line in told)


def test_an_empty_file_is_an_empty_fleet(tmp_path: Path) -> None:
    """No nodes is not a mistake; selecting some is."""
    (tmp_path / "fleet.toml").write_text("")
    config = load(tmp_path / "fleet.toml")

    assert config.nodes == ()
    with pytest.raises(UsageError, match="has no nodes"):
        config.select(["all"])


def test_lines_are_found_in_every_form_toml_has() -> None:
    """Dotted and quoted keys, arrays over lines, inline tables, arrays of tables, strings that look like keys."""
    text = '''# [not.a.table]
a.b = 1
"c d" = """
x = 1
[y]
"""
'e' = \'\'\'
z = 2\'\'\'

[t . "u.v"]
list = [ # [
  "]", 1,
  { k = "}", l = [ 2,
    3 ] },
]
[[arr]]
n = 1
[[arr]]
n = { m = 2 }
[arr.sub]
o = 1979-05-27T07:32:00Z
'''
    lines = key_lines(text)

    wanted = {
        "a": 2, "a.b": 2, "c d": 3, "e": 7, "t": 10, "t.u.v": 10, "t.u.v.list": 11, "t.u.v.list[0]": 12,
        "t.u.v.list[2]": 13, "t.u.v.list[2].k": 13, "t.u.v.list[2].l[1]": 14, "arr[0].n": 17, "arr[1]": 18,
        "arr[1].n.m": 19, "arr[1].sub": 20, "arr[1].sub.o": 21,
    }  # fmt: skip
    assert {key: lines.get(key) for key in wanted} == wanted
    assert "x" not in lines
    assert line_of(lines, "t.u.v.list[2].missing[4].deeper") == 13
    assert line_of(lines, "nowhere.at.all") == 1


@given(st.text(max_size=200))
def test_any_text_is_a_configuration_or_a_configuration_error(text: str) -> None:
    """Nothing that a file can hold raises anything else."""
    try:
        parse(text, PATH)
        told: tuple[str, ...] = ()
    except ConfigError as error:
        told = error.problems
    assert all(problem.isprintable() for problem in told)
