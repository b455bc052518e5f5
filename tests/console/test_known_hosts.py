"""known_hosts files: known, unknown, changed and revoked are four things."""

from __future__ import annotations

import base64
import hashlib
import hmac
import stat
from pathlib import Path

import asyncssh
import pytest

from console.errors import NodeMisconfigured
from console.transports.known_hosts import Verdict, append, entry_line, read


def new_key(algorithm: str = "ssh-ed25519") -> asyncssh.SSHKey:
    return asyncssh.generate_private_key(algorithm).convert_to_public()


def public(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


def test_a_host_without_an_entry_is_unknown(tmp_path: Path) -> None:
    """A file that isn't there is an empty file."""
    known = read([tmp_path / "missing", tmp_path / "missing/too"], "host", 22)

    assert known.keys == ()
    assert known.judge(new_key()) is Verdict.UNKNOWN


def test_another_key_than_the_known_one_has_changed(tmp_path: Path) -> None:
    """Of whatever type it is, and whichever of the files knows the host."""
    first, second = tmp_path / "first", tmp_path / "second"
    key, other = new_key(), new_key("ecdsa-sha2-nistp256")
    first.write_text(f"other.example {public(new_key())}\n")
    second.write_text(f"host {public(key)}\n")
    known = read([first, second], "host", 22)

    assert known.keys == (key,)
    assert known.judge(other) is Verdict.CHANGED
    assert known.algorithms()[0] == "ssh-ed25519"
    assert set(known.algorithms()) > {"ecdsa-sha2-nistp256", "rsa-sha2-512"}


def test_a_port_of_its_own_has_entries_of_its_own(tmp_path: Path) -> None:
    """The plain name vouches for another port, as in OpenSSH, but is no evidence of a change there."""
    file = tmp_path / "known_hosts"
    plain, ported = new_key(), new_key()
    file.write_text(f"host {public(plain)}\n")

    assert read([file], "host", 2222).keys == (plain,)
    assert read([file], "host", 2222).judge(new_key()) is Verdict.UNKNOWN
    file.write_text(f"host {public(plain)}\n[host]:2222 {public(ported)}\n")
    assert set(read([file], "host", 2222).keys) == {plain, ported}
    assert read([file], "host", 2222).judge(new_key()) is Verdict.CHANGED
    assert read([file], "host", 22).keys == (plain,)


def test_hashed_pattern_and_revoked_entries_count(tmp_path: Path) -> None:
    """What ssh-keygen writes is read as ssh reads it."""
    file = tmp_path / "known_hosts"
    key, bad = new_key(), new_key()
    digest = hmac.new(b"salt", b"[secret]:2222", hashlib.sha1).digest()
    hashed = f"|1|{base64.b64encode(b'salt').decode()}|{base64.b64encode(digest).decode()}"
    file.write_text(f"{hashed} {public(key)}\n*.example,!bad.example {public(key)}\n@revoked * {public(bad)}\n")

    assert read([file], "secret", 2222).keys == (key,)
    assert read([file], "good.example", 22).keys == (key,)
    assert read([file], "bad.example", 22).keys == ()
    assert read([file], "secret", 2222).judge(bad) is Verdict.REVOKED


def test_a_host_under_an_authority_does_not_become_unknown(tmp_path: Path) -> None:
    """Who presents a plain key where a certificate is due can't be accepted as new."""
    file = tmp_path / "known_hosts"
    file.write_text(f"@cert-authority *.example {public(new_key())}\n")
    known = read([file], "a.example", 22)

    assert known.judge(new_key()) is Verdict.NOT_CERTIFIED
    assert known.algorithms()[0].endswith("-cert-v01@openssh.com")


@pytest.mark.parametrize("line", ["just-a-host", "@unknown-marker host ssh-ed25519 AAAA", "|1|x| KEY", "host, KEY"])
def test_a_line_that_can_not_be_read_is_named(tmp_path: Path, line: str) -> None:
    """File and line; also a list with an empty name, which would stand for every host."""
    file = tmp_path / "known_hosts"
    file.write_text(f"# comment\n\n{line.replace('KEY', public(new_key()))}\n")

    with pytest.raises(NodeMisconfigured, match=rf"^{file}:3: "):
        read([file], "host", 22)


def test_appending_makes_a_private_file_and_whole_lines(tmp_path: Path) -> None:
    """A file that does not end with a line break is not run into."""
    file = tmp_path / "new/known_hosts"
    first, second = new_key(), new_key()
    append(file, entry_line("host", 22, first))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    file.write_text(file.read_text().rstrip("\n"))
    append(file, entry_line("host", 2222, second))

    assert read([file], "host", 22).keys == (first,)
    assert read([file], "host", 2222).exact == (second,)
    with pytest.raises(ValueError, match="one line"):
        append(file, "a b\nc d")
    with pytest.raises(NodeMisconfigured, match="Is a directory"):
        append(tmp_path, "host key data")
