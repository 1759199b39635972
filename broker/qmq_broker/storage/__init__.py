"""The data directory of one broker: all files, without the logic of groups and consumers.

::

    store.py         the interface for the service
      retention.py   deletes the oldest segments
      saving.py      derived files that an open store writes for the next start
      keepers.py     the archives that retention waits for
      recovery.py    a start: examine, derive, repair, raise the epoch
      commit_log.py  append messages
      reading.py     read messages back
      staging.py     effects of a frame of the log on queues and schedule
      refusals.py    log lines about work that has no room
    queues/          places of the messages of a subject in the log
    index/           messages by id and by key
    schedule/        messages that wait for their time
    ids/             recognition of repeated messages
    logs/            append-only logs in segments: the commit log and the action log
    files/           the disk port, names, and small files
    upkeep/          operator's work on a stopped broker: verify, rebuild, back up, quarantine

New readers: begin with `files/layout.py` and `logs/segmented_log.py`, then `commit_log.py`.
"""
