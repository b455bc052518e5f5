"""Reads ssh's configuration where no ssh client is installed, or refuses to, by file and line.

The part that can't be misread: Host blocks with patterns and negation, Include, first value
wins. What ssh alone can work out (Match, tokens outside of file names, changes to its own
lists of algorithms) and what nobody here has heard of is refused, never passed over.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from console.clean import clean
from console.transports.ssh_oracle import Settings

SYSTEM_FILE = Path("/etc/ssh/ssh_config")
INCLUDE_DEPTH = 16
FILE_BYTES = 1 << 20

_LISTS = ("identityfile", "certificatefile")
_PROXIES = ("proxyjump", "proxycommand")
_TO_LINE_END = ("proxycommand", "localcommand", "knownhostscommand", "remotecommand")
_WITH_TOKENS = ("identityfile", "certificatefile", "revokedhostkeys", "proxyjump", *_TO_LINE_END)
_NUMBERS = ("port", "connecttimeout", "serveraliveinterval", "serveralivecountmax", "requiredrsasize",
            "numberofpasswordprompts")  # fmt: skip
_ALGORITHMS = ("ciphers", "macs", "kexalgorithms", "hostkeyalgorithms", "pubkeyacceptedalgorithms",
               "casignaturealgorithms")  # fmt: skip
_PLAIN = (
    "hostname", "user", "identitiesonly", "identityagent", "hostkeyalias", "userknownhostsfile", "bindinterface",
    "globalknownhostsfile", "stricthostkeychecking", "checkhostip", "addressfamily", "bindaddress", "verifyhostkeydns",
    "preferredauthentications", "pubkeyauthentication", "proxyusefdpass", "permitlocalcommand", "pkcs11provider",
    "nohostauthenticationforlocalhost", "kbdinteractiveauthentication", "passwordauthentication", "batchmode",
    "hashknownhosts",
)  # fmt: skip
_FOLLOWED = frozenset((*_WITH_TOKENS, *_NUMBERS, *_ALGORITHMS, *_PLAIN)) - {"remotecommand"}
_WITHOUT_EFFECT = frozenset((
    "addkeystoagent", "clearallforwardings", "compression", "connectionattempts", "controlmaster",
    "controlpath", "controlpersist", "dynamicforward", "enableescapecommandline", "enablesshkeysign", "escapechar",
    "exitonforwardfailure", "fingerprinthash", "forkafterauthentication", "forwardagent", "forwardx11",
    "forwardx11timeout", "forwardx11trusted", "gatewayports", "gssapiauthentication", "gssapidelegatecredentials",
    "hostbasedauthentication", "ipqos", "localforward", "loglevel",
    "logverbose", "permitremoteopen", "rekeylimit",
    "remotecommand", "remoteforward", "requesttty", "sendenv", "sessiontype", "setenv", "stdinnull",
    "streamlocalbindmask", "streamlocalbindunlink", "syslogfacility", "tcpkeepalive", "tunnel", "tunneldevice",
    "updatehostkeys", "visualhostkey", "xauthlocation",
))  # fmt: skip
_ALIASES = {
    "pubkeyacceptedkeytypes": "pubkeyacceptedalgorithms",
    "challengeresponseauthentication": "kbdinteractiveauthentication",
}
_LEFT_TO_SSH = "is left to ssh, and no ssh client is installed"


class Misread(ValueError):
    """A line that can't be followed without ssh; the text names file and line."""


@dataclass
class _Reader:
    """``place``: file and line that is being read."""

    host: str
    ssh_folder: Path
    settings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    place: str = ""

    def read(self, path: Path, *, is_users: bool, is_active: bool = True, depth: int = 0) -> None:
        may_match = is_active
        for number, keyword, rest in _lines(path, must_be_ours=is_users and depth == 0):
            self.place = f"{path}:{number}"
            if keyword == "host":
                is_active = may_match and self._is_meant(self._split(rest))
            elif keyword == "include":
                self._include(self._split(rest), path, is_users, is_active, depth)
            elif keyword == "match":
                raise self._misread(f"Match {_LEFT_TO_SSH}")
            elif is_active:
                self._keep(_ALIASES.get(keyword, keyword), rest)

    def _is_meant(self, patterns: list[str]) -> bool:
        matching = [pattern for pattern in patterns if _matches(pattern.removeprefix("!"), self.host)]
        return bool(matching) and not any(pattern.startswith("!") for pattern in matching)

    def _include(self, names: list[str], path: Path, is_users: bool, is_active: bool, depth: int) -> None:
        if depth >= INCLUDE_DEPTH:
            raise self._misread("includes more files than ssh follows")
        for name in names:
            if "%" in name or "${" in name or (name.startswith("~") and not name.startswith("~/")):
                raise self._misread(f"Include {name} {_LEFT_TO_SSH}")
            folder = self.ssh_folder if is_users else path.parent
            pattern = self.ssh_folder.parent / name[2:] if name.startswith("~/") else folder / name
            for found in sorted(glob.glob(str(pattern))):  # noqa: PTH207 - the pattern may be absolute
                self.read(Path(found), is_users=is_users, is_active=is_active, depth=depth + 1)

    def _keep(self, keyword: str, rest: str) -> None:
        if keyword in _WITHOUT_EFFECT:
            return
        value = rest if keyword in _TO_LINE_END else " ".join(self._split(rest))
        if not value:
            raise self._misread(f"{keyword} has no value")
        is_known = keyword in _FOLLOWED or (keyword == "canonicalizehostname" and value == "no")
        if not is_known or _needs_ssh(keyword, value):
            raise self._misread(f"{keyword} {value} {_LEFT_TO_SSH}")
        before = self.settings.get(keyword, ())
        if keyword in _LISTS:
            self.settings[keyword] = (*before, value) if value not in before else before
        elif not before and not self._is_ruled_out(keyword, value):
            self.settings[keyword] = (value,)

    def _is_ruled_out(self, keyword: str, value: str) -> bool:
        """A jump and a proxy rule each other out, whichever comes first; no jump rules out nothing."""
        is_no_jump = keyword == "proxyjump" and value.lower() == "none"
        return is_no_jump or (keyword in _PROXIES and any(key in self.settings for key in _PROXIES))

    def _split(self, rest: str) -> list[str]:
        """Return the words of a line, a comment left out."""
        if "\\" in rest or '"#' in rest:
            raise self._misread(f"a backslash or a quoted # {_LEFT_TO_SSH}")
        lexer = shlex.shlex(rest, posix=True, punctuation_chars=False)
        lexer.whitespace_split, lexer.commenters, lexer.quotes = True, "", '"'
        try:
            words = list(lexer)
        except ValueError as error:
            raise self._misread("a quote is not closed") from error
        return list(itertools.takewhile(lambda word: not word.startswith("#"), words))

    def _misread(self, text: str) -> Misread:
        return Misread(clean(f"{self.place}: {text}"))


def read_files(host: str, home: Path, *, file: Path | None = None, system_file: Path = SYSTEM_FILE) -> Settings:
    """Return what the user's and the system's configuration set for ``host``, or ``file`` alone does.

    Raises: Misread naming file and line.
    """
    reader = _Reader(host, home / ".ssh")
    if file is not None:
        reader.read(file, is_users=True, depth=1)
    else:
        for path, is_users in ((home / ".ssh" / "config", True), (system_file, False)):
            if path.exists():
                reader.read(path, is_users=is_users)
    return reader.settings


def _lines(path: Path, *, must_be_ours: bool) -> Iterator[tuple[int, str, str]]:
    """Yield number, keyword in lower case and the rest of each line that says something."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if must_be_ours and (status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022):
                raise Misread(f"{path}: others may write it, so ssh would refuse it too")
            text = os.fsdecode(file.read(FILE_BYTES + 1))
    except OSError as error:
        raise Misread(f"{path}: {error.strerror}") from error
    if len(text) > FILE_BYTES:
        raise Misread(f"{path}: more than {FILE_BYTES >> 20} MiB")
    for number, line in enumerate(text.split("\n"), 1):
        match = re.fullmatch(r'"?([^\s="]+)"?\s*=?\s*(.*)', line.strip())
        if match is not None and not match[1].startswith("#"):
            yield number, match[1].lower(), match[2]


def _matches(pattern: str, host: str) -> bool:
    expression = "".join({"*": ".*", "?": "."}.get(character, re.escape(character)) for character in pattern)
    return re.fullmatch(expression, host, re.DOTALL) is not None


def _needs_ssh(keyword: str, value: str) -> bool:
    if keyword in _NUMBERS:
        return not (value.isascii() and value.isdigit())
    if keyword in _ALGORITHMS:
        return value.startswith(("+", "-", "^")) or "*" in value
    return keyword not in _WITH_TOKENS and ("%" in value or "${" in value)
