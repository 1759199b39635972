"""The data directory of one broker: everything on disk, with no knowledge of what it means to
consumers.

::

    store.py         the face of all of it, for the service
      retention.py   where the log begins, and how it gets shorter
      saving.py      what an open store writes down for the next start
      keepers.py     whom retention waits for
      recovery.py    one start: examine, derive, mend, raise the epoch
      commit_log.py  append messages
      reading.py     read messages back
      staging.py     what a frame of the log means for queues and schedule
      refusals.py    what the log says of work that has no room
    queues/          where the messages of a subject stand in the log
    index/           messages by id and by key
    schedule/        messages that wait for their time
    ids/             which messages were stored already
    logs/            append-only logs in segments: the commit log and the action log
    files/           the disk port, names, and small files
    upkeep/          what an operator does while no broker runs: verify, rebuild, back up, give up

First-time readers: begin with `files/layout.py` and `logs/segmented_log.py`, then `commit_log.py`.
"""
