"""Which of the algorithms that ssh's configuration names asyncssh can use."""

from __future__ import annotations

from collections.abc import Callable

from asyncssh import encryption, kex, mac, public_key

from console.errors import NodeMisconfigured
from console.transports.known_hosts import Known
from console.transports.ssh_target import Target

_ABLE: dict[str, Callable[[], list[bytes]]] = {
    "ciphers": encryption.get_encryption_algs,
    "kexalgorithms": kex.get_kex_algs,
    "macs": mac.get_mac_algs,
    "hostkeyalgorithms": lambda: [*public_key.get_public_key_algs(), *public_key.get_certificate_algs()],
    "pubkeyacceptedalgorithms": public_key.get_public_key_algs,
}
_WORDS = {"ciphers": "Ciphers", "kexalgorithms": "KexAlgorithms", "macs": "MACs",
          "hostkeyalgorithms": "HostKeyAlgorithms", "pubkeyacceptedalgorithms": "PubkeyAcceptedAlgorithms"}  # fmt: skip
_OPTIONS = {"ciphers": "encryption_algs", "kexalgorithms": "kex_algs", "macs": "mac_algs",
            "pubkeyacceptedalgorithms": "signature_algs"}  # fmt: skip
_CERTIFIED = "-cert-v01@openssh.com"


def usable(target: Target) -> tuple[dict[str, list[str]], list[str]]:
    """Return the names by ssh's keyword that were set and can be used, and a line for those that can't.

    Raises: NodeMisconfigured where none of them can be used, since all others were ruled out.
    """
    chosen: dict[str, list[str]] = {}
    notes = []
    for keyword, names in target.settings.algorithms:
        able = {name.decode() for name in _ABLE[keyword]()}
        chosen[keyword] = [name for name in names if name in able]
        missing = [name for name in names if name not in able and not _is_implied(keyword, name)]
        if missing:
            notes.append(f"{_WORDS[keyword]}: {', '.join(missing)} can't be used here")
        if not chosen[keyword]:
            raise NodeMisconfigured(
                f"{target.label}: none of the {_WORDS[keyword]} of ssh's configuration can be used here"
            )
    return chosen, notes


def options(chosen: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the arguments of `asyncssh.connect` for what `usable` has chosen, but for the host key's algorithms."""
    return {_OPTIONS[keyword]: names for keyword, names in chosen.items() if keyword in _OPTIONS}


def host_key_algorithms(target: Target, known: Known, chosen: dict[str, list[str]]) -> list[str]:
    """Return what to offer a server, in order: those that were set, else those of the keys that are known first.

    Raises: NodeMisconfigured if nothing is left, without an authority no certificate being of use.
    """
    names = chosen.get("hostkeyalgorithms")
    if names is None:
        return known.algorithms()
    left = [name for name in names if known.authorities or not name.endswith(_CERTIFIED)]
    if not left:
        raise NodeMisconfigured(
            f"{target.label}: HostKeyAlgorithms allows certificates alone, and no known_hosts file has an authority"
        )
    return left


def _is_implied(keyword: str, name: str) -> bool:
    """A key with a certificate is signed with like the key itself, which is what asyncssh is told."""
    return keyword == "pubkeyacceptedalgorithms" and name.endswith(_CERTIFIED)
