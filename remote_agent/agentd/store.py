"""Finished runs, one file each, kept longer than their events so that a new laptop has a past."""

from __future__ import annotations

import logging
from pathlib import Path

from remote_agent.agentd.files import read_json, write_whole
from remote_agent.protocol.codec import DecodeError, decode, encode
from remote_agent.protocol.messages import RunRecord

log = logging.getLogger(__name__)

KEEP = 500


class RunStore:
    """The newest finished runs of this node. Holds their names only; records are read when asked for."""

    def __init__(self, directory: Path, keep: int = KEEP) -> None:
        self._directory, self._keep = directory, keep
        files = [(path.stat().st_mtime_ns, path.stem) for path in directory.glob("*.json")]
        self._uids = dict.fromkeys(uid for _, uid in sorted(files))
        self._unsaved: dict[str, RunRecord] = {}

    def add(self, run: RunRecord) -> None:
        """Keep a finished run; one that the disk does not take stays in memory until `retry`."""
        self._uids.pop(run.run_uid, None)
        self._uids[run.run_uid] = None
        self._unsaved[run.run_uid] = run
        self.retry()
        while len(self._uids) > self._keep:
            self._forget(next(iter(self._uids)))

    def retry(self) -> None:
        """Write what the disk did not take before."""
        for uid, run in list(self._unsaved.items()):
            try:
                write_whole(self._directory / f"{uid}.json", encode(run))
            except OSError as error:
                log.warning("run %s can't be kept: %s", uid, error)
                return
            del self._unsaved[uid]

    def get(self, run_uid: str) -> RunRecord | None:
        if run_uid in self._unsaved:
            return self._unsaved[run_uid]
        if run_uid not in self._uids:
            return None
        try:
            return decode(RunRecord, read_json(self._directory / f"{run_uid}.json") or {})
        except DecodeError as error:
            log.warning("run %s can't be read: %s", run_uid, error)
            return None

    def newest(self, limit: int) -> list[RunRecord]:
        """Return the runs that ended last, newest first."""
        found = (self.get(uid) for uid in list(reversed(self._uids))[:limit])
        return [run for run in found if run is not None]

    def stderr_path(self, run_uid: str) -> Path:
        """Return where the processes of a run write their stderr; removed with the run."""
        return self._directory / f"{run_uid}.stderr"

    def _forget(self, uid: str) -> None:
        self._uids.pop(uid, None)
        self._unsaved.pop(uid, None)
        for path in (self._directory / f"{uid}.json", self.stderr_path(uid)):
            path.unlink(missing_ok=True)
