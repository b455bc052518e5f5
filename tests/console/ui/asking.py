"""Questions of logins, as they are shown."""

from __future__ import annotations

from console.prompts import Asked, Field, Prompt, PromptQueue

HOST_KEY = Prompt(
    "gpu-1: unknown host key",
    (
        "Nothing here knows the host key of 10.0.0.1 port 22.",
        "Accepted, it goes to /home/ops/.local/state/glowplug/known_hosts",
        "ED25519 key, fingerprint",
        f"SHA256:{'k' * 43}",
    ),
    fields=(Field("Type yes or the fingerprint", is_secret=False),),
)
PASSWORD = Prompt(
    "gpu-1: password",
    ("of ops at 10.0.0.1 port 22",),
    ("Welcome [b]ops[/b]. This line is a long one, and goes on and on beyond the width that a dialog has.",),
    (Field("Password"),),
    problem="The password was not accepted.",
)
FACTORS = Prompt(
    "edge, on the way to gpu-1: the server asks",
    ("to let ops in at 192.0.2.1 port 2222",),
    ("Two steps.",),
    (Field("Token:", is_theirs=True), Field("Site:", is_secret=False, is_theirs=True)),
)
STOP = Prompt(
    "gpu-1: stopped",
    (
        "the host key of 10.0.0.1 port 22 has changed.",
        "ED25519 key, fingerprint",
        f"SHA256:{'n' * 43}",
        "known_hosts has",
        f"ED25519 SHA256:{'k' * 43} in /home/ops/.ssh/known_hosts:12",
        "Somebody may be listening, or the host was set up anew. Glowplug does not connect.",
    ),
)


def asking(*prompts: Prompt) -> PromptQueue:
    """A queue in which these wait, with nobody who waits for an answer."""
    return PromptQueue([Asked(prompt, index, False, None) for index, prompt in enumerate(prompts)])
