"""Whatever a configuration file holds, it is taken within its bounds or refused with one error."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from qmq_client.errors import ConfigurationError
from qmq_client.settings.config import load_config

# Lines that a tired person, or a program with a fault, may leave behind.
HEADS = [
    "[watchdog]",
    "[[watchdog]]",
    "[broker]",
    "[[database]]",
    "[database.a]",
    "[registry]",
    "[",
]
KEYS = [
    *["poll_s", "batch_rows", "lease_ms", "url", "name", "token", "schema", "keep_sent_s", "x"],
    "",
]
VALUES = [
    *["1", "-1", "nan", "inf", "1e999", "true", "'a'", "'\\n'", "[1]", "{a=1}", "07:00", "["],
    "",
]
LINES = st.one_of(
    st.sampled_from(HEADS),
    st.builds("{} = {}".format, st.sampled_from(KEYS), st.sampled_from(VALUES)),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)


@given(lines=st.lists(LINES, max_size=12), mark=st.sampled_from(["", "\ufeff"]))
def test_whatever_the_file_holds_it_is_taken_or_refused(lines: list[str], mark: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "qmq.toml"
        path.write_text(mark + "\n".join(lines), encoding="utf-8")
        try:
            watchdog = load_config(environment={}, file=path).config.watchdog
        except ConfigurationError:
            return
    assert 0 < watchdog.poll_s <= 86_400
    assert 100 <= watchdog.lease_ms <= 86_400_000
