"""Runs by ``python -c`` under whatever Python a host has: tells what it is and what it can import.

Written so that an old one can read it, to say that it is old. Nothing of torch is run: its version file says what it
was built for. With ``brief`` in place of a token, one word.
"""

import importlib.util
import runpy
import sys
from pathlib import Path


def tell(name: str, value: str) -> None:
    print(f"\n{sys.argv[1]} {name}={value}")


def find(name: str) -> str:
    """Return where a package is, empty where it is not."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    return (spec.origin or name) if spec is not None else ""


def main() -> None:
    fits = sys.version_info >= (3, 10)
    torch = find("torch") if fits else ""
    if sys.argv[1] == "brief":
        print("torch" if torch else "plain" if fits else "old")
        return
    tell("python", sys.executable)
    tell("python.version", sys.version.split()[0])
    if not fits:
        return
    tell("python.fits", "yes")
    if torch:
        built = runpy.run_path(str(Path(torch).with_name("version.py")))
        tell("torch.version", built["__version__"])
        tell("torch.cuda", built.get("cuda") or built.get("hip") or "")
    tell("missing", " ".join(name for name in ("safetensors", "transformers", "cuda.bindings") if not find(name)))


if __name__ == "__main__":
    main()
