"""A test does not meet what another one's command set up."""

from __future__ import annotations

import logging
import sys

from tests.kit.company import put_back


def test_loggers_and_the_path_are_as_they_were() -> None:
    known, new = logging.getLogger(f"{__name__}.known"), f"{__name__}.new"
    handler, path = logging.NullHandler(), sys.path[:]
    known.setLevel(logging.WARNING)
    known.addHandler(handler)
    assert known.isEnabledFor(logging.WARNING)  # which it remembers
    with put_back():
        for name in (known.name, new):
            logging.getLogger(name).setLevel(logging.ERROR)
            logging.getLogger(name).addHandler(logging.StreamHandler())
        assert not known.isEnabledFor(logging.WARNING)
        sys.path.insert(0, "")
    assert (known.level, known.handlers, sys.path) == (logging.WARNING, [handler], path)
    assert known.isEnabledFor(logging.WARNING)
    assert logging.getLogger(new).level == logging.NOTSET
    assert logging.getLogger(new).handlers == []
