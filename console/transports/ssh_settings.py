"""What of ssh's configuration is followed, what is said to be not followed, and what is refused. Pure.

The rule: host keys are checked as strictly as ours are, or more strictly where ssh's
configuration asks for that. A setting that guards something and can't be followed ends the
connect with a line that names it. One that would only loosen, or that does something beside
the login, is said in a line. The rest is listed in ``docs/ssh.md`` and says nothing.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from console.transports.ssh_oracle import Settings

_ON = ("yes", "true")
_OFF = ("no", "false", "off")
_NOWHERE = ("none", "/dev/null")
_ALGORITHMS = ("ciphers", "kexalgorithms", "macs", "hostkeyalgorithms", "pubkeyacceptedalgorithms")


METHODS = ("publickey", "keyboard-interactive", "password")
"""Ways to log in that can be used here, in ssh's order."""
_SWITCHES = {
    "publickey": "pubkeyauthentication",
    "keyboard-interactive": "kbdinteractiveauthentication",
    "password": "passwordauthentication",
}


class NewHostKeys(enum.Enum):
    """What becomes of a host key that nothing is known of."""

    ASK = "ask"
    ACCEPT = "accept"
    NEVER = "never"


class Refused(ValueError):
    """A setting that guards something, or without which there is no way to the host, can't be followed."""


@dataclass(frozen=True)
class SshSettings:
    """One host's settings; every default is what holds where ssh is not asked.

    Paths and commands hold their tokens. ``user_known_hosts`` and ``system_known_hosts`` None: the usual
    files. ``algorithms``: names by ssh's keyword, only where somebody has set them. ``notes``: what is not
    followed, a line each.
    """

    host: str | None = None
    user: str | None = None
    port: int | None = None
    identity_files: tuple[str, ...] | None = None
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    host_key_alias: str | None = None
    user_known_hosts: tuple[str, ...] | None = None
    system_known_hosts: tuple[str, ...] | None = None
    revoked_host_keys: str | None = None
    known_hosts_command: str | None = None
    new_host_keys: NewHostKeys = NewHostKeys.ASK
    hash_known_hosts: bool = False
    batch_mode: bool = False
    login_methods: tuple[str, ...] = METHODS
    password_prompts: int = 3
    check_host_ip: bool = False
    required_rsa_bits: int = 0
    authority_algorithms: tuple[str, ...] = ()
    algorithms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    proxy_jump: str | None = None
    proxy_command: str | None = None
    connect_timeout_s: float | None = None
    alive_interval_s: int = 0
    alive_count_max: int = 3
    address_family: str = "any"
    bind_address: str | None = None
    bind_interface: str | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def keys_allowed(self) -> bool:
        return "publickey" in self.login_methods


def read_settings(settings: Settings, usual: Settings) -> SshSettings:
    """Return what is followed of an answer; ``usual``: the answer for a host that nothing was set for.

    Raises: Refused.
    """
    if not settings:
        return SshSettings()
    _refuse(settings)
    strict = _first(settings, "stricthostkeychecking", "ask").lower()
    return SshSettings(
        host=_first(settings, "hostname") or None,
        user=_first(settings, "user") or None,
        port=_number(settings, "port") or None,
        identity_files=_unless_none(settings.get("identityfile")),
        certificate_files=_unless_none(settings.get("certificatefile")) or (),
        identities_only=_is_on(settings, "identitiesonly"),
        identity_agent=_first(settings, "identityagent") or None,
        host_key_alias=_first(settings, "hostkeyalias") or None,
        user_known_hosts=_files(settings, "userknownhostsfile"),
        system_known_hosts=_files(settings, "globalknownhostsfile"),
        revoked_host_keys=_named(settings, "revokedhostkeys"),
        known_hosts_command=_named(settings, "knownhostscommand"),
        new_host_keys=_new_host_keys(strict),
        hash_known_hosts=_is_on(settings, "hashknownhosts"),
        batch_mode=_is_on(settings, "batchmode"),
        login_methods=_login_methods(settings),
        password_prompts=_number(settings, "numberofpasswordprompts") or 3,
        check_host_ip=_is_on(settings, "checkhostip"),
        required_rsa_bits=_number(settings, "requiredrsasize"),
        authority_algorithms=_words(_first(settings, "casignaturealgorithms")),
        algorithms=tuple(
            (key, _words(_first(settings, key)))
            for key in _ALGORITHMS
            if settings.get(key) and settings.get(key) != usual.get(key)
        ),
        proxy_jump=_named(settings, "proxyjump"),
        proxy_command=_named(settings, "proxycommand"),
        connect_timeout_s=_number(settings, "connecttimeout") or None,
        alive_interval_s=_number(settings, "serveraliveinterval"),
        alive_count_max=_number(settings, "serveralivecountmax") or 3,
        address_family=_first(settings, "addressfamily", "any").lower(),
        bind_address=_named(settings, "bindaddress"),
        bind_interface=_named(settings, "bindinterface"),
        notes=tuple(_notes(settings, strict)),
    )


def expand(text: str, tokens: Mapping[str, str], environ: Mapping[str, str] | None) -> str:
    """Return ``text`` with its ``%x`` and, where ``environ`` is given, its ``${NAME}`` filled in, in one pass.

    Raises: Refused for a token or variable that has no value here.
    """

    def fill(match: re.Match[str]) -> str:
        if match[1] is not None:
            if match[1] not in tokens:
                raise Refused(f"{text!r}: %{match[1]} can't be filled in here")
            return tokens[match[1]]
        if environ is None:
            return match[0]
        if match[2] not in environ:
            raise Refused(f"{text!r}: there is no variable {match[2]}")
        return environ[match[2]]

    return re.sub(r"%(.?)|\$\{([^}]*)\}", fill, text, flags=re.DOTALL)


def split_files(text: str) -> tuple[str, ...]:
    """Return the files of a list as ``ssh -G`` prints it, which is without the quotes around spaces.

    So a word begins a file where it looks absolute, and else goes on with the one before.

    Raises: Refused for a relative name, where the two can't be told apart.
    """
    files: list[str] = []
    for word in text.split(" "):
        if word.startswith(("/", "~")) or (word and not files):
            files.append(word)
        elif files:
            files[-1] += f" {word}"
    relative = [name for name in files if not name.startswith(("/", "~"))]
    if relative:
        raise Refused(f"a known_hosts file is named by a relative path, {relative[0]!r}; name it from / or ~/")
    return tuple(files)


def _refuse(settings: Settings) -> None:
    if not _login_methods(settings):
        raise Refused("ssh's configuration allows no login by key, by password, or by the server's questions")
    if _is_on(settings, "proxyusefdpass") and _named(settings, "proxycommand"):
        raise Refused("ProxyUseFdpass can't be followed: its ProxyCommand hands over a socket, not a stream")


def _notes(settings: Settings, strict: str) -> list[str]:
    notes = []
    if strict in _OFF:
        notes.append("StrictHostKeyChecking no is followed as accept-new: a host key that has changed is refused")
    if _first(settings, "userknownhostsfile").lower() in _NOWHERE:
        notes.append("UserKnownHostsFile names no file, so only the system's and Glowplug's own vouch for host keys")
    if _first(settings, "verifyhostkeydns").lower() in (*_ON, "ask"):
        notes.append("VerifyHostKeyDNS is not followed: a key from DNS does not vouch for a host")
    if _is_on(settings, "nohostauthenticationforlocalhost"):
        notes.append("NoHostAuthenticationForLocalhost is not followed: host keys are always checked")
    if _is_on(settings, "permitlocalcommand") and _named(settings, "localcommand"):
        notes.append("LocalCommand is not run")
    if _named(settings, "pkcs11provider"):
        notes.append("PKCS11Provider is not used: add its keys to an ssh-agent")
    return notes


def _new_host_keys(strict: str) -> NewHostKeys:
    if strict in _ON:
        return NewHostKeys.NEVER
    return NewHostKeys.ACCEPT if strict in (*_OFF, "accept-new") else NewHostKeys.ASK


def _login_methods(settings: Settings) -> tuple[str, ...]:
    """Return what PreferredAuthentications and the switches leave of `METHODS`, in the user's order."""
    wanted = _words(_first(settings, "preferredauthentications")) or METHODS
    return tuple(
        name for name in wanted if name in METHODS and _first(settings, _SWITCHES[name], "yes").lower() not in _OFF
    )


def _files(settings: Settings, key: str) -> tuple[str, ...] | None:
    text = _first(settings, key)
    return None if not text else () if text.lower() in _NOWHERE else split_files(text)


def _first(settings: Settings, key: str, default: str = "") -> str:
    values = settings.get(key)
    return values[0] if values else default


def _named(settings: Settings, key: str) -> str | None:
    value = _first(settings, key)
    return None if value.lower() in ("", "none") else value


def _unless_none(values: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(value for value in values if value.lower() != "none")


def _number(settings: Settings, key: str) -> int:
    """Return a setting's number; 0 for ``none`` and where there is no such setting."""
    value = _first(settings, key)
    return int(value) if value.isascii() and value.isdigit() else 0


def _is_on(settings: Settings, key: str) -> bool:
    return _first(settings, key).lower() in _ON


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)
