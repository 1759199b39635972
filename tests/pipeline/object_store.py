"""A stand-in for an object store: what pyarrow asks of S3, over HTTP, kept as files below a folder.

Keys are paths, so that another program may look at the same objects by a file system of its own. Nobody is asked
who he is. What is not needed by the tables is answered with 501.
"""

from __future__ import annotations

import email.utils
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BytesIO
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

#: An upload in parts is kept beside the buckets until it is complete.
_PARTS = ".parts"


@contextmanager
def object_store(folder: Path) -> Iterator[dict[str, str]]:
    """Serve the buckets that are folders in `folder`; the environment in which pyarrow finds them."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Of", (_Handler,), {"folder": folder}))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    folder: Path
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *_: object) -> None:
        """Nobody reads it."""

    # ---- requests ----------------------------------------------------------------------------

    def do_HEAD(self) -> None:
        path, _ = self._asked()
        if path.is_dir() and path.parent == self.folder:
            self._answer(200, b"", {"x-amz-bucket-region": "us-east-1"})
        elif path.is_file():
            self._answer(200, b"", self._about(path), length=path.stat().st_size)
        else:
            self._answer(404, b"")

    def do_GET(self) -> None:
        path, query = self._asked()
        if "list-type" in query:
            self._list(path, query)
        elif path.is_file():
            self._give(path)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_PUT(self) -> None:
        path, query = self._asked()
        content = self._content()
        if "uploadId" in query:
            number = int(query["partNumber"][0])
            path = self.folder / _PARTS / query["uploadId"][0] / f"{number:05d}"
        if not path.name or path.parent == self.folder:
            path.mkdir(exist_ok=True)
        elif self._is_folder():
            path.mkdir(parents=True, exist_ok=True)
        elif self.headers.get("If-None-Match") == "*" and path.exists():
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self._answer(200, b"", {"ETag": _etag(content)})

    def do_POST(self) -> None:
        path, query = self._asked()
        content = self._content()
        if "uploads" in query:
            upload = hashlib.sha256(str(path).encode()).hexdigest()[:16]
            (self.folder / _PARTS / upload).mkdir(parents=True, exist_ok=True)
            made = f"<UploadId>{upload}</UploadId>"
            self._xml(f"<InitiateMultipartUploadResult>{made}</InitiateMultipartUploadResult>")
        elif "uploadId" in query:
            parts = sorted((self.folder / _PARTS / query["uploadId"][0]).iterdir())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(one.read_bytes() for one in parts))
            for one in parts:
                one.unlink()
            self._xml(
                "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"
            )
        else:
            self._answer(501, content[:0])

    def do_DELETE(self) -> None:
        path, _ = self._asked()
        if path.is_file():
            path.unlink()
        self._answer(204, b"")

    # ---- parts of them -----------------------------------------------------------------------

    def _asked(self) -> tuple[Path, dict[str, list[str]]]:
        url = urlsplit(self.path)
        name = unquote(url.path).strip("/")
        return self.folder / name, parse_qs(url.query, keep_blank_values=True)

    def _is_folder(self) -> bool:
        return urlsplit(self.path).path.endswith("/")

    def _content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b"".join(_chunks(self.rfile))
        else:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            content = b"".join(_chunks(BytesIO(content)))
        return content

    def _list(self, bucket: Path, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        by_folder = query.get("delimiter", [""])[0] == "/"
        keys = sorted(str(one.relative_to(bucket)) for one in bucket.rglob("*") if one.is_file())
        here = [key for key in keys if key.startswith(prefix)]
        deeper = {
            prefix + key[len(prefix) :].partition("/")[0] + "/"
            for key in here
            if "/" in key[len(prefix) :]
        }
        files = [key for key in here if not (by_folder and "/" in key[len(prefix) :])]
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{(bucket / key).stat().st_size}</Size>"
            "<LastModified>2026-01-31T00:00:00.000Z</LastModified></Contents>"
            for key in files
        )
        if by_folder:
            found += "".join(
                f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
                for one in sorted(deeper)
            )
        count = f"<KeyCount>{len(files)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._xml(f"<ListBucketResult>{count}{found}</ListBucketResult>")

    def _give(self, path: Path) -> None:
        content = path.read_bytes()
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, content, self._about(path))
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin = int(first) if first else max(0, len(content) - int(last))
        after = int(last) + 1 if first and last else len(content)
        part = content[begin:after]
        said = f"bytes {begin}-{begin + len(part) - 1}/{len(content)}"
        self._answer(206, part, {**self._about(path), "Content-Range": said})

    def _about(self, path: Path) -> dict[str, str]:
        modified = email.utils.formatdate(path.stat().st_mtime, usegmt=True)
        return {"ETag": '"e"', "Last-Modified": modified}

    def _xml(self, text: str) -> None:
        head = '<?xml version="1.0" encoding="UTF-8"?>'
        self._answer(200, f"{head}{text}".encode(), {"Content-Type": "application/xml"})

    def _answer(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str] | None = None,
        *,
        length: int = -1,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length if length >= 0 else len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()}"'


def _chunks(stream: BufferedIOBase) -> Iterator[bytes]:
    """What stands in pieces with their lengths before them, up to what is behind the last one."""
    while length := int(stream.readline().partition(b";")[0], 16):
        yield stream.read(length)
        stream.readline()
    while stream.readline().strip():
        pass
