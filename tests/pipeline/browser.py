"""A real browser, found or installed, that opens a file and says what it saw."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.conftest import require

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_DEADLINE_S: Final = 120
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)


def find_browser() -> str:
    """Where it is; installed where that may be, else the test is skipped or failed."""
    return str(require("chromium", _on_path))


def _on_path() -> Path | None:
    return next((Path(found) for name in _NAMES if (found := shutil.which(name))), None)


def look_at(page: Path, *, is_dark: bool = False, picture: Path | None = None) -> tuple[str, str]:
    """The page's document as the browser has made it, and what its console said."""
    command = [find_browser(), *_FLAGS, f"--user-data-dir={page.parent / 'browser'}"]
    if is_dark:
        command.append("--blink-settings=preferredColorScheme=0")
    asked = [f"--screenshot={picture}", "--window-size=1100,4200"] if picture else ["--dump-dom"]
    done = subprocess.run(
        [*command, *asked, page.as_uri()],
        check=True,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)
