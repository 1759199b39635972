"""`python -m qmq_client`: the `qmq` command, for use if its script is not on the path."""

from __future__ import annotations

from qmq_client.cli import main

if __name__ == "__main__":
    main()
